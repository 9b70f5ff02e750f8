"""Model calls of the native engine: one forward per step, for new prompt tokens and running requests together.

Shapes: B new tokens of running requests (one of each, or more), T tokens of blocks to fill, R >= B + T rows computed,
D hidden, V vocabulary.

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
from quartet.models.memory import to_device
from quartet.models.packed import PackedCausalLM
from quartet.rollout.admission import PrefillChunk
from quartet.rollout.cache import KVCache
from quartet.rollout.contexts import Contexts, FastContexts, PlainContexts, StepAttention, begins
from quartet.rollout.exact_contexts import ExactContexts
from quartet.rollout.prefix_cache import Block
from quartet.rollout.rows import DecodeRows, DraftRows


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
    kind = FastContexts if packed.device.type == "cpu" else PlainContexts
    return kind(shares_prefixes=packed.shares_prefixes)


class ModelRunner:
    def __init__(self, packed: PackedCausalLM, contexts: Contexts) -> None:
        self.packed = packed
        self.contexts = contexts

    def step(
        self,
        cache: KVCache,
        rows: DecodeRows | None,
        prefills: Sequence[PrefillChunk],
        wanted: Sequence[Block],
        spans: DraftRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Decodes new tokens of ``rows`` and fills blocks.

        Args:
            rows: None where nothing runs.
            spans: the rows' new tokens; None: the newest of each.
            wanted: blocks whose following logits are asked for, complete after this step; repeats cost nothing.

        Returns:
            ``[B, V]`` logits after each new token of the rows, and ``[W, V]`` after each wanted block.
        """
        prefills = sorted(prefills, key=lambda prefill: (not begins(prefill), prefill.end if begins(prefill) else 0))
        num_rows = _num_new(rows, spans)
        sizes = [prefill.end - prefill.start for prefill in prefills]
        total = num_rows + sum(sizes)
        hidden = self._forward(cache, rows, prefills, total, spans) if total else None
        end = num_rows
        for prefill, size in zip(prefills, sizes, strict=True):
            end += size
            prefill.block.done = prefill.end
            if prefill.finishes and hidden is not None:
                # A view would keep the whole step's hidden states alive.
                prefill.block.finish(hidden[end - 1].clone())
        blocks = list(dict.fromkeys(wanted))
        logits = self._logits(hidden, num_rows, blocks)
        place = {block: num_rows + i for i, block in enumerate(blocks)}
        places = torch.tensor([place[block] for block in wanted], dtype=torch.int64)
        return logits[:num_rows], logits[to_device(places, logits.device)]

    def _forward(
        self,
        cache: KVCache,
        rows: DecodeRows | None,
        prefills: Sequence[PrefillChunk],
        total: int,
        spans: DraftRows | None,
    ) -> Tensor:
        """``[R, D]`` hidden states: rows, then fills, then others."""
        computed = self.contexts.padded_rows(total)
        parts: list[tuple[AttentionContext, int]] = []
        if rows is not None:
            parts.append((self.contexts.decode(cache, rows, spans), _num_new(rows, spans)))
        if prefills:
            parts.append((self.contexts.prefill(prefills), sum(prefill.end - prefill.start for prefill in prefills)))
        context = parts[0][0] if len(parts) == 1 and computed == total else StepAttention(parts)
        return self.packed.hidden(*self._inputs(rows, prefills, computed, spans), context)

    def _inputs(
        self, rows: DecodeRows | None, prefills: Sequence[PrefillChunk], computed: int, spans: DraftRows | None
    ) -> tuple[Tensor, Tensor]:
        """Tokens and positions ``[R]``: rows, then fills, then zeros."""
        if rows is not None and spans is None and not prefills and computed <= len(rows.tokens):
            return rows.tokens[:computed], rows.positions[:computed]
        num_rows = _num_new(rows, spans)
        new = [token for prefill in prefills for token in prefill.token_ids]
        missing = computed - num_rows - len(new)
        rest = torch.zeros(missing, dtype=torch.int64)
        places = [torch.arange(prefill.start, prefill.end) + prefill.block.start for prefill in prefills]
        filled = torch.stack([torch.cat([torch.tensor(new, dtype=torch.int64), rest]), torch.cat([*places, rest])])
        tokens, positions = to_device(filled, self.packed.device).unbind(0)
        if rows is None:
            return tokens, positions
        own = spans or rows
        return torch.cat([own.tokens[:num_rows], tokens]), torch.cat([own.positions[:num_rows], positions])

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


def _num_new(rows: DecodeRows | None, spans: DraftRows | None) -> int:
    if spans is not None:
        return len(spans.tokens)
    return 0 if rows is None else rows.num_rows
