"""Errors name the worker and its own words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quartet.cluster import WorkerGroup
from quartet.cluster.errors import RankFailed, WorkerDeath, WorkerDied, WorkerError, WorkerFailure


def failure(error: Exception) -> WorkerFailure:
    try:
        raise error
    except type(error) as raised:
        return WorkerFailure.of(raised, group="actor", rank=2, pid=77, host="10.0.0.2", where="actor.update")


def test_a_death_says_who_died_and_of_what() -> None:
    death = WorkerDeath("actor", 2, 77, "10.0.0.2", "actor.update", "the socket closed")
    text = str(WorkerDied(death))
    assert "rank 2 of group 'actor' (pid 77 on 10.0.0.2) died; noticed by actor.update" in text
    assert text.endswith("reason: the socket closed")


def group() -> WorkerGroup:
    """Its processes are not started."""
    made = WorkerGroup.__new__(WorkerGroup)
    made.name = "critic"
    return made


@pytest.mark.parametrize("cause", [0, 1])
def test_of_several_ranks_that_fail_the_cause_is_told_before_its_echoes(cause: int) -> None:
    raised: list[Exception] = [RankFailed("a rank has failed"), RankFailed("a rank has failed")]
    raised[cause] = ValueError("no such token")
    failures = {rank: replace(failure(error), group="critic", rank=rank) for rank, error in enumerate(raised)}
    with pytest.raises(WorkerError, match=rf"rank {cause} of group .*no such token"):
        group().raise_for(failures, "critic.update")


def test_a_sender_that_is_not_known_is_filled_in() -> None:
    unknown = WorkerFailure("", -1, 5, "host", "call", "TypeError: no", "…")
    with pytest.raises(WorkerError, match="raised in rank 3 of group 'critic'"):
        group().raise_for({3: unknown}, "critic.update")
    with pytest.raises(WorkerError, match="raised in rank 2 of group 'actor'"):
        group().raise_for({3: failure(ValueError("x"))}, "critic.update")
