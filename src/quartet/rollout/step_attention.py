"""The attention of one engine step.

New tokens of running requests attend to their slots and their shared prompts: ``DecodeAttention`` takes one token of
each row by the quickest kernels of a CPU, ``SpanAttention`` any number by plain operations that every device has. Where
a row reads two places, each gives a partial output and its log-sum-exp, and ``merge_attention_states`` puts them
together. ``PrefillAttention`` is that of blocks being filled.

Under ``numerics: exact`` every slot and block holds its sequence from position 0 on, so keys stand where they stand in
a training pack, and a query's output is that of ``quartet.models.exact`` whatever else the step computes.

Shapes: B running requests, S slots, C capacity of a slot, H query heads, Hk key/value heads,
n = H / Hk, D head size, m rows of one range, K places read of each, P tokens of a shared prompt; T new tokens of all
rows, k of a row at most; t of one fill; b calls, r query rows of one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available

from quartet.models.attention import (
    AttentionContext,
    AttentionParams,
    PackedAttention,
    masked_attention,
    visibility_mask,
)
from quartet.models.exact import (
    CALL_ROWS,
    MIN_ROWS,
    VECTOR,
    ExactPackedAttention,
    additive_mask,
    decode_attention,
    exact_masked_attention,
    padded_key_length,
    padded_rows,
)
from quartet.rollout.drafter import DraftTree
from quartet.rollout.prefix_cache import CacheBlock, KVCache, round_up
from quartet.rollout.rows import SPARE_ROWS, DecodeRows, DraftRows, RowRange, SharedPrefixReads
from quartet.rollout.scheduler import PrefillChunk

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def kernel_supports(q: Tensor, v: Tensor, rule: AttentionParams) -> bool:
    """Tells whether the fused kernel of the CPU can express the layer."""
    return rule.softcap is None and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Attends from tokens to those among them that are no later: ``q [1, H, t, D]``, ``k, v [1, Hk, t, D]``."""
    out, lse = _flash(q, k, v, 0.0, True, scale=scaling)
    return out, lse


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: AttentionParams
) -> tuple[Tensor, Tensor]:
    """Attends to some of the keys: ``q [b, Hk, r, D]``, ``k, v [b, Hk, K, D]`` → outputs ``[b, Hk, r, D]`` and
    log-sum-exps ``[b, Hk, r]``.

    Args:
        mask: additive, fp32, broadcasts to ``[b, Hk, r, K]``. With the window already in it.
    """
    if kernel_supports(q, v, rule):
        out, lse = _flash(q, k, v, 0.0, False, attn_mask=mask, scale=rule.scaling)
        return out, lse
    return _by_formula(q, k, v, mask, rule)


