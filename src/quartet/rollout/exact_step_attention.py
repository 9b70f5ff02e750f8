"""The engine's attention under ``numerics: exact``: the trainer's bits for every prompt piece and decode step.

Shapes: T tokens of the step, B decode rows, H query heads, Hk key/value heads, D head size, K keys.

Every slot and block holds its sequence from position 0 on, so keys stand where they stand in a training pack, and a
query's output is that of ``quartet.models.exact`` whatever else the step computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quartet.models.attention import AttentionContext, LayerRule
from quartet.models.exact import (
    CALL_ROWS,
    VECTOR,
    ExactPackedAttention,
    additive_mask,
    decode_attention,
    exact_masked_attention,
    key_length,
    padded_rows,
)
from quartet.rollout.admission import PrefillChunk
from quartet.rollout.decode_attention import DecodeAttention
from quartet.rollout.drafter import DraftTree
from quartet.rollout.kv_cache import KVCache
from quartet.rollout.rows import DecodeRows, DraftRows
from quartet.rollout.step_attention import Contexts, PrefillAttention


class ExactContexts(Contexts):
    """
    Args:
        row_step: of which number the rows of a step must be a multiple (``quartet.models.exact.row_step``).
    """

    def __init__(self, row_step: int) -> None:
        super().__init__(shares_prefixes=False)
        self._row_step = row_step

    def padded_rows(self, num_rows: int) -> int:
        return padded_rows(num_rows, self._row_step)

    def slot_length(self, num_tokens: int) -> int:
        return key_length(num_tokens)

    def decode(self, cache: KVCache, rows: DecodeRows, spans: DraftRows | None = None) -> AttentionContext:
        if spans is not None:
            return ExactSpanAttention(cache, spans)
        return ExactDecodeAttention(cache, rows)

    def prefill(self, prefills: Sequence[PrefillChunk]) -> AttentionContext:
        return ExactPrefillAttention(prefills)


class ExactDecodeAttention(DecodeAttention):
    """One token of each row against its slot."""

    def places_read(self, num_tokens: int) -> int:
        return key_length(num_tokens)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: LayerRule) -> Tensor:
        keys, values = map(self._cut, self._stored(layer, k, v))
        queries, parts = q.squeeze(0).transpose(0, 1), []
        masks = self._masks_of_stretches(rule.window)
        for row_range, own_k, own_v, mask in zip(self.rows.row_ranges, keys, values, masks, strict=True):
            own_q = queries[row_range.start : row_range.end]
            parts.append(decode_attention(own_q, own_k, own_v, mask.unsqueeze(1), rule))
        return torch.cat(parts).transpose(0, 1).unsqueeze(0)


class ExactSpanAttention:
    """Several tokens of each row against its slot, themselves included."""

    def __init__(self, cache: KVCache, spans: DraftRows) -> None:
        self.cache = cache
        self.spans = spans

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: LayerRule) -> Tensor:
        keys, values = self.spans.stored(self.cache, layer, k, v)
        parts = []
        queries = q.split([1 + len(tree) for tree in self.spans.trees], 2)
        for row, (own, start, tree) in enumerate(zip(queries, self.spans.starts, self.spans.trees, strict=True)):
            parts.append(_branching(own, keys[row], values[row], start, tree, rule))
        return torch.cat(parts, 2)


class ExactPrefillAttention(PrefillAttention):
    """Tokens of blocks, of which each is a whole sequence from its beginning."""

    def _whole_sequences(self, lengths: Sequence[int]) -> AttentionContext:
        return ExactPackedAttention(lengths)

    def _continue(self, layer: int, prefill: PrefillChunk, q: Tensor, k: Tensor, v: Tensor, rule: LayerRule) -> Tensor:
        return _following(q, prefill.block.keys[layer], prefill.block.values[layer], prefill.start, rule)


def _branching(q: Tensor, keys: Tensor, values: Tensor, start: int, tree: DraftTree, rule: LayerRule) -> Tensor:
    """As ``_following``, each way through the tree as a sequence of its own."""
    if len(tree.paths) == 1:
        return _following(q, keys, values, start, rule)
    out = q.new_empty(*q.shape[:3], values.shape[2])
    for path in tree.paths:
        places = [*range(start), *(start + i for i in path)]
        out[:, :, path] = _following(q[:, :, path], keys[:, places], values[:, places], start, rule)
    return out


def _following(q: Tensor, keys: Tensor, values: Tensor, start: int, rule: LayerRule) -> Tensor:
    """``q [1, H, t, D]`` of tokens from ``start`` on, over ``keys, values [Hk, *, D]`` stored from the first on."""
    parts = []
    for offset in range(0, q.shape[2], CALL_ROWS):
        rows = q[:, :, offset : offset + CALL_ROWS]
        stop = start + offset + rows.shape[2]
        num_keys, missing = key_length(stop), -rows.shape[2] % VECTOR
        k, v = (F.pad(stored[None, :, :stop], (0, 0, 0, num_keys - stop)) for stored in (keys, values))
        mask = additive_mask(torch.arange(start + offset, stop + missing), num_keys, rule, q.dtype)[None, None]
        out = exact_masked_attention(F.pad(rows, (0, 0, 0, missing)), k, v, mask, rule)
        parts.append(out[:, :, : rows.shape[2]])
    return torch.cat(parts, 2)
