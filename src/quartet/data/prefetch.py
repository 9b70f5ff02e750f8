"""Prepares batches ahead of their use, in one thread and within a bound."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from quartet.observe.process import end_pool

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """``make(0)``, ``make(1)``, … prepared while the caller does other things.

    ``make`` is a pure function of its number, so it does not matter what was prepared and what was not: numbers may be
    skipped, and a number that was never prepared is made when it is asked for. At most ``ahead`` results wait, and one
    more is being used.

    Args:
        ahead: results prepared beyond the one asked for; 0 makes each when it is asked for, without a thread.
    """

    def __init__(self, make: Callable[[int], T], *, ahead: int) -> None:
        self._make = make
        self._ahead = ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch") if ahead else None
        self._waiting: dict[int, Future[T]] = {}

    def start(self, number: int) -> None:
        """Prepares ``number`` and what follows it; what is prepared beyond these is dropped."""
        if self._thread is None:
            return
        wanted = range(number, number + self._ahead)
        for other in [other for other in self._waiting if other not in wanted]:
            self._waiting.pop(other).cancel()
        for one in wanted:
            if one not in self._waiting:
                self._waiting[one] = self._thread.submit(self._made, one)

    def get(self, number: int) -> T:
        """``make(number)``; whatever it raised is raised here."""
        ready = self._waiting.pop(number, None)
        if self._thread is None:
            return self._make(number)
        if ready is None:
            self.start(number)
            ready = self._waiting.pop(number)
        self.start(number + 1)
        return ready.result()

    def _made(self, number: int) -> T:
        try:
            return self._make(number)
        finally:
            end_pool()  # one that idles here slows down what computes elsewhere

    def close(self) -> None:
        """Waits for the one in preparation and forgets the others. May be called again."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._waiting.clear()
