"""Runs a job's coroutine to its end, from a script or from inside a running event loop (a notebook)."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns; blocks until then.

    Where this thread runs an event loop already, as a notebook does, ``work`` gets a thread and a loop of its own.
    ``KeyboardInterrupt`` cancels it there, waits for its end and is raised here.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    task: list[asyncio.Task[T]] = []
    started = threading.Event()

    async def main() -> T:
        task.append(asyncio.ensure_future(work))
        started.set()
        return await task[0]

    context = contextvars.copy_context()
    with ThreadPoolExecutor(1, thread_name_prefix="quartet-loop") as pool:
        future = pool.submit(context.run, asyncio.run, main())
        try:
            return future.result()
        except KeyboardInterrupt:
            started.wait()
            if not future.done():
                task[0].get_loop().call_soon_threadsafe(task[0].cancel)
            raise
