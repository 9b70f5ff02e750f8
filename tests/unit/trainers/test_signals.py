"""What SIGINT, SIGTERM and SIGUSR1 do, wherever the program is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quartet.cluster import ClusterError
from quartet.config import Interrupted
from quartet.config.recipe import RLRecipe
from quartet.trainers import signals
from quartet.trainers.rl import RLTrainer
from quartet.trainers.run import RunDirectory
from quartet.trainers.signals import STOP_SIGNALS, StoppedBySignal, reclaim_signals, run_async, stop_signals

INT, TERM, USR1 = STOP_SIGNALS


def arrive(*numbers: int) -> None:
    for number in numbers:
        signal.raise_signal(number)


@pytest.fixture(autouse=True)
def handlers_are_given_back() -> Iterator[None]:
    former = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == former


@pytest.mark.parametrize("first", STOP_SIGNALS)
def test_the_first_asks_and_only_a_later_ctrl_c_stops_at_once(first: signal.Signals) -> None:
    with stop_signals() as found, found.graceful():
        arrive(first)
        assert found.first == first and found.exit_status == 128 + first and not found.at_once
        for _ in range(3):
            arrive(TERM)
            arrive(USR1)
        found.check()
        with pytest.raises(StoppedBySignal) as stop:
            arrive(INT)
        assert stop.value.number == first and found.at_once


@pytest.mark.parametrize("first", STOP_SIGNALS)
def test_where_nothing_can_be_saved_the_first_stops_at_once(first: signal.Signals) -> None:
    with stop_signals(), pytest.raises(StoppedBySignal) as stop:
        arrive(first)
    assert stop.value.number == first and isinstance(stop.value, KeyboardInterrupt)


def test_a_stop_that_was_swallowed_is_raised_by_the_next_check() -> None:
    with stop_signals() as found, found.graceful():
        with contextlib.suppress(BaseException):
            arrive(INT, INT)
        with pytest.raises(StoppedBySignal):
            found.check()
    with stop_signals() as found:
        with contextlib.suppress(BaseException):
            arrive(TERM)
        with pytest.raises(StoppedBySignal), found.graceful():
            pytest.fail("a run began")


def test_keys_pressed_in_a_row_do_not_interrupt_what_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with stop_signals() as found:
        with pytest.raises(StoppedBySignal):
            arrive(INT)
        arrive(INT, INT, TERM)
        monkeypatch.setattr(signals, "GRACE_S", 0.0)
        with pytest.raises(StoppedBySignal):
            arrive(INT)
        arrive(TERM)
        assert found.first == INT


def test_a_stop_between_two_stages_is_not_forgotten() -> None:
    with stop_signals() as outer:
        with stop_signals() as inner, inner.graceful():
            arrive(USR1)
        assert inner is outer
        with pytest.raises(StoppedBySignal):
            outer.check()


def test_what_ray_takes_is_taken_back() -> None:
    def rays(*_: object) -> None:
        raise SystemExit(15)

    with stop_signals() as found:
        signal.signal(TERM, rays)
        reclaim_signals()
        with pytest.raises(StoppedBySignal):
            arrive(TERM)
    with stop_signals() as found:
        signal.signal(TERM, rays)
        with found.graceful():
            arrive(TERM)
            assert found.first == TERM


def test_a_forked_child_ends_by_the_signals() -> None:
    with stop_signals() as found, found.graceful():
        for number in (TERM, USR1):
            if (pid := os.fork()) == 0:
                os.kill(os.getpid(), number)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -number
        assert not found.requested


def test_workers_that_a_signal_ended_are_not_replaced(tmp_path: Path) -> None:
    """SIGTERM to all processes of a job: whoever waited for new workers waited for a Ray that was gone."""
    trainer = RLTrainer.__new__(RLTrainer)
    trainer.run, trainer._loop = RunDirectory(tmp_path / "run", RLRecipe()), None
    with trainer.run.stoppable():
        arrive(TERM)
        with pytest.raises(Interrupted) as stop:
            asyncio.run(trainer._after_death(ClusterError("gone")))
    assert stop.value.exit_status == 143 and stop.value.step is None


# Event loops ------------------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "CLEAN_UP_S", 0.2)


@pytest.mark.usefixtures("short")
def test_a_task_that_an_interrupt_robbed_of_its_wake_up_is_not_waited_for() -> None:
    """The interrupt came between taking the wake-up from the loop's queue and calling it: no ``cancel`` reaches that
    task any more, and ``asyncio.run`` waits for it for ever."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        news: asyncio.Future[None] = loop.create_future()

        async def waits() -> None:
            await news

        task = loop.create_task(waits())
        await asyncio.sleep(0)
        news.set_result(None)
        loop._ready.pop()  # type: ignore[attr-defined]
        task.cancel()
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_async(work())
    assert time.monotonic() - began < 5


def test_an_interrupt_lets_tasks_clean_up() -> None:
    ended: list[str] = []

    async def other() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("other")

    async def work() -> None:
        task = asyncio.create_task(other())
        await asyncio.sleep(0)
        try:
            with stop_signals():
                arrive(INT)
        finally:
            ended.append("work")
            await asyncio.wait({task}, timeout=0)

    with pytest.raises(KeyboardInterrupt):
        run_async(work())
    assert ended == ["work", "other"]
