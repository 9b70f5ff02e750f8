"""The attention of one engine step: new tokens of running requests against their slots, and blocks being filled.

Shapes: T tokens of the step, t of one fill, H query heads, Hk key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quartet.models.attention import AttentionContext, LayerRule, PackedAttention, masked_attention, visible
from quartet.models.exact import MIN_ROWS
from quartet.rollout.admission import PrefillChunk
from quartet.rollout.decode_attention import (
    DecodeAttention,
    SpanAttention,
    causal_attention,
    has_kernel,
    join,
    partial_attention,
)
from quartet.rollout.kv_cache import KVCache, round_up
from quartet.rollout.prefix_cache import Block
from quartet.rollout.rows import DecodeRows, DraftRows


class Contexts:
    """How an engine attends, here by the quickest kernels that a CPU has. Subclasses are exact, or run on every device.

    Args:
        shares_prefixes: prompts may be read from their block; otherwise every slot holds its whole sequence from
            place 0 on and every block is a root.
    """

    def __init__(self, *, shares_prefixes: bool = True) -> None:
        self.shares_prefixes = shares_prefixes
        self._decode: DecodeAttention | None = None

    def padded_rows(self, num_rows: int) -> int:
        """How many rows to compute where ``num_rows`` are wanted; the contexts never see those on top."""
        # From so many on, the bits of a row of an fp32 product on one thread no longer depend on their number.
        return max(num_rows, MIN_ROWS)

    def slot_length(self, num_tokens: int) -> int:
        """How many places a slot needs for ``num_tokens``."""
        return round_up(num_tokens)

    def decode(self, cache: KVCache, rows: DecodeRows, spans: DraftRows | None = None) -> AttentionContext:
        """For one new token of each of ``rows``, or those of ``spans``; stores their keys and values in the cache."""
        if spans is not None:
            return SpanAttention(cache, rows, spans)
        context = self._decode
        if context is None or context.cache is not cache or context.rows is not rows:
            context = self._decode = DecodeAttention(cache, rows)
        else:
            context.begin()
        return context

    def prefill(self, prefills: Sequence[PrefillChunk]) -> AttentionContext:
        """For the tokens of ``prefills``, one after the other; stores their keys and values in the blocks."""
        return PrefillAttention(prefills)


class PlainContexts(Contexts):
    """Operations that every device has: right there, not fast."""

    def decode(self, cache: KVCache, rows: DecodeRows, spans: DraftRows | None = None) -> AttentionContext:
        return SpanAttention(cache, rows, spans or DraftRows.newest(rows))


class StepAttention:
    """Contexts side by side, each for its part of the step's tokens; tokens behind them all only fill up.

    Args:
        parts: ``(context, its tokens)`` in the order of the tokens.
    """

    def __init__(self, parts: Sequence[tuple[AttentionContext, int]]) -> None:
        self.parts = parts

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: LayerRule) -> Tensor:
        # Token-major, as the model takes it.
        out = v.new_zeros(q.shape[2], q.shape[1], v.shape[3])
        first = 0
        for context, size in self.parts:
            span = slice(first, first + size)
            part = context.attend(layer, q[:, :, span], k[:, :, span], v[:, :, span], rule)
            out[span] = part.squeeze(0).transpose(0, 1)
            first += size
        return out.transpose(0, 1).unsqueeze(0)


class PrefillAttention:
    """Tokens of blocks: those that begin a sequence as in training, others also against what stands before them.

    Args:
        prefills: in the order of the tokens, those that begin a sequence first; neighbours of equal length run as one
            kernel call.
    """

    def __init__(self, prefills: Sequence[PrefillChunk]) -> None:
        self.prefills = prefills
        self._behind = [prefill for prefill in prefills if not begins(prefill)]
        lengths = [prefill.end for prefill in prefills[: len(prefills) - len(self._behind)]]
        self._num_whole = sum(lengths)
        self._whole = self._whole_sequences(lengths) if lengths else None

    def _whole_sequences(self, lengths: Sequence[int]) -> AttentionContext:
        """Of tokens that begin a sequence."""
        return PackedAttention(lengths)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: LayerRule) -> Tensor:
        sizes = [prefill.end - prefill.start for prefill in self.prefills]
        # All are stored first: a block may follow one that is filled in the same step.
        for prefill, new_k, new_v in zip(self.prefills, k[0].split(sizes, 1), v[0].split(sizes, 1), strict=True):
            prefill.block.store(layer, prefill.start, new_k, new_v)
        if self._whole is not None and not self._behind:
            return self._whole.attend(layer, q, k, v, rule)
        parts = []
        first = self._num_whole
        if self._whole is not None:
            parts.append(self._whole.attend(layer, q[:, :, :first], k[:, :, :first], v[:, :, :first], rule))
        for prefill in self._behind:
            span = slice(first, first + prefill.end - prefill.start)
            parts.append(self._continue(layer, prefill, q[:, :, span], k[:, :, span], v[:, :, span], rule))
            first = span.stop
        return torch.cat(parts, 2)

    def _continue(self, layer: int, prefill: PrefillChunk, q: Tensor, k: Tensor, v: Tensor, rule: LayerRule) -> Tensor:
        """``[1, H, t, D]`` of tokens that follow others."""
        before = stored_before(layer, prefill)
        last = prefill.block.start + prefill.end
        cut = rule.window is not None and rule.window < last
        if not cut and has_kernel(q, v, rule):
            out, lse = causal_attention(q, k, v, rule.scaling)
            for keys, values in before:
                part, part_lse = partial_attention(q, keys, values, None, rule)
                out, lse = join(out, lse, part, part_lse), torch.logaddexp(lse, part_lse)
            return out
        keys = torch.cat([*(keys for keys, _ in before), k], 2)
        values = torch.cat([*(values for _, values in before), v], 2)
        positions = torch.arange(last, device=q.device)
        return masked_attention(
            q, keys, values, visible(positions[prefill.block.start + prefill.start :], positions, rule), rule
        )


def begins(prefill: PrefillChunk) -> bool:
    """Whether nothing stands before the tokens of ``prefill``."""
    return prefill.start == 0 and prefill.block.parent is None


def stored_before(layer: int, prefill: PrefillChunk) -> list[tuple[Tensor, Tensor]]:
    """Keys and values ``[1, Hk, *, D]`` of what stands before ``prefill``, in order."""
    found = []
    block: Block | None = prefill.block
    end = prefill.start
    while block is not None:
        if end:
            found.append((block.keys[layer][None, :, :end], block.values[layer][None, :, :end]))
        block = block.parent
        end = len(block) if block is not None else 0
    return found[::-1]
