"""Attention over a packed tree of segments on a CUDA device, forward and backward, by torch's own kernels.

Shapes: T packed tokens, N segments, H query heads, Hk key/value heads, D head size, C blocks of 128 tokens.

=========================================== ======================================================================
packs of roots, fp16 or bf16, no soft cap   flash attention over sequences of varying length (``varlen_attn``)
trees, soft caps, fp32                      flex attention, compiled, under a block mask made from the tree
fp64 (gradient checks)                      the formula over a dense ``[T, T]`` mask
=========================================== ======================================================================

In depth-first order the tokens of a segment and of all its descendants are one interval, so "token i sees token j" is
``j <= i < end[j]``, where ``end[j]`` is where the descendants of j's segment end. Windows count true positions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from quartet.models.attention import LayerRule, masked_attention
from quartet.models.memory import to_device
from quartet.models.tree_attention import SegmentTree

BLOCK = 128
"""Tokens of one side of a block of the mask; flex attention's default."""
_SMALLEST_FLEX_HEAD = 16
_LARGEST_FLASH_HEAD = 256
_MAX_FLEX_KERNELS = 64
_FLASH_EXPANDS_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Since torch 2.12; before, every query head needs its own key/value head."""

Cache = MutableMapping[object, object]
_T = TypeVar("_T")


def cuda_tree_attention(q: Tensor, k: Tensor, v: Tensor, rule: LayerRule, tree: SegmentTree, cache: Cache) -> Tensor:
    """Differentiable attention of a pack.

    Args:
        q: ``[1, H, T, D]``.
        k, v: ``[1, Hk, T, D]``.
        cache: of this pack; index tensors and block masks are made once and shared by all layers.

    Returns:
        ``[1, H, T, D]``.
    """
    window = rule.window if rule.window is not None and rule.window < tree.longest else None
    if q.dtype == torch.float64:
        mask = _cached(cache, ("dense", window), lambda: to_device(dense_mask(tree, window), q.device))
        return masked_attention(q, k, v, mask, rule)
    if q.is_cuda and _flash_takes(q, v, rule, tree.parents):
        return _flash(q, k, v, rule.scaling, window, tree, cache)
    return _flex(q, k, v, rule, window, tree, cache)


def _cached(cache: Cache, key: object, make: Callable[[], _T]) -> _T:
    if key not in cache:
        cache[key] = make()
    return cast(_T, cache[key])


# The tree, on the host ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TreeIndex:
    """``positions [T]`` and ``ends [T]`` (see the module's docstring), int32 on the CPU."""

    positions: Tensor
    ends: Tensor


def tree_index(tree: SegmentTree) -> TreeIndex:
    ends = list(tree.offsets[1:])
    for segment, stop in tree.stops.items():
        ends[segment] = stop
    sizes = torch.tensor(tree.lengths)
    starts, depths = torch.tensor(tree.offsets[:-1]), torch.tensor(tree.depths)
    positions = torch.arange(tree.offsets[-1]) - (starts - depths).repeat_interleave(sizes)
    return TreeIndex(positions.int(), torch.tensor(ends).repeat_interleave(sizes).int())


def dense_mask(tree: SegmentTree, window: int | None) -> Tensor:
    """``[T, T]`` bool, query by key."""
    index = tree_index(tree)
    token = torch.arange(len(index.positions))
    mask = (token <= token[:, None]) & (token[:, None] < index.ends)
    return mask if window is None else mask & (index.positions[:, None] - index.positions < window)


def block_masks(index: TreeIndex, window: int | None) -> tuple[Tensor, Tensor]:
    """Which blocks of 128 queries by 128 keys hold something visible.

    Returns:
        ``partial [C, C]`` and ``full [C, C]`` bool: blocks to compute under the mask, and blocks all of whose pairs
        are visible. With a window some partial blocks may turn out empty; without one none does.
    """
    num_tokens = len(index.ends)
    ragged = -num_tokens % BLOCK

    def blocks(x: Tensor, filler: int) -> Tensor:
        return F.pad(x, (0, ragged), value=filler).view(-1, BLOCK)

    highest_end = blocks(index.ends, 0).amax(1)
    lowest_end = blocks(index.ends, 0).amin(1)
    block = torch.arange(len(highest_end))
    first = block * BLOCK
    last = torch.clamp(first + BLOCK, max=num_tokens) - 1
    before = block[None, :] < block[:, None]
    some = (before & (highest_end[None, :] > first[:, None])) | torch.eye(len(block), dtype=torch.bool)
    full = before & (lowest_end[None, :] > last[:, None])
    if ragged:
        full[-1] = False
    if window is not None:
        low, high = blocks(index.positions, 2**30).amin(1), blocks(index.positions, -1).amax(1)
        some &= low[:, None] - high[None, :] < window
        full &= high[:, None] - low[None, :] < window
    return some & ~full, full


# Flash attention over roots -------------------------------------------------------------------------------


def _flash_takes(q: Tensor, v: Tensor, rule: LayerRule, parents: Sequence[int]) -> bool:
    size = q.shape[-1]
    fits = size % 8 == 0 and size <= _LARGEST_FLASH_HEAD and v.shape[-1] == size
    half = q.dtype in (torch.float16, torch.bfloat16)
    return half and fits and rule.softcap is None and all(parent < 0 for parent in parents)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, tree: SegmentTree, cache: Cache
) -> Tensor:
    cu_seqlens = _cached(
        cache, "cu_seqlens", lambda: to_device(torch.tensor(tree.offsets, dtype=torch.int32), q.device)
    )
    share = q.shape[1] // k.shape[1]
    options: dict[str, Any] = {}
    if _FLASH_EXPANDS_HEADS:
        options["enable_gqa"] = share > 1
    elif share > 1:
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    packed_q, packed_k, packed_v = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
    longest = max(tree.lengths)
    # (left, right): the keys before and after the query's own.
    reach = (-1 if window is None else window - 1, 0)
    out = varlen_attn(
        packed_q, packed_k, packed_v, cu_seqlens, cu_seqlens, longest, longest,
        scale=scaling, window_size=reach, **options,
    )  # fmt: skip
    return cast(Tensor, out).transpose(0, 1).unsqueeze(0)


