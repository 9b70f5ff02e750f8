"""Batches prepared ahead: in order, within the bound, and never a different result."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from quartet.data.lazy import Prefetcher


class Maker:
    """Counts what it makes and on which threads; ``allow`` lets one more be made."""

    def __init__(self, *, held: bool = False) -> None:
        self.made: list[int] = []
        self.threads: set[str] = set()
        self.gate = threading.Semaphore(0) if held else None
        self.begun = threading.Semaphore(0)

    def __call__(self, number: int) -> str:
        self.begun.release()
        if self.gate is not None:
            assert self.gate.acquire(timeout=10)
        self.made.append(number)
        self.threads.add(threading.current_thread().name)
        return f"batch {number}"


@pytest.fixture
def maker() -> Iterator[Maker]:
    yield Maker()


def test_the_work_is_done_in_one_other_thread(maker: Maker) -> None:
    with closing(Prefetcher(maker, ahead=2)) as batches:
        assert batches.get(4) == "batch 4"
    assert len(maker.threads) == 1 and "MainThread" not in maker.threads
    own = Maker()
    Prefetcher(own, ahead=0).get(4)
    assert own.threads == {"MainThread"} and own.made == [4]


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_no_more_than_the_bound_is_prepared(maker: Maker, ahead: int) -> None:
    """However long the consumer takes: the thread comes to rest."""
    batches = Prefetcher(maker, ahead=ahead)
    batches.start(0)
    for number in range(4):
        batches.get(number)
        wanted, end = list(range(number + ahead + 1)), time.monotonic() + 10
        while maker.made != wanted and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.02)
        assert maker.made == wanted
    batches.close()


def test_an_error_reaches_who_asks_and_leaves_the_rest_usable() -> None:
    def make(number: int) -> int:
        if number == 1:
            raise ZeroDivisionError(f"batch {number}")
        return number

    with closing(Prefetcher(make, ahead=2)) as batches:
        assert batches.get(0) == 0
        with pytest.raises(ZeroDivisionError, match="batch 1"):
            batches.get(1)
        assert batches.get(2) == 2


def test_closing_waits_for_the_one_in_preparation() -> None:
    held = Maker(held=True)
    assert held.gate is not None
    batches = Prefetcher(held, ahead=3)
    batches.start(0)
    assert held.begun.acquire(timeout=10)
    threading.Timer(0.05, held.gate.release).start()
    batches.close()
    assert held.made == [0], "finished, and the others never begun"
    batches.close()
