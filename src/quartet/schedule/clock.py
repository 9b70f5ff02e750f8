"""A virtual clock: the same asyncio program, run in no time and always in the same order.

`VirtualLoop` is an event loop whose selector never sleeps. When nothing is runnable it jumps `time()` to the
next timer; when there is no timer either, nothing can ever happen again, and it raises `Deadlock`.
Times are whole microseconds, so that 0.1 + 0.2 and 0.3 are one moment and not two.

Code that wants to run on both clocks asks `now()` and sleeps with `asyncio.sleep`. On the virtual clock it
must not wait for threads, sockets or processes: nothing that happens outside the loop moves this clock.

The one thread of a process that computes, apart from the event loop, which stays free.

All roles of a process share it. Calls run one at a time, in the order in which they were handed over: that in which
the arbiter granted their leases. User code that runs in the event loop, a reward function or an environment passed from
Python, has the process to itself meanwhile (``EXCLUSIVE``): random generators are its own then, and training's after.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import queue
import selectors
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar, TypeVarTuple, Unpack, cast
from weakref import WeakSet

import torch

from quartet.observe.global_state import EXCLUSIVE
from quartet.observe.openmp import end_pool

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TICKS_PER_S = 1_000_000


class Deadlock(RuntimeError):
    """Nothing is runnable and no timer is set: the tasks wait for each other, or for nothing."""


class News:
    """Lets tasks wait until something has changed, and look again."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        self._waiting.append(asyncio.get_running_loop().create_future())
        await self._waiting[-1]

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


async def all_ended(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; the first failure is raised when all have ended. One alone is simply awaited."""
    if len(works) == 1:
        return [await works[0]]
    found = await asyncio.gather(*works, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return cast(list[T], found)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end on a fresh virtual clock that starts at 0; tasks it leaves behind are cancelled.

    Raises whatever `main` raises, and `Deadlock` when it can never end.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class _JumpingSelector(selectors.DefaultSelector):
    """Advances a tick counter where an ordinary selector would block."""

    ticks = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events:
            return events
        if timeout is None:
            raise Deadlock(f"nothing can run at {self.ticks / TICKS_PER_S} s")
        self.ticks += round(max(timeout, 0.0) * TICKS_PER_S)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop on virtual time, counted in whole microseconds from 0."""

    # A handle is due when it lies less than this beyond `time()`: half a tick lets exactly the current tick
    # run.
    _clock_resolution: float

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
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


_Job = tuple[Callable[[], Any], asyncio.Future[Any]]


class ComputeThread:
    """Runs calls for coroutines.

    Args:
        num_threads: of OpenMP and MKL, which count per calling thread, so they are set in this one; by default as many
            as the thread has that makes this.
        is_exclusive: user code does not run meanwhile. Not for calls that only wait.
    """

    def __init__(self, num_threads: int | None = None, *, is_exclusive: bool = True) -> None:
        self._lock: contextlib.AbstractContextManager[Any] = EXCLUSIVE if is_exclusive else contextlib.nullcontext()
        self._num_threads = num_threads or torch.get_num_threads()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._state = threading.Lock()
        self._is_busy = False
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """What ``work`` returns or raises. Who is cancelled meanwhile is held until it has ended."""
        end_pool()  # of what the calling thread has computed itself, or user code in it
        if self._thread is None:
            # A daemon: a program that is stopped at once does not wait for a call that takes minutes.
            self._thread = threading.Thread(target=self._work, name="quartet-compute", daemon=True)
            self._thread.start()
            _threads.add(self)
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.put((work, done))
        return await drained(done)

    def close(self) -> None:
        """Ends the thread when its last call has ended; the next ``run`` starts another."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None

    def _work(self) -> None:
        torch.set_num_threads(self._num_threads)
        while (job := self._jobs.get()) is not None:
            work, done = job
            outcome: Any = None
            error: BaseException | None = None
            try:
                self._is_busy = True
                try:
                    with self._lock:
                        outcome = work()
                except BaseException as raised:
                    error = raised
                with self._state:
                    self._is_busy = False
            except ComputationStopped as late:  # when the call had ended already
                error, self._is_busy = late, False
            loop = done.get_loop()
            with contextlib.suppress(RuntimeError):  # closed: the program was stopped at once, and nothing waits
                loop.call_soon_threadsafe(_settle, done, outcome, error)
            del work, done, outcome, error, job  # nothing of a call lives on while the next one is waited for


class ComputationStopped(KeyboardInterrupt):
    """Ends a call whose program is stopped at once."""


_threads: WeakSet[ComputeThread] = WeakSet()


def interrupt_computing() -> None:
    """Ends the calls that run in compute threads at the next step of the interpreter: what they compute is half done.

    For a program that is stopped at once; the calls that wait for them are cancelled.
    """
    for compute in _threads:
        with compute._state:
            if compute._is_busy and compute._thread is not None and compute._thread.ident is not None:
                ident = ctypes.c_ulong(compute._thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(ComputationStopped))


def _settle(done: asyncio.Future[Any], outcome: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if isinstance(error, ComputationStopped):
        done.cancel()
    elif error is not None:
        done.set_exception(_presentable(error))
    else:
        done.set_result(outcome)


def _presentable(error: BaseException) -> BaseException:
    """The error as a future takes it: ``StopIteration`` is refused by futures, and ``CancelledError`` would look as if
    the caller had been cancelled, so both come out as the cause of a ``RuntimeError``."""
    if not isinstance(error, (StopIteration, asyncio.CancelledError)):
        return error
    wrapped = RuntimeError(f"a computation raised {type(error).__name__}")
    wrapped.__cause__ = error
    return wrapped