# Flex attention over trees --------------------------------------------------------------------------------


def _flex(
    q: Tensor, k: Tensor, v: Tensor, rule: LayerRule, window: int | None, tree: SegmentTree, cache: Cache
) -> Tensor:
    index = _cached(cache, "index", lambda: tree_index(tree))
    mask = _cached(cache, ("blocks", window), lambda: block_mask(index, window, q.device))
    size = v.shape[-1]
    # The kernel's smallest product has 16 columns; zeros change no score and add columns that are cut off again.
    q, k, v = (F.pad(x, (0, max(0, _SMALLEST_FLEX_HEAD - x.shape[-1]))) for x in (q, k, v))
    kernel = _compiled_flex() if q.is_cuda else cast(Callable[..., Tensor], flex_attention)
    score_mod = None if rule.softcap is None else _soft_cap(rule.softcap, q.device)
    out = kernel(q, k, v, score_mod=score_mod, block_mask=mask, scale=rule.scaling, enable_gqa=True)
    return out[..., :size]


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    # One kernel per kind of mask, cap, dtype, head shape and gradient mode; several models share the process.
    torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, _MAX_FLEX_KERNELS)
    # fullgraph: past that limit it raises, where it would otherwise quietly build [T, T] scores.
    return cast(Callable[..., Tensor], torch.compile(flex_attention, dynamic=True, fullgraph=True))


@functools.cache
def _soft_cap(cap: float, device: torch.device) -> Callable[..., Tensor]:
    # A tensor: with dynamic shapes the compiler cannot take a captured Python float.
    limit = torch.tensor(cap, device=device)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return limit * torch.tanh(score / limit)

    return score_mod


def block_mask(index: TreeIndex, window: int | None, device: torch.device) -> BlockMask:
    """The tree's mask for flex attention, made on the host without a ``[T, T]`` array."""
    num_tokens = len(index.ends)
    ends = to_device(index.ends, device)
    if window is None:

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j <= i) & (i < ends[j])
    else:
        positions = to_device(index.positions, device)
        # A tensor, not a number: windows of any size share one compiled kernel.
        floors = to_device(index.positions - window, device)

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j <= i) & (i < ends[j]) & (positions[j] > floors[i])

    partial, full = block_masks(index, window)
    num_partial, where_partial = _listed(partial, device)
    num_full, where_full = _listed(full, device)
    return BlockMask.from_kv_blocks(
        num_partial, where_partial, num_full, where_full,
        BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(num_tokens, num_tokens),
    )  # fmt: skip


def _listed(blocks: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """``[C, C]`` bool → number ``[1, 1, C]`` and indices ``[1, 1, C, C]`` of the blocks of each row, those first."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return to_device(blocks.sum(-1).int()[None, None], device), to_device(order.int()[None, None], device)
