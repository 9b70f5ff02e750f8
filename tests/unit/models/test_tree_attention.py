"""Attention over trees of segments against its definition: every segment alone behind its ancestors."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quartet.models import attention
from quartet.models.attention import (
    AttentionParams,
    PackedAttention,
    SegmentTree,
    masked_attention,
    tree_attention,
    visibility_mask,
)

# A root (6) with a leaf (2), an only child behind its parent (3, 1), a fork (4) of three leaves (2, 2, 5); a lone root.
LENGTHS = (6, 2, 3, 1, 4, 2, 2, 5, 3)
PARENTS = (-1, 0, 0, 2, 0, 4, 4, 4, -1)

RULES = {
    "plain": AttentionParams(0.3),
    "window": AttentionParams(0.3, window=3),
    # Above every segment and below the longest chain; above both.
    "wide_window": AttentionParams(0.3, window=8),
    "idle_window": AttentionParams(0.3, window=100),
    "softcap": AttentionParams(0.3, softcap=2.0),
    "window_and_softcap": AttentionParams(0.3, window=5, softcap=2.0),
}


def by_definition(q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams, lengths, parents) -> Tensor:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    out = []
    for i, length in enumerate(lengths):
        rows: list[int] = []
        segment = i
        while segment >= 0:
            rows = [*range(starts[segment], starts[segment] + lengths[segment]), *rows]
            segment = parents[segment]
        positions = torch.arange(len(rows))
        mask = visibility_mask(positions[-length:], positions, rule)
        out.append(masked_attention(q[:, :, rows[-length:]], k[:, :, rows], v[:, :, rows], mask, rule))
    return torch.cat(out, dim=2)


def make_inputs(num_tokens: int, heads=(4, 2), size=8, dtype=torch.float64, seed=0) -> list[Tensor]:
    """``q, k, v`` as a model hands them over: ``[1, heads, T, D]`` views of memory in token order."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, num_tokens, num_heads, size) for num_heads in (heads[0], heads[1], heads[1])]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(dtype).transpose(1, 2) for x in drawn]


