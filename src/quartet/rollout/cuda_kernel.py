"""Triton kernels of a decode step: attention over a paged KV cache, and the statistics that the sampler needs.

Shapes: B rows, H query heads, Hk key/value heads, D head size, P tokens per page, N pages, W pages of a row, S splits,
V vocabulary.

Attention: one program takes one row, one key/value head with all its query heads, and one *split* of 256 tokens; a
second kernel merges the splits by their log-sum-exp. Where a split begins depends on nothing but the position, so a
row's result does not depend on which rows run beside it, and the grid is fixed by the width of the page tables, as a
CUDA graph needs it: programs beyond a row's length return at once.

Importing this module needs Triton. With ``TRITON_INTERPRET=1`` in the environment it runs on the CPU.
"""

# Arguments of a kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quartet.models.attention import LayerRule

SPLIT = 256
"""Tokens of one program."""
TILE = 64
"""Tokens of one step inside it."""
_STATISTICS_BLOCK = 128
_STATISTICS_BLOCKS = 8
"""Blocks of one program."""
_SMALLEST_PRODUCT = 16
"""Rows of the smallest matrix product; a group of fewer query heads is padded to it."""


@triton.jit
def _tanh(x):
    # Exact limits at both ends: exp overflows to inf or vanishes.
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _attend_split(
    q_ptr, k_ptr, v_ptr, tables_ptr, positions_ptr, out_ptr, lse_ptr,
    q_row_stride, q_head_stride, table_stride, scaling, cap,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, NUM_KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    SIZE_K: tl.constexpr, BLOCK_K: tl.constexpr, SIZE_V: tl.constexpr, BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr, SPAN: tl.constexpr, STEP: tl.constexpr, NUM_SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    last = tl.load(positions_ptr + row).to(tl.int32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(last - WINDOW + 1, 0)
    begin = tl.maximum(split * SPAN, first // STEP * STEP)
    end = tl.minimum(split * SPAN + SPAN, last + 1)
    if begin < end:
        member = tl.arange(0, ROWS)
        head = kv_head * GROUP + member
        place_k = tl.arange(0, BLOCK_K)
        place_v = tl.arange(0, BLOCK_V)
        q = tl.load(
            q_ptr + row * q_row_stride + head[:, None] * q_head_stride + place_k[None, :],
            mask=(member < GROUP)[:, None] & (place_k < SIZE_K)[None, :],
            other=0.0,
        )
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, BLOCK_V], tl.float32)
        for start in range(begin, end, STEP):
            token = start + tl.arange(0, STEP)
            inside = (token >= first) & (token < end)
            page = tl.load(tables_ptr + row * table_stride + token // PAGE, mask=inside, other=0).to(tl.int64)
            place = (page * NUM_KV + kv_head) * PAGE + token % PAGE
            k = tl.load(
                k_ptr + place[:, None] * SIZE_K + place_k[None, :],
                mask=inside[:, None] & (place_k < SIZE_K)[None, :],
                other=0.0,
            )
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
            if CAPPED:
                scores = cap * _tanh(scores / cap)
            scores = tl.where(inside[None, :], scores, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp(scores - higher[:, None])
            decay = tl.exp(peak - higher)
            # What is not inside reads as 0: a page may hold anything behind its last token.
            v = tl.load(
                v_ptr + place[:, None] * SIZE_V + place_v[None, :],
                mask=inside[:, None] & (place_v < SIZE_V)[None, :],
                other=0.0,
            )
            total = total * decay + tl.sum(weights, 1)
            mixed = mixed * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
            peak = higher
        mixed = mixed / total[:, None]
        slot = (row * NUM_KV * GROUP + head) * NUM_SPLITS + split
        kept = (member < GROUP)[:, None] & (place_v < SIZE_V)[None, :]
        tl.store(out_ptr + slot[:, None] * SIZE_V + place_v[None, :], mixed.to(out_ptr.dtype.element_ty), mask=kept)
        if NUM_SPLITS > 1:
            tl.store(lse_ptr + slot, peak + tl.log(total), mask=member < GROUP)


@triton.jit
def _merge_splits(
    parts_ptr, lse_ptr, positions_ptr, out_ptr,
    WINDOW: tl.constexpr, NUM_HEADS: tl.constexpr, SIZE_V: tl.constexpr, BLOCK_V: tl.constexpr,
    SPAN: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = row * NUM_HEADS + tl.program_id(1)
    last = tl.load(positions_ptr + row).to(tl.int32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(last - WINDOW + 1, 0)
    place = tl.arange(0, BLOCK_V)
    peak = float("-inf")
    total = 0.0
    mixed = tl.zeros([BLOCK_V], tl.float32)
    # Splits outside of the range were not written.
    for split in range(first // SPAN, last // SPAN + 1):
        lse = tl.load(lse_ptr + slot * NUM_SPLITS + split)
        part = tl.load(parts_ptr + (slot * NUM_SPLITS + split) * SIZE_V + place, mask=place < SIZE_V, other=0.0)
        higher = tl.maximum(peak, lse)
        decay = tl.exp(peak - higher)
        weight = tl.exp(lse - higher)
        total = total * decay + weight
        mixed = mixed * decay + weight * part
        peak = higher
    tl.store(out_ptr + slot * SIZE_V + place, (mixed / total).to(out_ptr.dtype.element_ty), mask=place < SIZE_V)


def paged_decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: Tensor, positions: Tensor, rule: LayerRule
) -> Tensor:
    """Attention of one new token per row over what its pages hold, its own key and value included.

    Args:
        q: ``[B, H, Dk]``.
        k_pages, v_pages: ``[N, Hk, P, Dk]`` and ``[N, Hk, P, Dv]``, contiguous, in the dtype of ``q``.
        tables: ``[B, W]`` int32, pages of each row.
        positions: ``[B]`` int64 of the new tokens; a row sees positions 0 up to its own.

    Returns:
        ``[B, H, Dv]``; softmax and sums in fp32.
    """
    if q.stride(2) != 1:
        q = q.contiguous()
    num_rows, num_heads, size_k = q.shape
    num_kv, page_size, size_v = k_pages.shape[1], k_pages.shape[2], v_pages.shape[3]
    num_splits = triton.cdiv(tables.shape[1] * page_size, SPLIT)
    group = num_heads // num_kv
    out = q.new_empty(num_rows, num_heads, size_v)
    alone = num_splits == 1
    parts = out if alone else q.new_empty(num_rows, num_heads, num_splits, size_v, dtype=torch.float32)
    lse = out if alone else q.new_empty(num_rows, num_heads, num_splits, dtype=torch.float32)
    window, cap = rule.window or 0, rule.softcap or 1.0
    exact = q.dtype == torch.float32
    _attend_split[(num_rows, num_kv, num_splits)](
        q, k_pages, v_pages, tables, positions, parts, lse,
        q.stride(0), q.stride(1), tables.stride(0), rule.scaling, cap,
        WINDOW=window, CAPPED=rule.softcap is not None, NUM_KV=num_kv, GROUP=group,
        ROWS=max(_SMALLEST_PRODUCT, triton.next_power_of_2(group)),
        SIZE_K=size_k, BLOCK_K=max(_SMALLEST_PRODUCT, triton.next_power_of_2(size_k)),
        SIZE_V=size_v, BLOCK_V=max(_SMALLEST_PRODUCT, triton.next_power_of_2(size_v)),
        PAGE=page_size, SPAN=SPLIT, STEP=TILE, NUM_SPLITS=num_splits,
        PRECISION="ieee" if exact else "tf32", num_warps=4, num_stages=2 if exact else 3,
    )  # fmt: skip
    if not alone:
        _merge_splits[(num_rows, num_heads)](
            parts, lse, positions, out,
            WINDOW=window, NUM_HEADS=num_heads, SIZE_V=size_v, BLOCK_V=triton.next_power_of_2(size_v),
            SPAN=SPLIT, NUM_SPLITS=num_splits, num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def _block_statistics(
    logits_ptr, temperature_ptr, peaks_ptr, sums_ptr, row_stride, vocab_size, num_blocks,
    BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    logits = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab_size, other=float("-inf"))
    scaled = logits / tl.load(temperature_ptr + row)
    peak = tl.max(scaled, 1)
    # A block of -inf alone has no weight; a NaN that the maximum skipped comes back through the sum.
    total = tl.sum(tl.exp(scaled - tl.maximum(peak, -3.4e38)[:, None]), 1)
    tl.store(peaks_ptr + row * num_blocks + block, peak, mask=block < num_blocks)
    tl.store(sums_ptr + row * num_blocks + block, total, mask=block < num_blocks)


def block_statistics(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Of every 128 scaled logits of a row their largest and the sum of ``exp(scaled - largest)``, in one pass.

    Args:
        logits: ``[B, V]`` fp32, contiguous in the last dimension.
        temperature: ``[B, 1]`` fp32.

    Returns:
        Both ``[B, V / 128]`` (rounded up) fp32.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, _STATISTICS_BLOCK)
    peaks, sums = logits.new_empty(2, num_rows, num_blocks)
    _block_statistics[(num_rows, triton.cdiv(num_blocks, _STATISTICS_BLOCKS))](
        logits, temperature, peaks, sums, logits.stride(0), vocab_size, num_blocks,
        BLOCK=_STATISTICS_BLOCK, COUNT=_STATISTICS_BLOCKS, num_warps=4,
    )  # fmt: skip
    return peaks, sums
