"""Attention over a tree of segments: what the tree looks like to a kernel, and the kernel of the CPU.

Shapes: T packed tokens, N segments, H query heads, Hk key/value heads, D head size, L tokens of one segment, n segments
of one run.

A token attends to its own segment causally and to every ancestor wholly. Each of these parts is one call of torch's
flash kernel for the CPU, and parts are joined through their log-sum-exps: with ``o_i`` and ``l_i`` of part i the whole
is ``Σ exp(l_i − l) o_i``, ``l = logsumexp(l_i)``. A parent's part takes the queries of all its descendants in one call,
so a prompt is read once for its whole group. The flash backward of a part needs nothing but the joined output and
log-sum-exp (Dao et al. 2022, "FlashAttention", §B.2: they enter only through ``P = exp(s − l)`` and
``rowsum(dO ∘ O)``), so it is exact for each part, and the parts' gradients add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class SiblingRun:
    """Neighbouring segments of one length and one parent; a segment with children is a run of its own.

    Attributes:
        num: segments.
        length: tokens of each.
        depth: tokens of their ancestors.
        ancestors: the runs of their ancestors, root first.
    """

    num: int
    length: int
    depth: int
    ancestors: tuple[int, ...]


@dataclass(frozen=True)
class Inner:
    """A segment with descendants: its tokens ``start`` to ``end``, theirs from ``end`` to ``stop``."""

    start: int
    end: int
    stop: int


class SegmentTree:
    """Segments in depth-first order: the descendants of each follow it directly.

    An only child simply continues its parent: the two are joined into one segment, unless ``join`` is off.

    Args:
        lengths: tokens per segment.
        parents: index of each one's parent, -1 for a root. None: all are roots.

    Raises:
        ValueError: lengths or order are not as described.
    """

    def __init__(self, lengths: Sequence[int], parents: Sequence[int] | None = None, *, join: bool = True) -> None:
        parents = tuple(parents) if parents is not None else (-1,) * len(lengths)
        if len(parents) != len(lengths):
            raise ValueError(f"{len(parents)} parents for {len(lengths)} segments")
        if any(length < 1 for length in lengths):
            raise ValueError(f"a segment needs at least one token, found lengths {tuple(lengths)}")
        self.chains = _chains(parents)
        self.lengths, self.parents = tuple(lengths), parents
        if join:
            self.lengths, self.parents = _join_only_children(lengths, parents)
            self.chains = _chains(self.parents)

    def in_blocks(self, size: int) -> SegmentTree:
        """The same tokens with every segment as a chain of blocks of at most ``size``."""
        lengths: list[int] = []
        parents: list[int] = []
        ends: list[int] = []
        for length, parent in zip(self.lengths, self.parents, strict=True):
            before = ends[parent] if parent >= 0 else -1
            for start in range(0, length, size):
                lengths.append(min(size, length - start))
                parents.append(before)
                before = len(lengths) - 1
            ends.append(before)
        return SegmentTree(lengths, parents, join=False)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """``[N + 1]`` where each segment starts."""
        return tuple(accumulate(self.lengths, initial=0))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """``[N]`` tokens of each segment's ancestors: the position of its first token."""
        return tuple(sum(self.lengths[a] for a in chain) for chain in self.chains)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest chain."""
        return max(map(add, self.depths, self.lengths), default=0)

    @cached_property
    def sibling_runs(self) -> tuple[SiblingRun, ...]:
        inner = set(self.parents)
        runs: list[SiblingRun] = []
        run_of: dict[int, int] = {}
        for i, (length, parent) in enumerate(zip(self.lengths, self.parents, strict=True)):
            if i > 0 and i not in inner and parent == self.parents[i - 1] and length == self.lengths[i - 1]:
                last = runs[-1]
                runs[-1] = SiblingRun(last.num + 1, length, last.depth, last.ancestors)
            else:
                ancestors = tuple(run_of[a] for a in self.chains[i])
                runs.append(SiblingRun(1, length, self.depths[i], ancestors))
            run_of[i] = len(runs) - 1
        return tuple(runs)

    @cached_property
    def equal_runs(self) -> tuple[tuple[int, int], ...]:
        """``(segments, tokens of each)`` of neighbours of one length, whatever their parents."""
        return tuple((len(list(run)), length) for length, run in groupby(self.lengths))

    @cached_property
    def stops(self) -> dict[int, int]:
        """Where the last descendant of each segment ends that has any."""
        stops: dict[int, int] = {}
        for chain, stop in zip(self.chains, self.offsets[1:], strict=True):
            for a in chain:
                stops[a] = stop
        return stops

    @cached_property
    def inner(self) -> tuple[Inner, ...]:
        return tuple(Inner(self.offsets[a], self.offsets[a + 1], stop) for a, stop in sorted(self.stops.items()))


def _join_only_children(lengths: Sequence[int], parents: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    num_children = Counter(parents)
    place: list[int] = []
    kept: list[tuple[int, int]] = []
    for i, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
        if parent == i - 1 and parent >= 0 and num_children[parent] == 1:
            former, grandparent = kept[-1]
            kept[-1] = (former + length, grandparent)
        else:
            kept.append((length, place[parent] if parent >= 0 else -1))
        place.append(len(kept) - 1)
    return tuple(length for length, _ in kept), tuple(parent for _, parent in kept)


def _chains(parents: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The ancestors of each segment, root first."""
    chains: list[tuple[int, ...]] = []
    open_chain: tuple[int, ...] = ()
    for i, parent in enumerate(parents):
        if parent == -1:
            chain: tuple[int, ...] = ()
        elif parent in open_chain:
            chain = open_chain[: open_chain.index(parent) + 1]
        else:
            raise ValueError(f"segment {i} must follow the descendants of its parent {parent} directly")
        chains.append(chain)
        open_chain = (*chain, i)
    return tuple(chains)


