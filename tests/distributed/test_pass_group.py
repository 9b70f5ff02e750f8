"""Exchanges within a pass, on two and four ranks: values and gradients, uneven and empty sizes, bytes, failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quartet.models.work import WorkCounter
from quartet.train.parallel.collectives import add_up
from quartet.train.parallel.pass_group import PassGroup, PeerFailed
from rank_forks import run_ranks

SIZES = {2: ([3, 2], [0, 4], [0, 0]), 4: ([3, 1, 0, 2], [0, 0, 1, 0], [2, 2, 2, 2])}


def _group() -> tuple[PassGroup, WorkCounter]:
    work, group = WorkCounter(), dist.group.WORLD
    assert group is not None
    return PassGroup("tensor", group, group, work), work


def _normal(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _differences(sizes: list[int]) -> dict[str, float]:
    """The largest differences, in values and gradients, from the same computed here from all ranks' inputs."""
    group, _ = _group()
    group.begin()
    world, rank, total = group.size, group.rank, sum(sizes)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    found = {}

    def compare(name: str, function: Any, inputs: list[Tensor], expected: list[Tensor], *, same: bool = False) -> None:
        """``expected[r]`` of all ``inputs``; every rank weighs its result with weights of its own, or the same ones."""
        here = inputs[rank].detach().clone().requires_grad_()
        out = function(here)
        weights = [_normal(0 if same else 9 + r, *e.shape) for r, e in enumerate(expected)]
        (out * weights[rank]).sum().backward()
        losses = [(e * w).sum() for e, w in zip(expected, weights, strict=True)]
        (grad,) = torch.autograd.grad(losses[0] if same else torch.stack(losses).sum(), [inputs[rank]])
        assert here.grad is not None
        pairs = ((out, expected[rank]), (here.grad, grad))
        found[name] = max(float((a - b).abs().max()) if b.numel() else 0.0 for a, b in pairs)
        assert all(a.shape == b.shape for a, b in pairs)

    rows = [_normal(r, n, 2, 3).requires_grad_() for r, n in enumerate(sizes)]
    compare("gather_rows", lambda x: group.gather_rows(x, sizes), rows, [torch.cat(rows)] * world)
    compare("join_rows", lambda x: group.join_rows(x, sizes), rows, [torch.cat(rows)] * world, same=True)
    addends = [_normal(r, total, 3).requires_grad_() for r in range(world)]
    summed = list(torch.stack(addends).sum(0).split(sizes))
    compare("scatter_rows", lambda x: group.scatter_rows(x, sizes), addends, summed)
    columns = [_normal(r, 1, 5, 3).requires_grad_() for r in range(world)]
    compare("gather_columns", group.gather_columns, columns, [torch.cat(columns, -1)] * world)
    tokens = [_normal(r, 1, 2 * world, n, 3).requires_grad_() for r, n in enumerate(sizes)]
    heads = list(torch.cat(tokens, 2).chunk(world, 1))
    compare("to_heads", lambda x: group.to_heads(x, sizes), tokens, heads)
    by_head = [_normal(r, 1, 2, total, 3).requires_grad_() for r in range(world)]
    by_token = list(torch.cat(by_head, 1).split(sizes, 2))
    compare("to_tokens", lambda x: group.to_tokens(x, sizes), by_head, by_token)
    assert torch.equal(group.stack(columns[rank]), torch.stack([c.detach() for c in columns]))
    assert own.stop <= total
    group.end()
    return found


def _all(world: int) -> list[dict[str, float]]:
    return [_differences(sizes) for sizes in SIZES[world]]


@pytest.mark.parametrize("world", [2, 4])
def test_values_and_gradients_are_those_of_one_process(world: int) -> None:
    for of_rank in run_ranks(world, _all, world):
        for found in of_rank:
            assert set(found) == {
                "gather_rows", "join_rows", "scatter_rows", "gather_columns", "to_heads", "to_tokens"
            }  # fmt: skip
            assert max(found.values()) < 1e-14


def test_halves_are_added_up_in_fp32() -> None:
    addends = [torch.tensor([256.0], dtype=torch.bfloat16), *[torch.ones(1, dtype=torch.bfloat16)] * 6]
    total = torch.empty_like(addends[0])
    add_up(addends, total)
    assert total.item() == 262.0  # each 1 by itself is lost: 256 + 1 rounds to 256


def _failing(rows: int) -> list[Any]:
    """A pass in which one rank fails, for each exchange before which it does; then one that goes well."""
    group, _ = _group()
    sizes, found = [rows] * group.size, []
    for place in range(4):
        group.begin()
        computed = 0
        try:
            for step in range(3):
                if (group.rank, step) == (1, place):
                    raise ValueError("no memory")
                group.gather_rows(torch.ones(rows, 2), sizes)
                computed += 1
            if (group.rank, place) == (1, 3):
                raise ValueError("no memory")
            group.end()
            told = "well"
        except (PeerFailed, ValueError) as error:
            told = str(error)
            group.idle()
            idle = group.gather_rows(torch.ones(rows, 2), sizes)
            assert idle.sum() == 2 * rows
        group.settle()
        group.begin()
        whole = group.gather_rows(torch.full((rows, 1), float(group.rank)), sizes)
        group.end()
        found.append((told, computed, whole[:, 0].tolist()))
    return found


def test_a_failure_reaches_all_ranks_and_the_next_pass_is_whole() -> None:
    first, second, third = run_ranks(3, _failing, 1)
    heard = "rank 1 of the tensor group failed in this pass"
    whole = [0.0, 1.0, 2.0]
    assert second == [("no memory", place, whole) for place in range(4)]
    assert first == third == [(heard, place, whole) for place in range(4)]
