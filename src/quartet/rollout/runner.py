"""Model calls of the native engine: one forward per step, for new prompt tokens and running requests together.

Shapes: B running requests, T tokens of blocks to fill, R >= B + T rows computed, D hidden,
V vocabulary.

A forward costs the same few milliseconds of small operations and the same reading of the weights for few rows as for
many, so prompts ride along with decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quartet.config import UserError
from quartet.models.attention import AttentionContext
from quartet.models.exact import row_step
from quartet.models.packed import PackedCausalLM
from quartet.rollout.admission import Fill
from quartet.rollout.cache import KVCache
from quartet.rollout.contexts import Contexts, FastContexts, StepAttention, begins
from quartet.rollout.exact_contexts import ExactContexts
from quartet.rollout.prefix_cache import Block
from quartet.rollout.rows import Rows


def choose_contexts(packed: PackedCausalLM) -> Contexts:
    """The attention of an engine that generates with ``packed``.

    Raises:
        UserError: the model asks for exact numerics on a device whose products' bits depend on the number of rows.
    """
    if packed.numerics == "exact":
        if packed.device.type != "cpu":
            raise UserError(
                "exact numerics need the CPU",
                found=f"a model on {packed.device}, where the bits of a product depend on the number of rows",
                remedy="run on the CPU in fp32, or set numerics: fast",
            )
        return ExactContexts(row_step(packed.body))
    return FastContexts(shares_prefixes=packed.shares_prefixes)


class ModelRunner:
    def __init__(self, packed: PackedCausalLM, contexts: Contexts) -> None:
        self.packed = packed
        self.contexts = contexts

    def step(
        self, cache: KVCache, rows: Rows | None, fills: Sequence[Fill], wanted: Sequence[Block]
    ) -> tuple[Tensor, Tensor]:
        """Decodes one token of each of ``rows`` and fills blocks.

        Args:
            wanted: blocks whose following logits are asked for, complete after this step; repeats cost nothing.

        Returns:
            ``[B, V]`` logits after each row's newest token, and ``[W, V]`` after each wanted block.
        """
        fills = sorted(fills, key=lambda fill: (not begins(fill), fill.end if begins(fill) else 0))
        num_rows = 0 if rows is None else rows.num_rows
        sizes = [fill.end - fill.start for fill in fills]
        total = num_rows + sum(sizes)
        hidden = self._forward(cache, rows, fills, total) if total else None
        end = num_rows
        for fill, size in zip(fills, sizes, strict=True):
            end += size
            fill.block.done = fill.end
            if fill.finishes and hidden is not None:
                # A view would keep the whole step's hidden states alive.
                fill.block.finish(hidden[end - 1].clone())
        blocks = list(dict.fromkeys(wanted))
        logits = self._logits(hidden, num_rows, blocks)
        place = {block: num_rows + i for i, block in enumerate(blocks)}
        return logits[:num_rows], logits[[place[block] for block in wanted]]

    def _forward(self, cache: KVCache, rows: Rows | None, fills: Sequence[Fill], total: int) -> Tensor:
        """``[R, D]`` hidden states: rows, then fills, then others."""
        computed = self.contexts.padded_rows(total)
        parts: list[tuple[AttentionContext, int]] = []
        if rows is not None:
            parts.append((self.contexts.decode(cache, rows), rows.num_rows))
        if fills:
            parts.append((self.contexts.fill(fills), sum(fill.end - fill.start for fill in fills)))
        context = parts[0][0] if len(parts) == 1 and computed == total else StepAttention(parts)
        return self.packed.hidden(*self._inputs(rows, fills, computed), context)

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

    def _logits(self, hidden: Tensor | None, num_rows: int, blocks: Sequence[Block]) -> Tensor:
        """``[B + blocks, V]``, computed on enough rows."""
        wanted = num_rows + len(blocks)
        computed = self.contexts.padded_rows(wanted)
        if hidden is not None and not blocks and hidden.shape[0] == computed:
            return self.packed.logits(hidden)[:wanted]
        if not wanted:
            return torch.zeros(0, self.packed.vocab_size, device=self.packed.device)
        picked = [] if hidden is None else [hidden[:num_rows]]
        picked += [block.last_hidden.unsqueeze(0) for block in blocks if block.last_hidden is not None]
        states = F.pad(torch.cat(picked), (0, 0, 0, computed - wanted))
        return self.packed.logits(states)[:wanted]
