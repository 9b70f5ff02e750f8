"""The two attention contexts of generation: whole sequences that fill the cache, and one new token per
request.

Shapes: T packed tokens, B decode rows, H query heads, Hk key/value heads, n = H / Hk, D head size, K cache
positions read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quartet.models.attention import LayerRule, PackedAttention
from quartet.rollout.cache import KeyValues, KVCache, round_up


class PrefillAttention(PackedAttention):
    """The training forward's attention over packed sequences; keeps every layer's keys and values."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: LayerRule) -> Tensor:
        self._keys[layer], self._values[layer] = k.squeeze(0), v.squeeze(0)
        return super().attend(layer, q, k, v, rule)

    def key_values(self) -> KeyValues:
        """Of the whole pack, ``[Hk, T, D]`` per layer in layer order."""
        layers = sorted(self._keys)
        return KeyValues(tuple(self._keys[i] for i in layers), tuple(self._values[i] for i in layers))


class DecodeAttention:
    """One token of each row against its slot: row b writes position ``positions[b]`` and sees positions up
    to it.

    Args:
        positions: ``[B]`` int64, of the new tokens.
        longest: the largest of them plus one, known on the host.
    """

    def __init__(self, cache: KVCache, positions: Tensor, longest: int) -> None:
        self.cache = cache
        self.positions = positions
        self.num_rows = positions.shape[0]
        self.num_keys = round_up(longest)
        self._masks: dict[int | None, Tensor] = {}
        self._places: dict[int, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: LayerRule) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        self._store(keys, k)
        self._store(values, v)
        num_rows, num_kv = self.num_rows, keys.shape[1]
        # Query heads that share a key/value head become rows of one small product.
        folded = q.squeeze(0).transpose(0, 1).reshape(num_rows, num_kv, q.shape[1] // num_kv, q.shape[3])
        keys, values = keys[:num_rows, :, : self.num_keys], values[:num_rows, :, : self.num_keys]
        mask = self._mask(rule, q.dtype)
        if rule.softcap is None:
            out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=rule.scaling)
        else:
            scores = (folded @ keys.transpose(-1, -2)).float() * rule.scaling
            scores = rule.softcap * torch.tanh(scores / rule.softcap) + mask
            out = scores.softmax(-1).to(values.dtype) @ values
        return out.reshape(num_rows, q.shape[1], values.shape[3]).transpose(0, 1).unsqueeze(0)

    def _store(self, stored: Tensor, new: Tensor) -> None:
        """``new [1, Hk, B, D]`` into its places of ``stored [S, Hk, C, D]``."""
        num_kv, capacity, size = stored.shape[1:]
        places = self._places.get(num_kv)
        if places is None:
            rows = torch.arange(self.num_rows, device=stored.device).unsqueeze(1) * num_kv
            heads = torch.arange(num_kv, device=stored.device)
            places = ((rows + heads) * capacity + self.positions.unsqueeze(1)).flatten()
            self._places[num_kv] = places
        stored.view(-1, size).index_copy_(0, places, new.squeeze(0).transpose(0, 1).reshape(-1, size))

    def _mask(self, rule: LayerRule, dtype: torch.dtype) -> Tensor:
        """``[B, 1, 1, K]`` additive, made once per window and step."""
        mask = self._masks.get(rule.window)
        if mask is None:
            places = torch.arange(self.num_keys, device=self.positions.device)
            distance = self.positions.unsqueeze(1) - places
            hidden = distance < 0
            if rule.window is not None:
                hidden |= distance >= rule.window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
            self._masks[rule.window] = mask
        return mask