def tree_attention(q: Tensor, k: Tensor, v: Tensor, tree: SegmentTree, scaling: float) -> Tensor:
    """Attention of every segment to its ancestors and, causally, to itself; differentiable once.

    Args:
        q: ``[1, H, T, D]``, any strides; fp64, fp32, bf16 or fp16, as ``k`` and ``v``.
        k, v: ``[1, Hk, T, D]``; H is a multiple of Hk.

    Returns:
        ``[1, H, T, D]`` in the dtype of ``q``; parts are joined in fp32 (fp64 stays) and rounded once.
    """
    out: Tensor = _TreeAttention.apply(_dense_rows(q), _dense_rows(k), _dense_rows(v), tree, scaling)
    return out


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tree: SegmentTree, scaling: float) -> Tensor:
        pieces = zip(*(_pieces(x, tree) for x in (q, k, v)), strict=True)
        parts, part_lses = zip(*(_flash(*piece, 0.0, True, scale=scaling) for piece in pieces), strict=True)
        out, lse = _joined(parts, _accumulator(q, tree)), _joined(part_lses)
        if tree.inner and len(parts) == 1:
            # Written into below, and what the kernel gave may be kept for a recomputation.
            out, lse = out.clone(), lse.clone()
        del parts, part_lses
        for node in tree.inner:
            _add_ancestor(out, lse, q, k, v, node, scaling)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tree, ctx.scaling = tree, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        tree, scaling = ctx.tree, ctx.scaling
        grad = _dense_rows(grads[0])
        pieces = zip(*(_pieces(x, tree) for x in (grad, q, k, v, out, lse)), strict=True)
        parts = zip(*(_flash_backward(*piece, 0.0, True, scale=scaling) for piece in pieces), strict=True)
        dq, dk, dv = (_joined(part, _accumulator(q, tree)) for part in parts)
        for node in tree.inner:
            grad_below, q_below, *joined = (x[:, :, node.end : node.stop] for x in (grad, q, out, lse))
            k_node, v_node = (x[:, :, node.start : node.end] for x in (k, v))
            found = _flash_backward(grad_below, q_below, k_node, v_node, *joined, 0.0, False, scale=scaling)
            dq[:, :, node.end : node.stop] += found[0]
            dk[:, :, node.start : node.end] += found[1]
            dv[:, :, node.start : node.end] += found[2]
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _add_ancestor(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, node: Inner, scaling: float) -> None:
    """Joins to all descendants of ``node``, in place, what they see of its tokens."""
    below = slice(node.end, node.stop)
    k_node, v_node = k[:, :, node.start : node.end], v[:, :, node.start : node.end]
    part, part_lse = _flash(q[:, :, below], k_node, v_node, 0.0, False, scale=scaling)
    former = lse[:, :, below]
    out[:, :, below].lerp_(part.to(out.dtype), torch.sigmoid(part_lse - former).unsqueeze(-1))
    former.copy_(torch.logaddexp(former, part_lse))


def _pieces(x: Tensor, tree: SegmentTree) -> list[Tensor]:
    """Views ``[n, H, L, ...]`` of the runs of ``x [1, H, T, ...]``."""
    pieces = x.split([num * length for num, length in tree.equal_runs], 2)
    return [
        piece if num == 1 else piece[0].unflatten(1, (num, length)).transpose(0, 1)
        for (num, length), piece in zip(tree.equal_runs, pieces, strict=True)
    ]


def _joined(parts: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """``[n, H, L, ...]`` of every run → ``[1, H, T, ...]`` over memory in token order, as the kernel leaves it."""
    rows = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    joined = rows[0] if len(rows) == 1 else torch.cat(rows)
    return joined.to(dtype or joined.dtype).transpose(0, 1).unsqueeze(0)


def _dense_rows(x: Tensor) -> Tensor:
    """As the kernel assumes them, whatever the other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _accumulator(x: Tensor, tree: SegmentTree) -> torch.dtype:
    """Half precision adds its parts up in fp32 and rounds once."""
    return torch.float32 if tree.inner and x.dtype != torch.float64 else x.dtype
