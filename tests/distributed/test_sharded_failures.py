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


def test_a_rank_that_fails_is_named_and_all_go_on(results: Results) -> None:
    first, odd = (result["failures"] for result in results)
    for place, (error, after) in odd.items():
        kind = {"licence": "SystemExit", "norm": "MemoryError", "step": "MemoryError"}.get(place, "ValueError")
        assert error.startswith(f"{kind}: no {place}")
        told, others_after = first[place]
        assert told == f"RankFailed: another rank failed in this update: rank 1 of 2: {kind}: no {place}"
        assert others_after == after


def test_where_memory_runs_out_on_one_all_start_over(results: Results) -> None:
    first, odd = (result["out_of_memory"] for result in results)
    assert first == odd
    num_oom, budget, is_equal, has_equal_weights = first
    assert num_oom == 1 and budget < 43 and is_equal and has_equal_weights


def test_memory_that_never_suffices_is_said_by_all(results: Results) -> None:
    first, odd = (result["never_enough_memory"] for result in results)
    assert first == odd
    assert "train.token_budget" in first and "rank 1 of 2: MemoryError: no room" in first


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


def assert_told(found: list[tuple[str, float, Any]]) -> None:
    """All have raised at once that, or what, the odd rank did, and go on together."""
    for rank, (raised, seconds, after) in enumerate(found):
        expected = "UserError: a sequence is longer" if rank == ranks.ODD else "RankFailed: another rank failed"
        assert raised.startswith(expected) and "a sequence is longer than train.forward_token_budget" in raised
        assert seconds < 20 and after == found[0][2]


def test_a_failure_in_a_pass_before_an_update_is_told_to_all(results: Results) -> None:
    assert_told([result["fails_before_an_update"] for result in results])


def test_a_failure_in_a_pass_of_one_copy_is_told_to_all() -> None:
    assert_told(rank_forks.run_ranks(4, ranks.fails_in_one_copy))


@pytest.mark.parametrize("sizes", [{"shard": 1}, {"shard": 3}, {"context": 2, "tensor": 2}], ids=str)
def test_a_process_that_is_gone_stops_the_others(sizes: dict[str, int]) -> None:
    world = 4 if "tensor" in sizes else 3
    first, odd, *others = rank_forks.run_ranks(world, ranks.lost, sizes)
    assert isinstance(odd, rank_forks.Gone)
    # Peers of those that noticed wait for these until the time limit.
    named = (
        rf"RankFailed: no answer of rank 1(, \d)* of {world}: "
        if world == 4
        else "RankFailed: no answer of rank 1 of 3: "
    )
    for error, seconds in (first, *others):
        assert re.match(named, error) and seconds < 10


def test_a_rank_that_hangs_within_a_pass_is_named_in_bounded_time() -> None:
    first, odd, last = rank_forks.run_ranks(3, ranks.hangs)
    assert isinstance(odd, rank_forks.Gone)
    for error, seconds in (first, last):
        assert error.startswith("RankFailed: no answer of rank 1 of 3: ") and seconds < 20


def test_where_memory_runs_out_within_a_pass_all_start_over(tolerances: Any) -> None:
    atol, rtol = tolerances[torch.float64]
    of_ranks = rank_forks.run_ranks(4, ranks.memory_within_passes, {"context": 2, "tensor": 2}, limit_s=240.0)
    for rank, of_rank in enumerate(of_ranks):
        for place, (budget, (metrics, expected), num_attempts, seconds, freed) in of_rank["steps"].items():
            assert budget < 43 and num_attempts == 2, f"{place}: one attempt, and one with half the budget"
            assert metrics == pytest.approx(expected, rel=rtol, abs=atol), place
            assert seconds < 60, f"{place}: waited for a time limit"  # which is 120 s
            # Peers break the same pass off; where it had ended there is nothing to free.
            may_be = [[True]] if rank == ranks.ODD and "end of" not in place else [[]]
            may_be += [[], [True]] if rank != ranks.ODD else []
            assert freed in may_be, f"{place}: no failure, or its tensors are still held"
        assert of_rank["num_oom"] == len(of_rank["steps"])
        after, expected = of_rank["weights"]
        for name, values in expected.items():
            torch.testing.assert_close(after[name], values, atol=atol, rtol=rtol)
