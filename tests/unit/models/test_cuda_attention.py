"""Attention for CUDA devices as far as a CPU can tell: its masks against ancestor walks, its uncompiled flex form and
its fp64 form against the dense formula, and what it hands to the flash kernel."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quartet.models import attention
from quartet.models.attention import (
    BLOCK,
    AttentionParams,
    PackedAttention,
    SegmentTree,
    block_masks,
    cuda_tree_attention,
    dense_mask,
    masked_attention,
    tree_index,
)

TREE = ((5, 3, 2, 7, 4, 1, 6), (-1, 0, 1, 1, 0, -1, 5))
ROOTS = ((4, 9, 9, 1), (-1, -1, -1, -1))


def random_tree(seed: int, longest: int = 90) -> tuple[list[int], list[int]]:
    """Depth-first, up to three levels."""
    draw = random.Random(seed)
    lengths: list[int] = []
    parents: list[int] = []

    def grow(parent: int, depth: int) -> None:
        own = len(lengths)
        lengths.append(draw.randint(1, longest))
        parents.append(parent)
        for _ in range(draw.randint(0, 3) if depth < 3 else 0):
            grow(own, depth + 1)

    for _ in range(draw.randint(1, 3)):
        grow(-1, 1)
    return lengths, parents


def walked_mask(lengths: Sequence[int], parents: Sequence[int], window: int | None) -> Tensor:
    """The definition: each token's chain of ancestors, listed."""
    owner = [s for s, length in enumerate(lengths) for _ in range(length)]
    starts = [sum(lengths[:s]) for s in range(len(lengths))]
    mask = torch.zeros(len(owner), len(owner), dtype=torch.bool)
    for i, segment in enumerate(owner):
        chain = [segment]
        while parents[chain[-1]] >= 0:
            chain.append(parents[chain[-1]])
        tokens = [starts[s] + t for s in reversed(chain) for t in range(lengths[s])]
        seen = tokens[: tokens.index(i) + 1]
        mask[i, seen if window is None else seen[-window:]] = True
    return mask


def assert_blocks_are_right(lengths: Sequence[int], parents: Sequence[int], window: int | None) -> Tensor:
    """Returns which blocks are full."""
    num_tokens = sum(lengths)
    partial, full = block_masks(tree_index(SegmentTree(lengths, parents)), window)
    padded = torch.nn.functional.pad(dense_mask(SegmentTree(lengths, parents), window), (0, -num_tokens % BLOCK) * 2)
    blocks = padded.view(len(full), BLOCK, len(full), BLOCK).transpose(1, 2).flatten(2)
    assert not bool((partial & full).any())
    assert bool((blocks.any(-1) <= (partial | full)).all()), "a visible pair in a block that is not computed"
    assert bool((full <= blocks.all(-1)).all()), "a hidden pair in a block computed without its mask"
    if window is None:
        assert torch.equal(partial | full, blocks.any(-1))
        assert torch.equal(full, blocks.all(-1))
    return full


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from([None, 20, 300]))
def test_blocks_hold_every_visible_pair(seed: int, window: int | None) -> None:
    assert_blocks_are_right(*random_tree(seed, longest=350), window)


@pytest.mark.parametrize("window", [None, 255, 256, 257])
@pytest.mark.parametrize("parent", [-1, 0])
@pytest.mark.parametrize("first", [255, 256, 257])
def test_blocks_at_their_borders(first: int, parent: int, window: int | None) -> None:
    """A segment that ends one token before, at, or one after the end of a block, with and without a child behind it."""
    full = assert_blocks_are_right((first, 200, 130), (-1, parent, -1), window)
    reaches = first >= 256 or parent == 0
    assert bool(full[1, 0]) == (reaches and (window is None or window > 255))


RULES = [
    AttentionParams(0.3),
    AttentionParams(0.3, window=6),
    AttentionParams(0.3, softcap=2.0),
    AttentionParams(0.3, window=3, softcap=2.0),
    AttentionParams(0.3, window=1000),
]


