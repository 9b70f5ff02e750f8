"""Replacing rejected groups in rounds: who is in flight together is decided by the groups, not by the clock."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.config.errors import UserError
from quartet.schedule.clock import run_virtual
from quartet.schedule.groups import AdmissionRule, GroupStream, TooFewGroups

SIZE, STEPS = 4, 3
QUICK = settings(deadline=None, max_examples=200)


def played(delays: list[int], rejects: frozenset[int]) -> tuple[list[list[int]], list[frozenset[int]]]:
    """The groups of each step, and which were in flight when each group began."""
    in_flight: list[frozenset[int]] = []
    running: set[int] = set()

    async def produce(index: int) -> int:
        running.add(index)
        in_flight.append(frozenset(running))
        await asyncio.sleep(delays[index % len(delays)])
        running.discard(index)
        return index

    async def main() -> list[list[int]]:
        steps = []
        stream = GroupStream(
            produce,
            AdmissionRule(SIZE),
            chunk_size=2,
            accept=lambda index: index not in rejects,
        )
        async with stream:
            for step in range(STEPS):
                steps.append([index async for chunk in stream.chunks(step) for index in chunk])
                stream.published(step + 1)
        return steps

    return run_virtual(main()), in_flight


delays = st.lists(st.integers(0, 9), min_size=1, max_size=8)


@QUICK
@given(delays, delays, st.frozensets(st.integers(0, 20), max_size=12))
def test_neither_the_step_nor_what_is_in_flight_depends_on_time(
    one: list[int], other: list[int], rejects: frozenset[int]
) -> None:
    steps, in_flight = played(one, rejects)
    assert (steps, in_flight) == played(other, rejects)
    accepted = [index for index in range(100) if index not in rejects]
    assert steps == [accepted[step * SIZE : (step + 1) * SIZE] for step in range(STEPS)]
    assert len(in_flight) == steps[-1][-1] + 1, "nothing is made that is not needed"


def test_a_round_is_as_large_as_what_is_missing() -> None:
    _, in_flight = played([1], frozenset({0, 1, 4}))
    begun = [len(running) for running in in_flight]
    assert begun[:7] == [1, 2, 3, 4, 1, 2, 1], "0 to 3, then 4 and 5 for two rejected ones, then 6 for 4"


def test_the_filters_owner_words_the_error() -> None:
    shortages: list[TooFewGroups] = []

    def say(shortage: TooFewGroups) -> UserError:
        shortages.append(shortage)
        return UserError("no variance", found="", remedy="")

    async def produce(index: int) -> int:
        return index

    async def main() -> None:
        stream = GroupStream(
            produce,
            AdmissionRule(SIZE),
            chunk_size=1,
            accept=lambda index: index == 2,
            max_attempts=9,
            shortage=say,
        )
        async with stream:
            with pytest.raises(UserError, match="no variance"):
                [chunk async for chunk in stream.chunks(0)]

    run_virtual(main())
    assert shortages == [TooFewGroups(step=0, wanted=4, accepted=1, attempts=9)]
