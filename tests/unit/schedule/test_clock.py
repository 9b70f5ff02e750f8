"""The virtual clock: jumps, whole microseconds, deadlocks."""

from __future__ import annotations

import asyncio
import time

import pytest

from quartet.schedule.clock import Deadlock, now, run_virtual


def test_time_jumps_to_the_next_timer() -> None:
    async def main() -> list[tuple[str, float]]:
        log: list[tuple[str, float]] = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            log.append((name, now()))

        await asyncio.gather(sleeper("late", 200_000.0), sleeper("early", 0.5), sleeper("middle", 3600))
        return log

    started = time.monotonic()
    assert run_virtual(main()) == [("early", 0.5), ("middle", 3600.0), ("late", 200_000.0)]
    assert time.monotonic() - started < 5


def test_moments_reached_by_different_sums_are_one_moment() -> None:
    async def main() -> set[float]:
        moments: set[float] = set()

        async def walk(*steps: float) -> None:
            for step in steps:
                await asyncio.sleep(step)
            moments.add(now())

        await asyncio.gather(walk(0.1, 0.2), walk(0.3), walk(*[0.01] * 30), walk(0.2, 0.1))
        return moments

    assert run_virtual(main()) == {0.3}


def test_deadlock_still_runs_the_cleanup_of_tasks() -> None:
    cleaned: list[str] = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            cleaned.append("main")

    with pytest.raises(Deadlock):
        run_virtual(main())
    assert cleaned == ["main"]


def test_results_errors_and_timeouts_come_through() -> None:
    async def timed_out() -> str:
        try:
            async with asyncio.timeout(2.5):
                await asyncio.Event().wait()
        except TimeoutError:
            return f"timed out at {now()}"
        return "no timeout"

    async def fails() -> None:
        raise KeyError("mine")

    assert run_virtual(timed_out()) == "timed out at 2.5"
    with pytest.raises(KeyError, match="mine"):
        run_virtual(fails())