def with_gradients(attend, inputs: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Output and the gradients of the inputs, under one fixed gradient of the output."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    out = attend(*leaves)
    generator = torch.Generator().manual_seed(99)
    # Rounded, so that every dtype gets the same.
    grad = torch.randn(out.transpose(1, 2).shape, generator=generator, dtype=torch.float64).bfloat16()
    out.backward(grad.transpose(1, 2).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def assert_agree(found: list[Tensor], expected: list[Tensor], tolerance: tuple[float, float]) -> None:
    """Gradients on the scale of the largest: that of a query with a single key is 0."""
    largest = max(float(x.abs().max()) for x in expected[1:])
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        scale = max(1.0, largest) if i else 1.0
        torch.testing.assert_close(ours.double() / scale, theirs.double() / scale, atol=tolerance[0], rtol=tolerance[1])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precisions_stay_within_the_table(rule, dtype, tolerances):
    """Against fp64 on the same rounded inputs, with segments longer than a kernel block."""
    lengths = (70, 600, 40, 300, 40)
    parents = (-1, 0, 0, 2, 2)
    inputs = make_inputs(sum(lengths), (4, 2), 16, dtype)
    ours = with_gradients(lambda *x: PackedAttention(lengths, parents).attend(0, *x, rule), inputs)
    assert {x.dtype for x in ours} == {dtype}
    theirs = with_gradients(lambda *x: by_definition(*x, rule, lengths, parents), inputs, torch.float64)
    assert_agree(ours, theirs, tolerances[dtype])


@st.composite
def trees(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths and parents in depth-first order."""
    parents: list[int] = []
    open_chain: list[int] = []
    for i in range(draw(st.integers(1, 9))):
        depth = draw(st.integers(0, len(open_chain)))
        parents.append(open_chain[depth - 1] if depth else -1)
        open_chain = [*open_chain[:depth], i]
    return tuple(draw(st.integers(1, 4)) for _ in parents), tuple(parents)


@given(trees(), st.sampled_from(sorted(RULES)), st.sampled_from([(4, 2), (3, 1), (2, 2)]))
@example((LENGTHS, PARENTS), "plain", (4, 2))
@example((LENGTHS, PARENTS), "window_and_softcap", (3, 1))
def test_any_tree_follows_the_definition(tree, name, heads):
    rule = RULES[name]
    inputs = make_inputs(sum(tree[0]), heads, seed=sum(tree[0]))
    ours = with_gradients(lambda *x: PackedAttention(*tree).attend(0, *x, rule), inputs)
    theirs = with_gradients(lambda *x: by_definition(*x, rule, *tree), inputs)
    assert_agree(ours, theirs, (1e-13, 1e-12))


def test_gradcheck():
    tree = SegmentTree((2, 1, 2, 1, 1), (-1, 0, 0, 2, 2))
    inputs = [x.requires_grad_() for x in make_inputs(7, (2, 1), 3)]
    assert torch.autograd.gradcheck(lambda q, k, v: tree_attention(q, k, v, tree, 0.4), inputs, fast_mode=False)


@pytest.mark.parametrize(
    ("lengths", "parents", "message"),
    [
        ((1, 1), (-1,), "1 parents for 2 segments"),
        ((1, 1, 1), (-1, -1, 0), "segment 2 must follow the descendants of its parent 0 directly"),
    ],
)
def test_segments_in_the_wrong_order_are_refused(lengths, parents, message):
    with pytest.raises(ValueError, match=message):
        PackedAttention(lengths, parents)


class _Calls(TorchDispatchMode):
    """Counts the kernel's calls by ``(direction, causal)``."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, bool]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if "flash_attention_for_cpu" in name:
            backward = name.endswith("backward")
            # Trailing defaults are left out.
            causal = args[7] if backward else len(args) > 4 and args[4]
            self.found["backward" if backward else "forward", causal] += 1
        return func(*args, **(kwargs or {}))


def test_a_prompt_is_read_once_for_its_group():
    """64 responses of three lengths: four calls over themselves, one of all of them over the prompt."""
    lengths = (50, *[3] * 20, *[4] * 30, *[7] * 14)
    inputs = make_inputs(sum(lengths))
    with _Calls() as calls:
        with_gradients(lambda *x: PackedAttention(lengths, (-1, *[0] * 64)).attend(0, *x, AttentionParams(1.0)), inputs)
    assert calls.found == {(side, causal): 4 if causal else 1 for side in ("forward", "backward") for causal in (0, 1)}


# Scores of every key, root first: the winner in the root, in the leaves, and as many winners as keys.
EXTREME = {
    "root": [1e4, -1e4, -2e4, -3e4, -4e4, -5e4, -6e4],
    "leaves": [-3e4, -2e4, -1e4, 1e4, 2e4, 3e4, 4e4],
    "ties": [1e4] * 7,
}


@pytest.mark.parametrize("name", EXTREME)
def test_extreme_scores_join_without_overflow(name, tolerances):
    lengths, parents, rule = (3, 2, 2), (-1, 0, 0), AttentionParams(1.0)
    q, k, v = make_inputs(7, (2, 1), 4)
    q, k = torch.ones_like(q), torch.ones_like(k) * torch.tensor(EXTREME[name]).view(1, 1, 7, 1) / 4
    context = PackedAttention(lengths, parents)

    def run(attend, dtype=torch.float64):
        out, dq, dk, dv = with_gradients(attend, [q, k, v], dtype)
        # The gradient of q is a sum of differences of keys.
        return [out, dq / 1e4, dk, dv]

    theirs = run(lambda *x: by_definition(*x, rule, lengths, parents))
    assert_agree(run(lambda *x: context.attend(0, *x, rule)), theirs, tolerances[torch.float64])
    single = run(lambda *x: context.attend(0, *x, rule), torch.float32)
    assert all(bool(torch.isfinite(x).all()) for x in single)
    # A log-sum-exp of 1e4 is known to 1e-3 in fp32, which shows where several keys have weight.
    if name != "ties":
        assert_agree(single, theirs, tolerances[torch.float32])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_inputs_stay_as_they_were(rule):
    inputs = make_inputs(sum(LENGTHS))
    before = [x.clone() for x in inputs]
    with_gradients(lambda *x: PackedAttention(LENGTHS, PARENTS).attend(0, *x, rule), inputs)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_any_strides():
    """Contiguous by head, expanded, and with scattered rows, gradients of the output included."""
    tree, rule = PackedAttention(LENGTHS, PARENTS), AttentionParams(0.3)
    q, k, v = make_inputs(sum(LENGTHS), (4, 4))
    expected = with_gradients(lambda *x: tree.attend(0, *x, rule), [q, k, v])
    for change in (Tensor.contiguous, lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)):
        changed = with_gradients(lambda *x, change=change: tree.attend(0, *map(change, x), rule), [q, k, v])
        assert all(torch.equal(x, y) for x, y in zip(changed, expected, strict=True))
    leaf = q[:, :1].clone().requires_grad_()
    wide = leaf.expand(1, 4, -1, -1)
    (tree.attend(0, wide, k, v, rule).sum() + wide.sum()).backward()
    twin = leaf.detach().clone().requires_grad_()
    (by_definition(twin.expand(1, 4, -1, -1), k, v, rule, LENGTHS, PARENTS).sum() + 4 * twin.sum()).backward()
    torch.testing.assert_close(leaf.grad, twin.grad)


def test_values_may_have_their_own_head_size():
    q, k, _ = make_inputs(sum(LENGTHS))
    v = make_inputs(sum(LENGTHS), size=5, seed=1)[1]
    rule = AttentionParams(0.3)
    ours = with_gradients(lambda *x: PackedAttention(LENGTHS, PARENTS).attend(0, *x, rule), [q, k, v])
    theirs = with_gradients(lambda *x: by_definition(*x, rule, LENGTHS, PARENTS), [q, k, v])
    assert_agree(ours, theirs, (1e-13, 1e-12))


def test_a_window_bounds_the_keys_of_a_call(monkeypatch):
    """A long root and its long children: no call takes more than two windows of keys."""
    lengths, parents = (700, 300, 20, 20), (-1, 0, 0, 0)
    rule = AttentionParams(0.3, window=150)
    inputs = make_inputs(sum(lengths), (2, 1), 4)
    expected = with_gradients(lambda *x: by_definition(*x, rule, lengths, parents), inputs)
    widths = []

    def recorded(q, k, v, mask, rule):
        widths.append((k.shape[0], q.shape[2], k.shape[2]))
        return masked_attention(q, k, v, mask, rule)

    monkeypatch.setattr(attention, "masked_attention", recorded)
    found = with_gradients(lambda *x: PackedAttention(lengths, parents).attend(0, *x, rule), inputs)
    assert_agree(found, expected, (1e-13, 1e-12))
    assert max(width for _, _, width in widths) == 299
    assert (2, 20, 169) in widths, "equal siblings share a call"
