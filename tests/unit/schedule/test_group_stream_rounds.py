"""Replacing rejected groups in rounds: who is in flight together is decided by the groups, not by the clock."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.schedule.clock import run_virtual
from quartet.schedule.groups import AdmissionRule, GroupStream

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
