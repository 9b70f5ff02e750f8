"""Model calls of the native engine: one forward per step, for new prompt tokens and running requests together.

Shapes: B new tokens of running requests (one of each, or more), T tokens of blocks to fill, R >= B + T rows computed,
D hidden, V vocabulary.

A forward costs the same few milliseconds of small operations and the same reading of the weights for few rows as for
many, so prompts ride along with decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quartet.models.attention import AttentionContext
from quartet.models.exact import row_step
from quartet.models.memory import to_device
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.prefix_cache import Block, KVCache
from quartet.rollout.rows import DecodeRows, DraftRows
from quartet.rollout.scheduler import PrefillChunk
from quartet.rollout.step_attention import Contexts, ExactContexts, PlainContexts, StepAttention, begins


def choose_contexts(packed: PackedCausalLM) -> Contexts:
    """The attention of an engine that generates with ``packed``."""
    if packed.numerics == "exact":
        return ExactContexts(row_step(packed.body))
    if packed.device.type != "cpu":
        # Reading prompts in place takes some thirty operations per prompt and layer, each a kernel to launch: a step of
        # 0.5 B with 32 prompts took 219 ms on an H200. Copied prompts take none.
        return PlainContexts(shares_prefixes=False)
    return Contexts(shares_prefixes=packed.shares_prefixes)


@dataclass(frozen=True)
class StepOutputs:
    """
    Attributes:
        logits, hidden: ``[B, V]`` and ``[B, D]`` at each new token of the rows.
        first_logits, first_hidden: ``[W, V]`` and ``[W, D]`` at the end of each wanted block.
    """

    logits: Tensor
    hidden: Tensor
    first_logits: Tensor
    first_hidden: Tensor


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
    ) -> StepOutputs:
        """Decodes new tokens of ``rows`` and fills blocks.

        Args:
            rows: None where nothing runs.
            spans: the rows' new tokens; None: the newest of each.
            wanted: blocks whose following logits are asked for, complete after this step; repeats cost nothing.
        """
        prefills = sorted(prefills, key=lambda prefill: (not begins(prefill), prefill.end if begins(prefill) else 0))
        num_rows = 0 if rows is None else rows.num_rows if spans is None else len(spans.tokens)
        sizes = [prefill.end - prefill.start for prefill in prefills]
        parts: list[tuple[AttentionContext, int]] = []
        if rows is not None:
            parts.append((self.contexts.decode(cache, rows, spans), num_rows))
        if prefills:
            parts.append((self.contexts.prefill(prefills), sum(sizes)))
        hidden = None
        if total := num_rows + sum(sizes):
            computed = self.contexts.padded_rows(total)
            context = parts[0][0] if len(parts) == 1 and computed == total else StepAttention(parts)
            hidden = self.packed.hidden(*self._inputs(spans or rows, num_rows, prefills, computed), context)
        end = num_rows
        for prefill, size in zip(prefills, sizes, strict=True):
            end += size
            prefill.block.done = prefill.end
            if prefill.finishes and hidden is not None:
                # A view would keep the whole step's hidden states alive.
                prefill.block.finish(hidden[end - 1].clone())
        blocks = list(dict.fromkeys(wanted))
        states = self._states(hidden, num_rows, blocks)
        logits = self.packed.logits(states) if len(states) else states.new_zeros(0, self.packed.vocab_size)
        place = {block: num_rows + i for i, block in enumerate(blocks)}
        places = torch.tensor([place[block] for block in wanted], dtype=torch.int64)
        places = to_device(places, logits.device)
        return StepOutputs(logits[:num_rows], states[:num_rows], logits[places], states[places])

    def _inputs(
        self, new: DecodeRows | DraftRows | None, num_rows: int, prefills: Sequence[PrefillChunk], computed: int
    ) -> tuple[Tensor, Tensor]:
        """Tokens and positions ``[R]``: rows, then fills, then zeros."""
        if new is not None and not prefills and computed <= len(new.tokens):
            return new.tokens[:computed], new.positions[:computed]
        filling = [token for prefill in prefills for token in prefill.token_ids]
        rest = torch.zeros(computed - num_rows - len(filling), dtype=torch.int64)
        places = [torch.arange(prefill.start, prefill.end) + prefill.block.start for prefill in prefills]
        filled = torch.stack([torch.cat([torch.tensor(filling, dtype=torch.int64), rest]), torch.cat([*places, rest])])
        tokens, positions = to_device(filled, self.packed.device).unbind(0)
        if new is None:
            return tokens, positions
        return torch.cat([new.tokens[:num_rows], tokens]), torch.cat([new.positions[:num_rows], positions])

    def _states(self, hidden: Tensor | None, num_rows: int, blocks: Sequence[Block]) -> Tensor:
        """``[B + blocks, D]`` of which the logits are wanted, filled up to enough rows."""
        wanted = num_rows + len(blocks)
        computed = self.contexts.padded_rows(wanted)
        if hidden is not None and not blocks and hidden.shape[0] == computed:
            return hidden
        if not wanted:
            return torch.zeros(0, 0, device=self.packed.device)
        picked = [] if hidden is None else [hidden[:num_rows]]
        picked += [block.last_hidden.unsqueeze(0) for block in blocks if block.last_hidden is not None]
        return F.pad(torch.cat(picked), (0, 0, 0, computed - wanted))
