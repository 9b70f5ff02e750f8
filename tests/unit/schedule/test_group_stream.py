"""The group stream: composition, refilling, capacity, resume, failures.

Replacing rejected groups in rounds: who is in flight together is decided by the groups, not by the clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.extras.simulation.simulation import run_virtual
from quartet.schedule.clock import loop_time
from quartet.schedule.groups import AdmissionRule, GroupStream

QUICK = settings(deadline=None, max_examples=300)


@dataclass(frozen=True)
class Setup:
    rule: AdmissionRule
    chunk_size: int
    num_steps: int
    delays: list[int]
    train_s: int
    rejects: frozenset[int]


setups = st.builds(
    Setup,
    rule=st.builds(AdmissionRule, st.integers(1, 5), st.sampled_from([None, 0, 1, 3])),
    chunk_size=st.integers(1, 6),
    num_steps=st.integers(1, 4),
    delays=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    train_s=st.integers(0, 12),
    rejects=st.frozensets(st.integers(0, 20), max_size=10),
)


def sequential_reference(setup: Setup) -> list[list[list[int]]]:
    """Steps of chunks of indices, as if groups were made one after another."""
    size, cut = setup.rule.prompts_per_step, setup.chunk_size
    accepted = [index for index in range(1000) if index not in setup.rejects]
    steps = [accepted[step * size : (step + 1) * size] for step in range(setup.num_steps)]
    return [[step[at : at + cut] for at in range(0, size, cut)] for step in steps]


def make_stream(
    setup: Setup, *, check: Callable[[int], None] | None = None, max_attempts: int | None = None
) -> GroupStream:
    async def produce(index: int) -> int:
        if check is not None:
            check(index)
        await asyncio.sleep(setup.delays[index % len(setup.delays)])
        return index

    return GroupStream(
        produce,
        setup.rule,
        chunk_size=setup.chunk_size,
        accept=lambda index: index not in setup.rejects,
        max_attempts=max_attempts,
    )


async def consume(stream: GroupStream, setup: Setup, first: int, last: int) -> list[list[list[int]]]:
    steps = []
    for step in range(first, last):
        steps.append([chunk async for chunk in stream.chunks(step)])
        await asyncio.sleep(setup.train_s)
        stream.published(step + 1)
    return steps


@QUICK
@given(setups)
def test_composition_is_that_of_a_sequential_run_and_capacity_holds(setup: Setup) -> None:
    """Each group once, in index order, whatever takes long; never more in flight than the rule admits."""
    rule, published, produced = setup.rule, 0, []

    async def main() -> list[list[list[int]]]:
        def check(index: int) -> None:
            produced.append(index)
            steps_begun = published + 1
            buffered = 0 if rule.max_staleness is None else rule.max_staleness
            in_flight_or_kept = stream.num_running + stream.num_accepted
            assert in_flight_or_kept <= (buffered + steps_begun) * rule.prompts_per_step

        stream = make_stream(setup, check=check)
        steps = []
        nonlocal published
        async with stream:
            for step in range(setup.num_steps):
                steps.append([chunk async for chunk in stream.chunks(step)])
                if rule.max_staleness is None:
                    assert stream.num_running == 0
                await asyncio.sleep(setup.train_s)
                published = step + 1
                stream.published(published)
        assert stream.num_running == 0
        return steps

    assert run_virtual(main()) == sequential_reference(setup)
    assert produced == sorted(set(produced))
    if rule.max_staleness is None:
        last = sequential_reference(setup)[-1][-1][-1]
        assert produced == list(range(last + 1)), "a synchronous stream makes nothing that it does not need"


@QUICK
@given(setups, st.data())
def test_a_restored_stream_continues_as_if_never_stopped(setup: Setup, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, setup.num_steps))

    async def main() -> None:
        async with make_stream(setup) as stream:
            before = await consume(stream, setup, 0, cut)
            state = stream.state()
            uninterrupted = await consume(stream, setup, cut, setup.num_steps)
            end = stream.state()
        async with make_stream(setup) as stream:
            stream.restore(state)
            assert stream.state() == state
            resumed = await consume(stream, setup, cut, setup.num_steps)
            assert stream.state() == end
        assert resumed == uninterrupted
        assert before + resumed == sequential_reference(setup)

    run_virtual(main())


@dataclass(frozen=True)
class Aged:
    """A group and the version of the weights that were out as it began."""

    index: int
    first_version: int


def aged_stream(setup: Setup, produced: list[int], version: Callable[[], int]) -> GroupStream:
    async def produce(index: int) -> Aged:
        produced.append(index)
        group = Aged(index, version())
        await asyncio.sleep(setup.delays[index % len(setup.delays)])
        return group

    accept = lambda group: group.index not in setup.rejects  # noqa: E731
    return GroupStream(produce, setup.rule, chunk_size=setup.chunk_size, accept=accept)


@QUICK
@given(setups, st.data())
def test_what_was_ready_ahead_of_its_step_is_neither_lost_nor_made_again(setup: Setup, data: st.DataObject) -> None:
    """Stopped at any moment, also amid a step; and no group becomes older than the rule admits."""
    stop_s = data.draw(st.floats(0, 60))

    async def main() -> None:
        published, steps = 0, []

        async def consume(stream: GroupStream, first: int) -> None:
            nonlocal published
            for step in range(first, setup.num_steps):
                groups = [group async for chunk in stream.chunks(step) for group in chunk]
                assert all(step - g.first_version <= (setup.rule.max_staleness or 0) for g in groups)
                steps.append([group.index for group in groups])
                await asyncio.sleep(setup.train_s)
                published = step + 1
                stream.published(published)

        before: list[int] = []
        async with aged_stream(setup, before, lambda: published) as stream:
            consumer = asyncio.create_task(consume(stream, 0))
            await asyncio.wait({consumer}, timeout=stop_s)
            state, buffered = stream.state(), stream.buffered()
            complete = set(before) - set(stream._running)
            consumer.cancel()
            await asyncio.wait({consumer})
        first = state["steps"]
        del steps[first:]
        published = max(published, first)  # a step that was consumed whole is trained on before anything is saved
        state["versions_published"] = published
        after: list[int] = []
        async with aged_stream(setup, after, lambda: published) as stream:
            stream.restore(state, buffered)
            assert stream.buffered() == buffered
            assert stream.num_accepted == state["accepted"] + len(buffered.groups), "they count for the capacity"
            await consume(stream, first)
        done = {*range(state["next_index"]), *buffered.groups, *buffered.rejected}
        assert not done & set(after) and done == complete
        assert steps == [[i for chunk in step for i in chunk] for step in sequential_reference(setup)]

    run_virtual(main())


def fixed(
    size: int = 4,
    stale: int | None = None,
    *,
    chunk_size: int = 2,
    delays: tuple[int, ...] = (1,),
    rejects: frozenset[int] = frozenset(),
) -> Setup:
    return Setup(AdmissionRule(size, stale), chunk_size, 3, list(delays), 0, rejects)


def test_asynchronous_generation_runs_ahead_and_synchronous_does_not() -> None:
    async def main(stale: int | None) -> list[int]:
        in_flight = []
        async with make_stream(fixed(stale=stale, delays=(100,))) as stream:
            consumer = asyncio.create_task(consume(stream, fixed(), 0, 1))
            await asyncio.sleep(1)
            in_flight.append(stream.num_running)
            await consumer
            await asyncio.sleep(1)
            in_flight.append(stream.num_running)
        return in_flight

    assert run_virtual(main(None)) == [4, 0]
    assert run_virtual(main(0)) == [4, 4]
    assert run_virtual(main(2)) == [12, 4]


@pytest.mark.parametrize("stale", [None, 0, 2])
def test_a_filter_that_rejects_everything_ends_in_counts(stale: int | None) -> None:
    async def main() -> None:
        setup = fixed(stale=stale, rejects=frozenset(range(1, 1000)))
        produced: list[int] = []
        async with make_stream(setup, check=produced.append, max_attempts=10) as stream:
            with pytest.raises(RuntimeError) as error:
                await consume(stream, setup, 0, 1)
            assert error.value.args == (0, 4, 1, 10)
            assert stream.num_running == 0
            assert asyncio.all_tasks() == {asyncio.current_task()}
        assert len(produced) <= 10 * (1 + (stale or 0))

    run_virtual(main())


@pytest.mark.parametrize("stale", [None, 1])
def test_a_failure_surfaces_once_and_leaves_nothing_running(stale: int | None) -> None:
    async def main() -> None:
        def check(index: int) -> None:
            if index == 2:
                raise ZeroDivisionError("group 2")

        async with make_stream(fixed(stale=stale, delays=(50,)), check=check) as stream:
            with pytest.raises(ZeroDivisionError, match="group 2"):
                await consume(stream, fixed(), 0, 1)
            assert stream.num_running == 0
            assert asyncio.all_tasks() == {asyncio.current_task()}
            with pytest.raises(RuntimeError, match="closed"):
                await consume(stream, fixed(), 0, 1)
        assert loop_time() == 0.0

    run_virtual(main())


def test_closing_waits_for_producers_that_take_time_to_stop() -> None:
    async def main() -> tuple[float, list[str]]:
        log = []

        async def produce(index: int) -> int:
            try:
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(3)
                log.append(f"stopped {index}")
            return index

        stream = GroupStream(produce, AdmissionRule(2), chunk_size=1)
        consumer = asyncio.create_task(anext(stream.chunks(0)))
        await asyncio.sleep(1)
        consumer.cancel()
        closing = asyncio.create_task(stream.close())
        await asyncio.sleep(1)
        closing.cancel()
        results = await asyncio.gather(consumer, closing, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 2
        return loop_time(), log

    assert run_virtual(main()) == (4.0, ["stopped 0", "stopped 1"])


SIZE, STEPS = 4, 3


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