def _by_formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: AttentionParams) -> tuple[Tensor, Tensor]:
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


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: AttentionParams
) -> tuple[Tensor, Tensor]:
    """Attends as ``partial_attention`` does, by the formula, in fp32 at least whatever the dtypes, under autocast
    too."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    device = q.device.type
    whole = torch.autocast(device, enabled=False) if is_autocast_available(device) else contextlib.nullcontext()
    with whole:
        return _by_formula(q.to(dtype), k.to(dtype), v.to(dtype), mask, rule)


def merge_attention_states(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Joins two partial outputs to one: ``[..., D]`` with log-sum-exps ``[...]``; -inf contributes nothing."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    # In fp64, because how fp32 exponentials round depends on how many there are.
    share = torch.sigmoid((other_lse - lse).double()).to(dtype).unsqueeze(-1)
    return out.to(dtype).lerp(other.to(dtype), share).to(out.dtype)


# One token of each row -----------------------------------------------------------------------------------


class _Buffers:
    """What the products of all layers with as many heads write, one layer after the other; allocated once per layout.

    Rows and key/value heads are one dimension here.

    Attributes:
        spans: of the queries ``[B Hk, n, D]``, per stretch.
        scores: ``[m Hk, n, K]`` per stretch, and the same memory as ``[m, Hk n, K]``.
        out: ``[m Hk, n, D]`` per stretch; views of ``whole``.
        whole: ``[B, Hk, n, D]``
    """

    def __init__(self, row_ranges: Sequence[RowRange], q: Tensor, size_v: int) -> None:
        num_rows, num_kv, share, _ = q.shape
        self.whole = q.new_empty(num_rows, num_kv, share, size_v)
        self.spans = [slice(row_range.start * num_kv, row_range.end * num_kv) for row_range in row_ranges]
        sizes = [(row_range.end - row_range.start, round_up(row_range.longest)) for row_range in row_ranges]
        self.scores = [q.new_empty(num * num_kv, share, num_keys) for num, num_keys in sizes]
        self.scores_by_row = [
            scores.view(num, num_kv * share, num_keys)
            for scores, (num, num_keys) in zip(self.scores, sizes, strict=True)
        ]
        rows = self.whole.flatten(0, 1)
        self.out = [rows[span] for span in self.spans]


def _joined_heads(stored: Tensor, row_range: RowRange, *, transposed: bool = False) -> Tensor:
    """Returns what a stretch reads of slots ``[S, Hk, C, D]``, as ``[m Hk, K, D]`` or ``[m Hk, D, K]``, by one view."""
    _, num_kv, capacity, size = stored.shape
    num, num_keys, step = (row_range.end - row_range.start) * num_kv, round_up(row_range.longest), capacity * size
    shape, strides = (
        ((num, size, num_keys), (step, 1, size)) if transposed else ((num, num_keys, size), (step, size, 1))
    )
    return stored.as_strided(shape, strides, row_range.start * num_kv * step)


class DecodeAttention:
    """One token of each row against its slot and, where it reads one, its shared block.

    Query heads that share a key/value head become rows of one small product. Products, softmax and their buffers are
    plain tensors here, in fp32: with so few query rows they are quicker than the fused kernel, which sets up more per
    row than it saves. Views and buffers are kept from step to step; ``begin`` drops them where rows or slots changed.
    """

    def __init__(self, cache: KVCache, rows: DecodeRows) -> None:
        self.cache = cache
        self.rows = rows
        self._layout: tuple[int, tuple[int, ...]] | None = None
        self._views: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._buffers: dict[tuple[int, ...], _Buffers] = {}
        self.begin()

    def places_read(self, num_tokens: int) -> int:
        """Returns how many places of a slot are read for so many tokens."""
        return round_up(num_tokens)

    def begin(self) -> None:
        """Begins a step, once the rows are as they are to be decoded."""
        self._places: dict[int, Tensor] = {}
        self._mask_pieces: dict[int, list[Tensor]] = {}
        self._shared_masks: dict[tuple[CacheBlock, int], Tensor] = {}
        layout = (self.rows.version, tuple(self.places_read(r.longest) for r in self.rows.row_ranges))
        if layout != self._layout:
            self._layout = layout
            self._views.clear()
            self._buffers.clear()
            self._whole_mask_pieces = self._cut(self.rows.mask)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams) -> Tensor:
        rows = self.rows
        keys, values = self._stored(layer, k, v)
        num_rows, num_heads, num_kv, size_v = rows.num_rows, q.shape[1], keys.shape[1], values.shape[3]
        folded = q.squeeze(0).transpose(0, 1).reshape(num_rows, num_kv, num_heads // num_kv, q.shape[3])
        if q.dtype in (torch.float32, torch.float64):
            out, lse = self._by_products(layer, folded, rule)
        else:
            out, lse = self._by_kernel(layer, folded, rule)
        if rows.shared is not None and lse is not None:
            out = merge_attention_states(out, lse, *self._read_shared(layer, folded, rows.shared, rule))
        return out.reshape(num_rows, num_heads, size_v).transpose(0, 1).unsqueeze(0)

    # ---- the slots ----

    def _by_products(self, layer: int, q: Tensor, rule: AttentionParams) -> tuple[Tensor, Tensor | None]:
        """Attends by matrix products: ``q [B, Hk, n, D]`` → outputs alike and, if a shared block is to be joined,
        log-sum-exps ``[B, Hk, n]``."""
        views, size_v = self._views_of(layer), self.cache.values[layer].shape[3]
        kind = (q.shape[1], q.shape[2], size_v)
        buffers = self._buffers.get(kind)
        if buffers is None:
            buffers = self._buffers[kind] = _Buffers(self.rows.row_ranges, q, size_v)
        queries = q.flatten(0, 1)
        masks = self._masks_of_stretches(rule.window)
        peaks: list[Tensor] = []
        tops: list[Tensor] = []
        for i, (keys, values) in enumerate(zip(*views, strict=True)):
            scores = buffers.scores[i]
            torch.baddbmm(scores, queries[buffers.spans[i]], keys, beta=0, alpha=rule.scaling, out=scores)
            if rule.softcap is not None:
                scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
            buffers.scores_by_row[i].add_(masks[i])
            if self.rows.shared is not None:
                peaks.append(scores.amax(-1))
            torch.softmax(scores, -1, out=scores)
            if self.rows.shared is not None:
                tops.append(scores.amax(-1))
            torch.bmm(scores, values, out=buffers.out[i])
        if not peaks:
            return buffers.whole, None
        # The largest weight is exp(peak - log-sum-exp). In fp64, because how fp32 logarithms round depends on how many
        # there are.
        lse = torch.cat(peaks) - torch.cat(tops).double().log()
        return buffers.whole, lse.view(q.shape[:3])

    def _views_of(self, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the keys ``[m Hk, D, K]`` and values ``[m Hk, K, D]`` that each stretch reads."""
        views = self._views.get(layer)
        if views is None:
            keys, values = self.cache.keys[layer], self.cache.values[layer]
            row_ranges = self.rows.row_ranges
            views = self._views[layer] = (
                [_joined_heads(keys, row_range, transposed=True) for row_range in row_ranges],
                [_joined_heads(values, row_range) for row_range in row_ranges],
            )
        return views

    def _by_kernel(self, layer: int, q: Tensor, rule: AttentionParams) -> tuple[Tensor, Tensor]:
        """Attends as ``_by_products`` does, with the fused kernel, which keeps scores of half precision in fp32."""
        parts = []
        keys, values = self._cut(self.cache.keys[layer]), self._cut(self.cache.values[layer])
        masks = self._masks_of_stretches(rule.window)
        for row_range, k, v, mask in zip(self.rows.row_ranges, keys, values, masks, strict=True):
            parts.append(partial_attention(q[row_range.start : row_range.end], k, v, mask.unsqueeze(1), rule))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def _cut(self, x: Tensor) -> list[Tensor]:
        """Cuts out of slots ``[S, Hk, C, D]`` what each stretch reads; of masks ``[S, C]`` the same as ``[m, 1,
        K]``."""
        pieces = []
        for row_range in self.rows.row_ranges:
            span, num_keys = slice(row_range.start, row_range.end), self.places_read(row_range.longest)
            pieces.append(x[span, :, :num_keys] if x.dim() == 4 else x[span, None, :num_keys])
        return pieces

    def _stored(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the layer's slots, with the new keys and values in them."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        self._store(keys, k)
        self._store(values, v)
        return keys, values

    def _store(self, stored: Tensor, new: Tensor) -> None:
        """Stores ``new [1, Hk, B, D]`` in its places of ``stored [S, Hk, C, D]``."""
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
        """Returns the additive masks, ``[m, 1, K]``, of each stretch; those kept with the rows where the window cuts
        nothing off."""
        rows = self.rows
        if window is None or window >= rows.longest:
            return self._whole_mask_pieces
        pieces = self._mask_pieces.get(window)
        if pieces is None:
            places = rows.places[: rows.num_rows].unsqueeze(1)
            left = torch.arange(self.places_read(rows.longest), device=places.device) <= places - window
            mask = rows.mask[: rows.num_rows, : left.shape[1]].masked_fill(left, float("-inf"))
            pieces = self._mask_pieces[window] = self._cut(mask)
        return pieces

    # ---- shared prompts ----

    def _read_shared(
        self, layer: int, q: Tensor, shared: SharedPrefixReads, rule: AttentionParams
    ) -> tuple[Tensor, Tensor]:
        """Attends as ``attend_shared_blocks`` does. The query rows of a call are a multiple of 16, by rows of other
        blocks, because the bits of fewer would depend on how many they are.
        """

        def attend(q: Tensor, block: CacheBlock, first: int) -> tuple[Tensor, Tensor]:
            mask = self._shared_mask(block, shared, first, rule.window, share, q.shape[2])
            return kernel_attention(q, block.keys[layer].unsqueeze(0), block.values[layer].unsqueeze(0), mask, rule)

        share = q.shape[2]
        return attend_shared_blocks(q, shared, attend, SPARE_ROWS)

    def _shared_mask(
        self, block: CacheBlock, shared: SharedPrefixReads, first: int, window: int | None, share: int, computed: int
    ) -> Tensor | None:
        """Returns the additive mask ``[computed, P]``; None where the window reaches over the whole block."""
        if window is None or window >= len(block) + self.rows.longest:
            return None
        mask = self._shared_masks.get((block, window))
        if mask is None:
            rows = shared.order[first : first + computed]
            left = torch.arange(len(block), device=rows.device) <= self.rows.positions[rows].unsqueeze(1) - window
            mask = torch.zeros(left.shape, device=rows.device).masked_fill_(left, float("-inf"))
            mask = self._shared_masks[block, window] = mask.repeat_interleave(share, 0)[:computed]
        return mask


# Any number of tokens ------------------------------------------------------------------------------------


class SpanAttention:
    """New tokens of each row against its slot, themselves included, and against the shared block where it reads one."""

    def __init__(self, cache: KVCache, rows: DecodeRows, spans: DraftRows) -> None:
        self.cache = cache
        self.rows = rows
        self.spans = spans
        self._num_keys = min(round_up(rows.longest + spans.grid.shape[1] - 1), cache.capacity)
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams) -> Tensor:
        keys, values = self.spans.stored(self.cache, layer, k, v)
        num_rows, most = self.spans.grid.shape
        num_kv, share = keys.shape[1], q.shape[1] // keys.shape[1]
        # Query heads that share a key/value head, and a row's tokens, are query rows of one product.
        grid = q.squeeze(0).transpose(0, 1)[self.spans.grid].unflatten(2, (num_kv, share))
        queries = grid.permute(0, 2, 3, 1, 4).flatten(2, 3)
        read = slice(0, num_rows), slice(None), slice(0, self._num_keys)
        out, lse = span_attention(queries, keys[read], values[read], self._slot_mask(rule.window, share), rule)
        if self.rows.shared is not None:
            out = merge_attention_states(out, lse, *self._read_shared(layer, queries, self.rows.shared, rule))
        by_token = out.unflatten(2, (share, most)).permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)
        return by_token[self.spans.back].transpose(0, 1).unsqueeze(0).to(v.dtype)

    def _slot_mask(self, window: int | None, share: int) -> Tensor:
        """Returns the additive mask ``[B, 1, n k, K]``: what stands before a row's new tokens, those that each follows,
        and inside the window.
        """
        mask = self._masks.get((window, share))
        if mask is None:
            sees, positions = self.spans.sees, self.spans.positions[self.spans.grid]
            most = sees.shape[1]
            newest = self.spans.places[self.spans.grid[:, :1]]
            # Places from that of the row's newest token on, which is 0.
            behind = torch.arange(self._num_keys, device=newest.device) - newest
            own = behind.clamp(0, most - 1)
            hidden = ~sees.gather(2, own.unsqueeze(1).expand(-1, most, -1)) | (behind >= most).unsqueeze(1)
            if window is not None:
                keys = torch.where(behind > 0, positions.gather(1, own), positions[:, :1] + behind)
                hidden |= positions.unsqueeze(-1) - keys.unsqueeze(1) >= window
            mask = self._masks[window, share] = _additive(hidden).repeat(1, share, 1).unsqueeze(1)
        return mask

    def _read_shared(
        self, layer: int, queries: Tensor, shared: SharedPrefixReads, rule: AttentionParams
    ) -> tuple[Tensor, Tensor]:
        share = queries.shape[2] // self.spans.grid.shape[1]

        def attend(q: Tensor, block: CacheBlock, first: int) -> tuple[Tensor, Tensor]:
            mask = None
            if rule.window is not None:
                rows = shared.order[first : first + q.shape[2] // queries.shape[2]]
                positions = self.spans.positions[self.spans.grid[rows]].unsqueeze(-1)
                far = positions - torch.arange(len(block), device=positions.device) >= rule.window
                mask = _additive(far).repeat(1, share, 1).flatten(0, 1)
            return span_attention(q, block.keys[layer].unsqueeze(0), block.values[layer].unsqueeze(0), mask, rule)

        return attend_shared_blocks(queries, shared, attend)


def attend_shared_blocks(
    queries: Tensor,
    shared: SharedPrefixReads,
    attend: Callable[[Tensor, CacheBlock, int], tuple[Tensor, Tensor]],
    multiple: int = 1,
) -> tuple[Tensor, Tensor]:
    """Attends to shared blocks: ``queries [B, Hk, r, D]`` → each row's part of the block it reads, with log-sum-exps
    ``[B, Hk, r]``.

    All query rows that read one block stand together, as those of one call.

    Args:
        attend: ``(queries [1, Hk, *, D], block, first row's place in the order)`` → outputs and log-sum-exps.
        multiple: of which the query rows of a call are, filled up by those of other blocks.
    """
    num = queries.shape[2]
    stacked = queries.transpose(0, 1).index_select(1, shared.order).flatten(1, 2).unsqueeze(0)
    outs, lses = [], []
    for block, first, stop in shared.blocks:
        num_rows, start = (stop - first) * num, first * num
        out, lse = attend(stacked[:, :, start : start + -(-num_rows // multiple) * multiple], block, first)
        outs.append(out[0, :, :num_rows])
        lses.append(lse[0, :, :num_rows])
    out, lse = (
        torch.cat(x, 1).unflatten(1, (-1, num)).index_select(1, shared.inverse).transpose(0, 1) for x in (outs, lses)
    )
    return out, lse if shared.absent is None else lse + shared.absent


def span_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: AttentionParams
) -> tuple[Tensor, Tensor]:
    """Attends as ``kernel_attention`` does, in fp32 at least."""
    if q.dtype == torch.float32 and kernel_supports(q, v, rule):
        return kernel_attention(q, k, v, mask, rule)
    return plain_attention(q, k, v, mask, rule)


def kernel_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: AttentionParams
) -> tuple[Tensor, Tensor]:
    """Attends as ``partial_attention`` does; rows that see nothing get zeros and -inf."""
    out, lse = partial_attention(q, k, v, mask, rule)
    if mask is None:
        return out, lse
    # The kernel gives rows that see nothing a log-sum-exp of 0.
    return out, lse.masked_fill(mask.amax(-1) == float("-inf"), float("-inf"))


def _additive(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))


class AttentionBackend:
    """How an engine attends, here by the quickest kernels that a CPU has. Subclasses are exact, or run on every device.

    Args:
        shares_prefixes: prompts may be read from their block; otherwise every slot holds its whole sequence from
            place 0 on and every block is a root.
    """

    def __init__(self, *, shares_prefixes: bool = True) -> None:
        self.shares_prefixes = shares_prefixes
        self._decode: DecodeAttention | None = None

    def padded_rows(self, num_rows: int) -> int:
        """Returns how many rows to compute where ``num_rows`` are wanted; the contexts never see those on top."""
        # From so many on, the bits of a row of an fp32 product on one thread no longer depend on their number.
        return max(num_rows, MIN_ROWS)

    def slot_length(self, num_tokens: int) -> int:
        """Returns how many places a slot needs for ``num_tokens``."""
        return round_up(num_tokens)

    def decode(self, cache: KVCache, rows: DecodeRows, spans: DraftRows | None = None) -> AttentionContext:
        """Makes the context for one new token of each of ``rows``, or those of ``spans``, which stores their keys and
        values in the cache."""
        if spans is not None:
            return SpanAttention(cache, rows, spans)
        context = self._decode
        if context is None or context.cache is not cache or context.rows is not rows:
            context = self._decode = DecodeAttention(cache, rows)
        else:
            context.begin()
        return context

    def prefill(self, prefills: Sequence[PrefillChunk]) -> AttentionContext:
        """Makes the context for the tokens of ``prefills``, one after the other, which stores their keys and values in
        the blocks."""
        return PrefillAttention(prefills)


class PlainAttentionBackend(AttentionBackend):
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

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams) -> Tensor:
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
        self._behind = [prefill for prefill in prefills if not starts_sequence(prefill)]
        lengths = [prefill.end for prefill in prefills[: len(prefills) - len(self._behind)]]
        self._num_whole = sum(lengths)
        self._whole = self._whole_sequences(lengths) if lengths else None

    def _whole_sequences(self, lengths: Sequence[int]) -> AttentionContext:
        """Makes the context for tokens that begin sequences."""
        return PackedAttention(lengths)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams) -> Tensor:
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

    def _continue(
        self, layer: int, prefill: PrefillChunk, q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams
    ) -> Tensor:
        """Returns the attention ``[1, H, t, D]`` of tokens that follow others."""
        before = cached_keys_values(layer, prefill)
        last = prefill.block.start + prefill.end
        cut = rule.window is not None and rule.window < last
        if not cut and kernel_supports(q, v, rule):
            out, lse = causal_attention(q, k, v, rule.scaling)
            for keys, values in before:
                part, part_lse = partial_attention(q, keys, values, None, rule)
                out, lse = merge_attention_states(out, lse, part, part_lse), torch.logaddexp(lse, part_lse)
            return out
        keys = torch.cat([*(keys for keys, _ in before), k], 2)
        values = torch.cat([*(values for _, values in before), v], 2)
        positions = torch.arange(last, device=q.device)
        return masked_attention(
            q, keys, values, visibility_mask(positions[prefill.block.start + prefill.start :], positions, rule), rule
        )


