"""The attention of one engine step: new tokens of running requests against their slots, and blocks being filled.

Shapes: T tokens of the step, B decode rows, H query heads, Hk key/value heads, n = H / Hk, D head size, K places read,
m rows that read one shared block, P its tokens.

What a token sees may lie in several places (a shared prompt, a slot, the tokens beside it). Each place is one kernel
call that returns a partial output and its log-sum-exp, and ``join`` puts them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quartet.models.attention import AttentionContext, LayerRule, PackedAttention, masked_attention, visible
from quartet.rollout.admission import Fill
from quartet.rollout.cache import KVCache, round_up
from quartet.rollout.prefix_cache import Block
from quartet.rollout.rows import SPARE_ROWS, Rows, SharedReads

MIN_ROWS = 16
"""From this many rows on, the bits of a row of an fp32 product on one thread no longer depend on their number."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Contexts(Protocol):
    """How an engine attends. ``FastContexts`` here; another set of contexts may trade speed for exactness.

    Attributes:
        shares_prefixes: prompts may be read from their block; otherwise every slot holds its whole sequence from
            place 0 on and every block is a root.
    """

    shares_prefixes: bool

    def padded_rows(self, num_rows: int) -> int:
        """How many rows to compute where ``num_rows`` are wanted; the contexts never see those on top."""

    def slot_length(self, num_tokens: int) -> int:
        """How many places a slot needs for ``num_tokens``."""

    def decode(self, cache: KVCache, rows: Rows) -> AttentionContext:
        """For one new token of each of ``rows``, in row order; stores their keys and values in the cache."""

    def fill(self, fills: Sequence[Fill]) -> AttentionContext:
        """For the tokens of ``fills``, one after the other; stores their keys and values in the blocks."""


class FastContexts:
    """The quickest kernels there are on a CPU; on other devices plain formulas."""

    def __init__(self, *, shares_prefixes: bool = True) -> None:
        self.shares_prefixes = shares_prefixes
        self._decode: DecodeAttention | None = None

    def padded_rows(self, num_rows: int) -> int:
        return max(num_rows, MIN_ROWS)

    def slot_length(self, num_tokens: int) -> int:
        return round_up(num_tokens)

    def decode(self, cache: KVCache, rows: Rows) -> AttentionContext:
        context = self._decode
        if context is None or context.cache is not cache or context.rows is not rows:
            context = self._decode = DecodeAttention(cache, rows)
        else:
            context.begin()
        return context

    def fill(self, fills: Sequence[Fill]) -> AttentionContext:
        return FillAttention(fills)


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


def partial_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: LayerRule) -> tuple[Tensor, Tensor]:
    """``q [b, Hk, r, D]``, ``k, v [b, Hk, K, D]`` → outputs ``[b, Hk, r, D]`` and log-sum-exps ``[b, Hk, r]``.

    Args:
        mask: additive, fp32, broadcasts to ``[b, Hk, r, K]``. With the window already in it.
    """
    if rule.softcap is None and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
        out, lse = _flash(q, k, v, 0.0, False, attn_mask=mask, scale=rule.scaling)
        return out, lse
    scores = q @ k.transpose(-1, -2)
    scores = (scores if scores.dtype == torch.float64 else scores.float()) * rule.scaling
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    # Rows that see nothing get zeros rather than NaN.
    finite = lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)
    return (scores - finite).exp().to(v.dtype) @ v, lse


