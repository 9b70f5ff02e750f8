"""Waiting in the event loop, and the thread that computes apart from it.

Code that runs on a simulation's virtual clock, too, asks `now()` and sleeps with `asyncio.sleep`.

`ComputeThread` is the one thread of a process that computes; the event loop stays free. All roles of a process share
it. Calls run one at a time, in the order in which they were handed over, that in which leases were granted.
User code that runs in the event loop, a reward function or an environment passed from Python, has the process to itself
meanwhile (``EXCLUSIVE``): random generators are its own then, and training's after.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar, cast

import torch

from quartet.observe.global_state import EXCLUSIVE
from quartet.observe.process import end_thread_pool

T = TypeVar("T")


class Condition:
    """Lets tasks wait until something has changed, and look again."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        self._waiting.append(asyncio.get_running_loop().create_future())
        await self._waiting[-1]

    def notify_all(self) -> None:
        told, self._waiting = self._waiting, []
        for waiting in told:
            if not waiting.done():
                waiting.set_result(None)


def loop_time() -> float:
    """Returns the seconds on the running loop's clock, real or virtual; only differences mean something."""
    return asyncio.get_running_loop().time()


async def await_uncancelled(work: Awaitable[T], on_cancel: Callable[[], object] | None = None) -> T:
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


async def gather_all(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results of ``works`` in order; the first failure is raised when all have ended. One alone is simply
    awaited."""
    if len(works) == 1:
        return [await works[0]]
    found = await asyncio.gather(*works, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return cast(list[T], found)


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
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Runs ``work`` in the thread, and returns or raises what it does. Who is cancelled meanwhile is held until it
        has ended."""
        end_thread_pool()  # of what the calling thread has computed itself, or user code in it
        if self._thread is None:
            # A daemon: a program that is stopped at once does not wait for a call that takes minutes.
            self._thread = threading.Thread(target=self._work, name="quartet-compute", daemon=True)
            self._thread.start()
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.put((work, done))
        return await await_uncancelled(done)

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
                with self._lock:
                    outcome = work()
            except BaseException as raised:
                error = raised
            loop = done.get_loop()
            with contextlib.suppress(RuntimeError):  # closed: the program was stopped at once, and nothing waits
                loop.call_soon_threadsafe(_settle, done, outcome, error)
            del work, done, outcome, error, job  # nothing of a call lives on while the next one is waited for


def _settle(done: asyncio.Future[Any], outcome: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is not None:
        done.set_exception(_presentable(error))
    else:
        done.set_result(outcome)


def _presentable(error: BaseException) -> BaseException:
    """Returns the error as a future takes it: ``StopIteration`` is refused by futures, and ``CancelledError`` would
    look as if the caller had been cancelled, so both come out as the cause of a ``RuntimeError``."""
    if not isinstance(error, (StopIteration, asyncio.CancelledError)):
        return error
    wrapped = RuntimeError(f"a computation raised {type(error).__name__}")
    wrapped.__cause__ = error
    return wrapped