def starts_sequence(prefill: PrefillChunk) -> bool:
    """Tells whether nothing stands before the tokens of ``prefill``."""
    return prefill.start == 0 and prefill.block.parent is None


def cached_keys_values(layer: int, prefill: PrefillChunk) -> list[tuple[Tensor, Tensor]]:
    """Returns keys and values ``[1, Hk, *, D]`` of what stands before ``prefill``, in order."""
    found = []
    block: CacheBlock | None = prefill.block
    end = prefill.start
    while block is not None:
        if end:
            found.append((block.keys[layer][None, :, :end], block.values[layer][None, :, :end]))
        block = block.parent
        end = len(block) if block is not None else 0
    return found[::-1]


class ExactAttentionBackend(AttentionBackend):
    """
    Args:
        row_step: of which number the rows of a step must be a multiple (``quartet.models.exact.row_multiple``).
    """

    def __init__(self, row_step: int) -> None:
        super().__init__(shares_prefixes=False)
        self._row_step = row_step

    def padded_rows(self, num_rows: int) -> int:
        return padded_rows(num_rows, self._row_step)

    def slot_length(self, num_tokens: int) -> int:
        return padded_key_length(num_tokens)

    def decode(self, cache: KVCache, rows: DecodeRows, spans: DraftRows | None = None) -> AttentionContext:
        if spans is not None:
            return ExactSpanAttention(cache, spans)
        return ExactDecodeAttention(cache, rows)

    def prefill(self, prefills: Sequence[PrefillChunk]) -> AttentionContext:
        return ExactPrefillAttention(prefills)