def join(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """One output from two partial ones ``[..., D]`` with log-sum-exps ``[...]``; -inf contributes nothing."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    # In fp64, because how fp32 exponentials round depends on how many there are.
    share = torch.sigmoid((other_lse - lse).double()).to(dtype).unsqueeze(-1)
    return out.to(dtype).lerp(other.to(dtype), share).to(out.dtype)


class DecodeAttention:
    """One token of each row against its slot and, where it reads one, its shared block.

    Query heads that share a key/value head become rows of one small product. What stays the same from step to step
    (views of the slots, the output) is kept: ``begin`` makes it anew where rows or slots changed.
    """

    def __init__(self, cache: KVCache, rows: Rows) -> None:
        self.cache = cache
        self.rows = rows
        self._layout: tuple[int, tuple[int, ...]] | None = None
        self._views: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.begin()

    def begin(self) -> None:
        """Before every step, once the rows are as they are to be decoded."""
        self._places: dict[int, Tensor] = {}
        self._masks: dict[int, Tensor] = {}
        self._mask_pieces: dict[int, list[Tensor]] = {}
        self._shared_masks: dict[tuple[Block, int], Tensor] = {}
        layout = (self.rows.version, tuple(round_up(stretch.longest) for stretch in self.rows.stretches))
        if layout != self._layout:
            self._layout = layout
            self._views.clear()
            self._whole_mask_pieces = self._cut(self.rows.mask)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: LayerRule) -> Tensor:
        rows = self.rows
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        self._store(keys, k)
        self._store(values, v)
        num_rows, num_heads, num_kv, size_v = rows.num_rows, q.shape[1], keys.shape[1], values.shape[3]
        folded = q.squeeze(0).transpose(0, 1).reshape(num_rows, num_kv, num_heads // num_kv, q.shape[3])
        views = self._views.get(layer)
        if views is None:
            views = self._views[layer] = list(zip(self._cut(keys), self._cut(values), strict=True))
        pieces = folded.split([stretch.end - stretch.start for stretch in rows.stretches])
        masks = self._masks_of_stretches(rule.window)
        parts = [
            partial_attention(q_part, *stored, mask, rule)
            for q_part, stored, mask in zip(pieces, views, masks, strict=True)
        ]
        out = torch.cat([part for part, _ in parts]) if len(parts) > 1 else parts[0][0]
        if rows.shared is not None:
            lse = torch.cat([part for _, part in parts]) if len(parts) > 1 else parts[0][1]
            out = join(out, lse, *self._read_shared(layer, folded, rows.shared, rule))
        return out.reshape(num_rows, num_heads, size_v).transpose(0, 1).unsqueeze(0)

    def _cut(self, x: Tensor) -> list[Tensor]:
        """Of slots ``[S, Hk, C, D]`` or masks ``[S, C]`` what each stretch reads."""
        pieces = []
        for stretch in self.rows.stretches:
            span, num_keys = slice(stretch.start, stretch.end), round_up(stretch.longest)
            pieces.append(x[span, :, :num_keys] if x.dim() == 4 else x[span, None, None, :num_keys])
        return pieces

    def _store(self, stored: Tensor, new: Tensor) -> None:
        """``new [1, Hk, B, D]`` into its places of ``stored [S, Hk, C, D]``."""
        num_kv, capacity, size = stored.shape[1:]
        places = self._places.get(num_kv)
        if places is None:
            num_rows = self.rows.num_rows
            slots = torch.arange(num_rows, device=stored.device).unsqueeze(1) * num_kv
            heads = torch.arange(num_kv, device=stored.device)
            places = ((slots + heads) * capacity + self.rows.places[:num_rows].unsqueeze(1)).flatten()
            self._places[num_kv] = places
        stored.view(-1, size).index_copy_(0, places, new.squeeze(0).transpose(0, 1).reshape(-1, size))

    def _masks_of_stretches(self, window: int | None) -> list[Tensor]:
        """Additive, ``[m, 1, 1, K]`` of each stretch; those kept with the rows where the window cuts nothing off."""
        rows = self.rows
        if window is None or window >= rows.longest:
            return self._whole_mask_pieces
        pieces = self._mask_pieces.get(window)
        if pieces is None:
            places = rows.places[: rows.num_rows].unsqueeze(1)
            left = torch.arange(round_up(rows.longest), device=places.device) <= places - window
            mask = rows.mask[: rows.num_rows, : left.shape[1]].masked_fill(left, float("-inf"))
            pieces = self._mask_pieces[window] = self._cut(mask)
        return pieces

    def _read_shared(self, layer: int, q: Tensor, shared: SharedReads, rule: LayerRule) -> tuple[Tensor, Tensor]:
        """``q [B, Hk, n, D]`` → each row's part of the block it reads, with log-sum-exps ``[B, Hk, n]``.

        All rows and heads that share a key/value head are query rows of one call per block: a multiple of 16, by rows
        of other blocks, because the bits of fewer would depend on how many they are.
        """
        share = q.shape[2]
        stacked = q.transpose(0, 1).index_select(1, shared.order).flatten(1, 2).unsqueeze(0)
        outs, lses = [], []
        for block, first, stop in shared.blocks:
            num_rows = (stop - first) * share
            start, computed = first * share, -(-num_rows // SPARE_ROWS) * SPARE_ROWS
            mask = self._shared_mask(block, shared, first, rule.window, share, computed)
            out, lse = partial_attention(
                stacked[:, :, start : start + computed],
                block.keys[layer].unsqueeze(0),
                block.values[layer].unsqueeze(0),
                mask,
                rule,
            )
            if mask is not None:
                # The kernel gives rows that see nothing a log-sum-exp of 0.
                lse = lse.masked_fill(mask.amax(-1) == float("-inf"), float("-inf"))
            outs.append(out[0, :, :num_rows])
            lses.append(lse[0, :, :num_rows])
        out, lse = (
            torch.cat(x, 1).unflatten(1, (-1, share)).index_select(1, shared.inverse).transpose(0, 1)
            for x in (outs, lses)
        )
        return out, lse if shared.absent is None else lse + shared.absent

    def _shared_mask(
        self, block: Block, shared: SharedReads, first: int, window: int | None, share: int, computed: int
    ) -> Tensor | None:
        """Additive ``[computed, P]``; None where the window reaches over the whole block."""
        if window is None or window >= len(block) + self.rows.longest:
            return None
        mask = self._shared_masks.get((block, window))
        if mask is None:
            rows = shared.order[first : first + computed]
            left = torch.arange(len(block), device=rows.device) <= self.rows.positions[rows].unsqueeze(1) - window
            mask = torch.zeros(left.shape, device=rows.device).masked_fill_(left, float("-inf"))
            mask = self._shared_masks[block, window] = mask.repeat_interleave(share, 0)[:computed]
        return mask


class FillAttention:
    """Tokens of blocks: those that begin a sequence as in training, others also against what stands before them.

    Args:
        fills: in the order of the tokens, those that begin a sequence first; neighbours of equal length run as one
            kernel call.
    """

    def __init__(self, fills: Sequence[Fill]) -> None:
        self.fills = fills
        self._behind = [fill for fill in fills if not begins(fill)]
        lengths = [fill.end for fill in fills[: len(fills) - len(self._behind)]]
        self._num_whole = sum(lengths)
        self._whole = PackedAttention(lengths) if lengths else None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: LayerRule) -> Tensor:
        sizes = [fill.end - fill.start for fill in self.fills]
        # All are stored first: a block may follow one that is filled in the same step.
        for fill, new_k, new_v in zip(self.fills, k[0].split(sizes, 1), v[0].split(sizes, 1), strict=True):
            fill.block.store(layer, fill.start, new_k, new_v)
        if self._whole is not None and not self._behind:
            return self._whole.attend(layer, q, k, v, rule)
        parts = []
        first = self._num_whole
        if self._whole is not None:
            parts.append(self._whole.attend(layer, q[:, :, :first], k[:, :, :first], v[:, :, :first], rule))
        for fill in self._behind:
            span = slice(first, first + fill.end - fill.start)
            parts.append(self._continue(layer, fill, q[:, :, span], k[:, :, span], v[:, :, span], rule))
            first = span.stop
        return torch.cat(parts, 2)

    def _continue(self, layer: int, fill: Fill, q: Tensor, k: Tensor, v: Tensor, rule: LayerRule) -> Tensor:
        """``[1, H, t, D]`` of tokens that follow others."""
        before = stored_before(layer, fill)
        last = fill.block.start + fill.end
        cut = rule.window is not None and rule.window < last
        if rule.softcap is None and not cut and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
            out, lse = _flash(q, k, v, 0.0, True, scale=rule.scaling)
            for keys, values in before:
                part, part_lse = _flash(q, keys, values, 0.0, False, scale=rule.scaling)
                out, lse = join(out, lse, part, part_lse), torch.logaddexp(lse, part_lse)
            return out
        keys = torch.cat([*(keys for keys, _ in before), k], 2)
        values = torch.cat([*(values for _, values in before), v], 2)
        positions = torch.arange(last, device=q.device)
        return masked_attention(
            q, keys, values, visible(positions[fill.block.start + fill.start :], positions, rule), rule
        )


def begins(fill: Fill) -> bool:
    """Whether nothing stands before the tokens of ``fill``."""
    return fill.start == 0 and fill.block.parent is None


def stored_before(layer: int, fill: Fill) -> list[tuple[Tensor, Tensor]]:
    """Keys and values ``[1, Hk, *, D]`` of what stands before ``fill``, in order."""
    found = []
    block: Block | None = fill.block
    end = fill.start
    while block is not None:
        if end:
            found.append((block.keys[layer][None, :, :end], block.values[layer][None, :, :end]))
        block = block.parent
        end = len(block) if block is not None else 0
    return found[::-1]
