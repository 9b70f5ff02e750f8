"""A rank that fails while gradients are summed between passes: all others hear of it at once, and train on."""

from __future__ import annotations

from typing import Any

import pytest

import rank_forks
import sharded_failures as ranks


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (2, {"fixed_order": True}),
        (4, {"shard": 2}),
        (4, {"tensor": 2}),
        (4, {"context": 2, "tensor": 2}),
    ],
    ids=["two copies in order", "two copies in halves", "two copies on tensor ranks", "context and tensor"],
)
def test_a_rank_that_fails_in_a_sum_is_named_at_once(world: int, sizes: dict[str, Any]) -> None:
    found = rank_forks.run_ranks(world, ranks.failures_in_sums, sizes)
    for rank, of_rank in enumerate(found):
        told = "" if rank == ranks.ODD else f"RankFailed: another rank failed in this update: rank 1 of {world}: "
        for place, (raised, seconds, is_same) in of_rank.items():
            assert raised == f"{told}ValueError: no sum {place.split()[1]}", (rank, place)
            assert seconds < 10, f"{place}: waited for a time limit"
            assert is_same, f"{place}: something was left over"
