"""A virtual clock: the same asyncio program, run in no time and always in the same order.

`VirtualLoop` is an event loop whose selector never sleeps. When nothing is runnable it jumps `time()` to the
next timer; when there is no timer either, nothing can ever happen again, and it raises `Deadlock` saying what
every task waits for. Times are whole microseconds, so that 0.1 + 0.2 and 0.3 are one moment and not two.

Code that wants to run on both clocks asks `now()` and sleeps with `asyncio.sleep`. On the virtual clock it
must not wait for threads, sockets or processes: nothing that happens outside the loop moves this clock.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TICKS_PER_S = 1_000_000


class Deadlock(RuntimeError):
    """Nothing is runnable and no timer is set: the tasks wait for each other, or for nothing."""


class Waiting(asyncio.Future[T]):
    """A future that can say what it stands for, so that a deadlock names what is missing, not a line."""

    def __init__(self, reason: Callable[[], str]) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self.reason = reason


class News:
    """Lets tasks wait until something has changed, and look again."""

    def __init__(self) -> None:
        self._waiting: list[Waiting[None]] = []

    @property
    def is_awaited(self) -> bool:
        return any(not waiting.done() for waiting in self._waiting)

    async def wait(self, reason: Callable[[], str]) -> None:
        waiting: Waiting[None] = Waiting(reason)
        self._waiting.append(waiting)
        await waiting

    def tell(self) -> None:
        told, self._waiting = self._waiting, []
        for waiting in told:
            if not waiting.done():
                waiting.set_result(None)


def now() -> float:
    """Seconds on the running loop's clock, real or virtual; only differences mean something."""
    return asyncio.get_running_loop().time()


async def drained(work: Awaitable[T], on_cancel: Callable[[], object] | None = None) -> T:
    """Awaits work that goes on elsewhere; a caller that is cancelled meanwhile is held until it has really ended.

    A lease given back earlier would let another role in beside it. `on_cancel` is called when that happens.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
            if on_cancel is not None:
                on_cancel()
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    return task.result()


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end on a fresh virtual clock that starts at 0; tasks it leaves behind are cancelled.

    Raises whatever `main` raises, and `Deadlock` when it can never end.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class _JumpingSelector(selectors.DefaultSelector):
    """Advances a tick counter where an ordinary selector would block."""

    def __init__(self, describe_waits: Callable[[], str]) -> None:
        super().__init__()
        self.ticks = 0
        self._describe_waits = describe_waits

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events:
            return events
        if timeout is None:
            raise Deadlock(f"nothing can run at {self.ticks / TICKS_PER_S} s\n{self._describe_waits()}")
        self.ticks += round(max(timeout, 0.0) * TICKS_PER_S)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop on virtual time, counted in whole microseconds from 0."""

    # A handle is due when it lies less than this beyond `time()`: half a tick lets exactly the current tick
    # run.
    _clock_resolution: float

    def __init__(self) -> None:
        self._jumping = _JumpingSelector(lambda: describe_waits(self))
        super().__init__(self._jumping)
        self._clock_resolution = 0.5 / TICKS_PER_S

    def time(self) -> float:
        return self._jumping.ticks / TICKS_PER_S

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        quantised = round(when * TICKS_PER_S) / TICKS_PER_S
        return super().call_at(quantised, callback, *args, context=context)


def describe_waits(loop: asyncio.AbstractEventLoop) -> str:
    """One line per unfinished task of `loop`: its name, where it is suspended and what it waits for."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    return "\n".join(f"  {task.get_name()}: {_describe_wait(task)}" for task in tasks)


def _describe_wait(task: asyncio.Task[Any]) -> str:
    waiter = getattr(task, "_fut_waiter", None)  # the only place where asyncio keeps this
    if isinstance(waiter, Waiting):
        return waiter.reason()
    if isinstance(waiter, asyncio.Task):
        return f"waits for task {waiter.get_name()}"
    return f"suspended in {_innermost_frame(task.get_coro())}"


def _innermost_frame(coroutine: Any) -> str:
    """Follows `await` inwards; an awaitable without a Python frame ends the walk."""
    where = "an awaitable without a frame"
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is None:
            break
        where = f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return where
