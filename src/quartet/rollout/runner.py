"""Model calls of the native engine: one forward per step, for new prompt tokens and running requests together.

Shapes: B running requests, T tokens of blocks to fill, R >= B + T rows computed, D hidden, V vocabulary.

A forward costs the same few milliseconds of small operations and the same reading of the weights for few rows as for
many, so prompts ride along with decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quartet.models.attention import AttentionContext
from quartet.models.exact import row_step
from quartet.models.packed import PackedCausalLM
from quartet.rollout.admission import Fill
from quartet.rollout.cache import KVCache
from quartet.rollout.contexts import Contexts, FastContexts, StepAttention, begins
from quartet.rollout.exact_contexts import ExactContexts
from quartet.rollout.rows import Rows


def choose_contexts(packed: PackedCausalLM) -> Contexts:
    """The attention of an engine that generates with ``packed``."""
    if packed.numerics == "exact":
        return ExactContexts(row_step(packed.body))
    return FastContexts(shares_prefixes=packed.shares_prefixes)


class ModelRunner:
    def __init__(self, packed: PackedCausalLM, contexts: Contexts) -> None:
        self.packed = packed
        self.contexts = contexts

    def step(self, cache: KVCache, rows: Rows | None, fills: Sequence[Fill]) -> Tensor | None:
        """Decodes one token of each of ``rows`` and fills blocks; blocks that are complete then have their logits.

        Returns:
            ``[B, V]`` logits after each row's newest token, None without rows.
        """
        fills = sorted(fills, key=lambda fill: (not begins(fill), fill.end if begins(fill) else 0))
        num_rows = 0 if rows is None else rows.num_rows
        sizes = [fill.end - fill.start for fill in fills]
        parts: list[tuple[AttentionContext, int]] = []
        if rows is not None:
            parts.append((self.contexts.decode(cache, rows), num_rows))
        if fills:
            parts.append((self.contexts.fill(fills), sum(sizes)))
        total = num_rows + sum(sizes)
        computed = self.contexts.padded_rows(total)
        tokens, positions = self._inputs(rows, fills, computed)
        context = parts[0][0] if len(parts) == 1 and computed == total else StepAttention(parts)
        hidden = self.packed.hidden(tokens, positions, context)
        ends = torch.tensor(sizes).cumsum(0) + num_rows - 1
        finished = [(fill, end) for fill, end in zip(fills, ends.tolist(), strict=True) if fill.finishes]
        for fill in fills:
            fill.block.done = fill.end
        if not num_rows and not finished:
            return None
        logits = self._logits(hidden, num_rows, [end for _, end in finished])
        for i, (fill, _) in enumerate(finished):
            # A view would keep the whole step's logits alive.
            fill.block.finish(logits[num_rows + i].clone())
        return logits[:num_rows] if rows is not None else None

    def _inputs(self, rows: Rows | None, fills: Sequence[Fill], computed: int) -> tuple[Tensor, Tensor]:
        """Tokens and positions ``[R]``: rows, then fills, then zeros."""
        if rows is not None and not fills and computed <= len(rows.tokens):
            return rows.tokens[:computed], rows.positions[:computed]
        device = self.packed.device
        num_rows = 0 if rows is None else rows.num_rows
        new = [token for fill in fills for token in fill.token_ids]
        new += [0] * (computed - num_rows - len(new))
        tokens = torch.tensor(new, device=device)
        spans = [torch.arange(fill.start, fill.end) + fill.block.start for fill in fills]
        positions = torch.zeros_like(tokens)
        positions[: sum(map(len, spans))] = torch.cat(spans).to(device) if spans else 0
        if rows is None:
            return tokens, positions
        return torch.cat([rows.tokens[:num_rows], tokens]), torch.cat([rows.positions[:num_rows], positions])

    def _logits(self, hidden: Tensor, num_rows: int, ends: Sequence[int]) -> Tensor:
        """``[B + finished, V]``, computed on enough rows."""
        wanted = num_rows + len(ends)
        computed = self.contexts.padded_rows(wanted)
        if not ends and hidden.shape[0] == computed:
            return self.packed.logits(hidden)[:wanted]
        # Any rows fill up.
        index = [*range(num_rows), *ends, *[0] * (computed - wanted)]
        return self.packed.logits(hidden[torch.tensor(index, device=hidden.device)])[:wanted]