def heads(num_tokens: int, size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size + num_tokens)
    shapes = [(1, n, num_tokens, size) for n in (4, 2, 2)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("size", [8])
@pytest.mark.parametrize("tree", [TREE, random_tree(3)], ids=["tree", "large"])
@torch.no_grad()
def test_flex_form_equals_the_dense_formula(
    tree: tuple[Sequence[int], Sequence[int]],
    size: int,
    rule: AttentionParams,
    tolerances: dict[torch.dtype, tuple[float, float]],
) -> None:
    q, k, v = heads(sum(tree[0]), size)
    expected = masked_attention(q, k, v, walked_mask(*tree, rule.window), rule)
    atol, rtol = tolerances[torch.float32]
    torch.testing.assert_close(
        cuda_tree_attention(q, k, v, rule, SegmentTree(*tree), {}), expected, atol=atol, rtol=rtol
    )


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_fp64_form_has_the_gradients_of_the_cpu(
    rule: AttentionParams, tolerances: dict[torch.dtype, tuple[float, float]]
) -> None:
    inputs = heads(sum(TREE[0]), 8, torch.float64)
    weight = torch.randn(inputs[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found, expected = (
        torch.autograd.grad((out * weight).sum(), inputs)
        for out in (
            cuda_tree_attention(*inputs, rule, SegmentTree(*TREE), {}),
            PackedAttention(*TREE).attend(0, *inputs, rule),
        )
    )
    atol, rtol = tolerances[torch.float64]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=rtol)


# Flash attention ------------------------------------------------------------------------------------------


def flash_double(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: object
) -> Tensor:
    """What the flash kernel documents: ``[T, H, D]``, a window of ``(left, right)`` keys around the query's own."""
    assert torch.equal(cu_q, cu_k)
    assert cu_q.dtype == torch.int32
    assert max_q == max_k == int(cu_q.diff().max())
    left, right = options["window_size"]
    assert q.shape[1] == k.shape[1] or options["enable_gqa"]
    position = torch.arange(len(q))
    owner = torch.bucketize(position, cu_q[1:], right=True)
    distance = position[:, None] - position
    mask = (owner[:, None] == owner) & (distance >= -right)
    if left >= 0:
        mask &= distance <= left
    inputs = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return masked_attention(*inputs, mask, AttentionParams(options["scale"])).squeeze(0).transpose(0, 1)


@pytest.mark.parametrize("expands", [True, False], ids=["torch 2.12", "torch 2.11"])
@pytest.mark.parametrize("window", [None, 3])
def test_what_flash_attention_is_asked_for(
    window: int | None,
    expands: bool,
    monkeypatch: pytest.MonkeyPatch,
    tolerances: dict[torch.dtype, tuple[float, float]],
) -> None:
    monkeypatch.setattr(attention, "varlen_attn", flash_double)
    monkeypatch.setattr(attention, "_FLASH_EXPANDS_HEADS", expands)
    inputs = heads(sum(ROOTS[0]), 8)
    found = attention._flash(*inputs, 0.3, window, SegmentTree(*ROOTS), {})
    expected = masked_attention(*inputs, walked_mask(*ROOTS, window), AttentionParams(0.3))
    atol, rtol = tolerances[torch.float32]
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)
    for ours, theirs in zip(*(torch.autograd.grad(x.square().sum(), inputs) for x in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    ("dtype", "size", "rule", "parents", "takes"),
    [
        (torch.bfloat16, 64, AttentionParams(1.0), ROOTS[1], True),
        (torch.float16, 256, AttentionParams(1.0, window=5), ROOTS[1], True),
        (torch.float32, 64, AttentionParams(1.0), ROOTS[1], False),
        (torch.bfloat16, 64, AttentionParams(1.0, softcap=3.0), ROOTS[1], False),
        (torch.bfloat16, 64, AttentionParams(1.0), TREE[1], False),
        (torch.bfloat16, 60, AttentionParams(1.0), ROOTS[1], False),
        (torch.bfloat16, 264, AttentionParams(1.0), ROOTS[1], False),
    ],
)
def test_what_flash_attention_takes(
    dtype: torch.dtype, size: int, rule: AttentionParams, parents: Sequence[int], takes: bool
) -> None:
    q = torch.zeros(1, 2, 3, size, dtype=dtype)
    assert attention._flash_takes(q, q, rule, parents) is takes
