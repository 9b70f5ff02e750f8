"""Updates on a mesh in which something is odd or fails on one rank: what is left, and what the others are told."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import rank_forks
import sharded_failures as ranks

Results = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[1, 2], ids=["replicate", "shard"])
def results(request: pytest.FixtureRequest) -> Results:
    """What both ranks found, with whole copies and with halves."""
    return rank_forks.run_ranks(2, ranks.all_cases, request.param)


def test_a_rank_with_nothing_to_do_takes_part(results: Results, tolerances: Any) -> None:
    atol, rtol = tolerances[torch.float64]
    metrics, weights = ranks.nothing_to_do(None)
    for found, after in (result["nothing_to_do"] for result in results):
        assert found == pytest.approx(metrics, rel=rtol, abs=atol)
        for name, values in weights.items():
            torch.testing.assert_close(after[name], values, atol=atol, rtol=rtol)


def test_a_gradient_that_is_not_finite_is_skipped_by_all(results: Results) -> None:
    assert [result["not_finite"] for result in results] == [(1.0, True, 1, 1, 0.0)] * 2


def test_ranks_that_begin_differently_are_refused(results: Results) -> None:
    named = {"budget": "train.token_budget", "updates": "number of updates", "terms": "number of batches"}
    named["batch"] = "batch 0"
    is_cut, (first, second) = results[0]["is_cut"], [result["begun_differently"] for result in results]
    assert first == second
    for what, (error, is_unchanged) in first.items():
        assert is_unchanged or error == "nothing", what
        if what == "part of the weights":
            # Of a model that is cut, no other rank has the same part.
            assert error == "nothing" if is_cut else "differently: weights of part 0 of rank 0" in error
        else:
            assert error.startswith("RuntimeError") and f"differently: {named.get(what, what)} of rank 0" in error


def test_what_no_rank_needs_is_not_decayed(results: Results) -> None:
    assert [result["unused"] for result in results] == [True, True]


def test_copies_that_come_apart_are_noticed(results: Results) -> None:
    for error in (result["come_apart"] for result in results):
        expected = "nothing" if results[0]["is_cut"] else "RuntimeError: the ranks' models have come apart"
        assert error.startswith(expected)


def test_forward_passes_need_not_be_equally_many(results: Results) -> None:
    some, none = (result["forward_passes"] for result in results)
    assert set(some.values()) == {0.0}
    assert all(set(shapes.values()) == {(0,)} for shapes in none.values())


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("exit", {"shard": 1}),
        ("memory", {"shard": 3}),
        ("memory", {"context": 2, "tensor": 2}),
        ("memory", {"pipeline": 2}),
        ("hang", {"pipeline": 2}),
        ("atoms", {"shard": 3}),
    ],
    ids=str,
)
def test_a_rank_that_fails_ends_the_others(kind: str, sizes: dict[str, int]) -> None:
    """As its process ends, those that wait for it; those that wait for these ones, whose processes go on here, by the
    time limit.
    """
    world = 4 if "tensor" in sizes else 2 if "pipeline" in sizes else 3
    first, odd, *others = rank_forks.run_ranks(world, ranks.fails, kind, sizes, 5.0)
    assert isinstance(odd, rank_forks.Gone)
    for error, seconds, said in (first, *others):
        assert error.startswith("RankFailed: another of ") and seconds < 20
        if kind == "memory":
            assert f"memory ran out on rank 1 of {world}" in said and "go on with --resume" in said
            assert re.search(r"set train.token_budget to \d+ or less", said)
        else:
            assert said == ("ValueError: no atoms" if kind == "atoms" else "")


def test_a_rank_that_hangs_within_a_pass_ends_the_others_by_the_time_limit() -> None:
    first, odd, last = rank_forks.run_ranks(3, ranks.fails, "hang", {"shard": 3}, 3.0)
    assert isinstance(odd, rank_forks.Gone)
    for error, seconds, _ in (first, last):
        assert error.startswith("RankFailed: another of 3 ranks failed") and seconds < 20