class ExactDecodeAttention(DecodeAttention):
    """One token of each row against its slot."""

    def places_read(self, num_tokens: int) -> int:
        return padded_key_length(num_tokens)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams) -> Tensor:
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

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams) -> Tensor:
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

    def _continue(
        self, layer: int, prefill: PrefillChunk, q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams
    ) -> Tensor:
        return _following(q, prefill.block.keys[layer], prefill.block.values[layer], prefill.start, rule)


def _branching(q: Tensor, keys: Tensor, values: Tensor, start: int, tree: DraftTree, rule: AttentionParams) -> Tensor:
    """Attends as ``_following`` does, each way through the tree as a sequence of its own."""
    if len(tree.paths) == 1:
        return _following(q, keys, values, start, rule)
    out = q.new_empty(*q.shape[:3], values.shape[2])
    for path in tree.paths:
        places = [*range(start), *(start + i for i in path)]
        out[:, :, path] = _following(q[:, :, path], keys[:, places], values[:, places], start, rule)
    return out


def _following(q: Tensor, keys: Tensor, values: Tensor, start: int, rule: AttentionParams) -> Tensor:
    """Attends from ``q [1, H, t, D]`` of tokens from ``start`` on, over ``keys, values [Hk, *, D]`` stored from the
    first on."""
    parts = []
    for offset in range(0, q.shape[2], CALL_ROWS):
        rows = q[:, :, offset : offset + CALL_ROWS]
        stop = start + offset + rows.shape[2]
        num_keys, missing = padded_key_length(stop), -rows.shape[2] % VECTOR
        k, v = (F.pad(stored[None, :, :stop], (0, 0, 0, num_keys - stop)) for stored in (keys, values))
        mask = additive_mask(torch.arange(start + offset, stop + missing), num_keys, rule, q.dtype)[None, None]
        out = exact_masked_attention(F.pad(rows, (0, 0, 0, missing)), k, v, mask, rule)
        parts.append(out[:, :, : rows.shape[2]])
    return torch.cat(parts, 2)
