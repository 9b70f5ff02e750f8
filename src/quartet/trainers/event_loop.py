"""Runs a job's coroutine to its end, from a script or from inside a running event loop (a notebook)."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from quartet.config.errors import UserError
from quartet.observe.global_state import guarded_code
from quartet.observe.process import end_pool
from quartet.schedule.compute_thread import ComputationStopped, interrupt_computing

T = TypeVar("T")
CLEAN_UP_S = 3.0
"""How long the tasks of a program that is stopped at once have to leave."""
_AGAIN_S = 0.01


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns; blocks until then.

    Where this thread runs an event loop already, as a notebook does, ``work`` gets a thread and a loop of its own.
    ``KeyboardInterrupt`` cancels it there, waits for its end and is raised here.

    Raises:
        UserError: this is called by user code that holds up a run until it returns.
    """
    if (caller := guarded_code()) is not None:
        work.close()
        raise UserError(
            f"{caller} starts a run inside of another one, which would wait for ever",
            found="a call of a trainer or an evaluation in code that was passed from Python",
            remedy="name the function in the recipe (type: function, target: file.py:name), where it has a process of "
            "its own, or start the other run in a process",
        )
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(work)
    task: list[asyncio.Task[T]] = []
    begin, begun = threading.Event(), threading.Event()

    async def main() -> T:
        begin.wait()  # not before an interrupt of the calling thread would cancel it
        task.append(asyncio.ensure_future(work))
        begun.set()
        return await task[0]

    end_pool()  # of loading, say: what computes for ``work`` has one of its own
    context = contextvars.copy_context()
    with ThreadPoolExecutor(1, thread_name_prefix="quartet-loop") as pool:
        try:
            future = pool.submit(context.run, asyncio.run, main())
            begin.set()
            # A signal that arrives as a thread begins to wait for a lock is handled only when that wait has ended.
            while not wait([future], timeout=1.0).done:
                pass
            return future.result()
        except KeyboardInterrupt:
            begin.set()
            if begun.wait(CLEAN_UP_S) and not task[0].done():
                task[0].get_loop().call_soon_threadsafe(task[0].cancel)
            raise


def _run(work: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``, except that a ``KeyboardInterrupt`` is not waited out.

    It may be raised between taking a callback from the loop's queue and calling it: the task that it would have woken
    then never ends, however often it is cancelled, and ``asyncio.run`` waits for it for ever. Here the tasks have
    ``CLEAN_UP_S`` seconds.
    """
    runner = asyncio.Runner()
    loop = runner.get_loop()
    try:
        try:
            result = runner.run(work)
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):
                runner.close()
            raise
        runner.close()
        return result
    except KeyboardInterrupt:
        _abandon(loop)
        raise


def _abandon(loop: asyncio.AbstractEventLoop) -> None:
    if loop.is_closed():
        return
    # Tasks that never end would be complained about; those that end with an error are consequences.
    loop.set_exception_handler(lambda *_: None)
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    with _interrupted_again(loop):
        interrupt_computing()
        if tasks:
            done, _ = loop.run_until_complete(asyncio.wait(tasks, timeout=CLEAN_UP_S))
            for task in done:
                if not task.cancelled():
                    task.exception()  # read, or asyncio reports it as never retrieved
    asyncio.set_event_loop(None)
    loop.close()


@contextlib.contextmanager
def _interrupted_again(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """What ends a computation is printed and dropped where it meets a ``__del__`` or the callback of a weak reference:
    here it comes again a moment later."""
    hook = sys.unraisablehook

    def unraisable(lost: Any) -> None:
        if lost.exc_type is ComputationStopped:
            loop.call_soon_threadsafe(loop.call_later, _AGAIN_S, interrupt_computing)
        else:
            hook(lost)

    sys.unraisablehook = unraisable
    try:
        yield
    finally:
        sys.unraisablehook = hook
