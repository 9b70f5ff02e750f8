"""The attention of a step in which rows have any number of new tokens, by plain operations that every device has.

Shapes: T new tokens of all rows, B rows, k new tokens of a row at most, H query heads, Hk key/value heads, n = H / Hk,
D head size, K places read of each slot, P tokens of a shared prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quartet.models.attention import LayerRule
from quartet.rollout.cache import KVCache, round_up
from quartet.rollout.partial_attention import join, plain_attention
from quartet.rollout.rows import Rows, SharedReads, Spans


class SpanAttention:
    """New tokens of each row against its slot, themselves included, and against the shared block where it reads one."""

    def __init__(self, cache: KVCache, rows: Rows, spans: Spans) -> None:
        self.cache = cache
        self.rows = rows
        self.spans = spans
        self._num_keys = min(round_up(rows.longest + spans.grid.shape[1] - 1), cache.capacity)
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: LayerRule) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        self.spans.store(keys, k)
        self.spans.store(values, v)
        num_rows, most = self.spans.grid.shape
        num_kv, share = keys.shape[1], q.shape[1] // keys.shape[1]
        # Query heads that share a key/value head, and a row's tokens, are query rows of one product.
        grid = q.squeeze(0).transpose(0, 1)[self.spans.grid].unflatten(2, (num_kv, share))
        queries = grid.permute(0, 2, 3, 1, 4).flatten(2, 3)
        read = slice(0, num_rows), slice(None), slice(0, self._num_keys)
        out, lse = plain_attention(queries, keys[read], values[read], self._slot_mask(rule.window, share), rule)
        if self.rows.shared is not None:
            out = join(out, lse, *self._read_shared(layer, queries, out, self.rows.shared, rule))
        by_token = out.unflatten(2, (share, most)).permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)
        return by_token[self.spans.back].transpose(0, 1).unsqueeze(0).to(v.dtype)

    def _slot_mask(self, window: int | None, share: int) -> Tensor:
        """Additive ``[B, 1, n k, K]``: causal by places of the slot, and inside the window."""
        mask = self._masks.get((window, share))
        if mask is None:
            places = self.spans.places[self.spans.grid].unsqueeze(-1)
            distance = places - torch.arange(self._num_keys, device=places.device)
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            mask = self._masks[window, share] = _additive(hidden).repeat(1, share, 1).unsqueeze(1)
        return mask

    def _read_shared(
        self, layer: int, queries: Tensor, like: Tensor, shared: SharedReads, rule: LayerRule
    ) -> tuple[Tensor, Tensor]:
        """``queries [B, Hk, n k, D]`` → each row's part of the block it reads, with log-sum-exps ``[B, Hk, n k]``."""
        out = torch.zeros_like(like)
        lse = torch.full(like.shape[:-1], float("-inf"), dtype=like.dtype, device=like.device)
        share = queries.shape[2] // self.spans.grid.shape[1]
        for block, first, stop in shared.blocks:
            readers = shared.order[first:stop]
            mask = None
            if rule.window is not None:
                positions = self.spans.positions[self.spans.grid[readers]].unsqueeze(-1)
                far = positions - torch.arange(len(block), device=positions.device) >= rule.window
                mask = _additive(far).repeat(1, share, 1).unsqueeze(1)
            keys, values = block.keys[layer].unsqueeze(0), block.values[layer].unsqueeze(0)
            out[readers], lse[readers] = plain_attention(queries[readers], keys, values, mask, rule)
        return out, lse


def _additive(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))
