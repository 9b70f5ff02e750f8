"""Calls a user's function in a process of its own; the trainer's side is :mod:`quartet.rewards.functions`."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quartet.config.errors import UserError, described
from quartet.config.targets import load_target
from quartet.processes import Wire
from quartet.rewards.called import BadReturn, Parameters, is_async, scores_of
from quartet.rewards.subprocesses import Questions


def serve(settings: Mapping[str, Any], wire: Wire) -> None:
    """Loads the function ``settings["target"]``, says what it is, and calls it for each question.

    A plain function is called in the main thread, one call after the other; with ``settings["threads"]`` in so many
    threads. An async one has an event loop, and as many calls at a time as are asked for.
    """
    channel = Questions(wire)
    try:
        function = load_target(settings["target"], "function")
        parameters = Parameters.of(function)
        only_begins = is_async(function)
    except UserError as error:
        channel.answer(0, {"error": [error.problem, error.found, error.remedy]})
        return
    except BaseException as error:  # Also what load_target leaves to a trainer's own Ctrl-C.
        problem, remedy = "the module of the function cannot be imported", "correct it"
        channel.answer(0, {"error": [problem, f"{settings['target']}: {described(error)}", remedy]})
        return
    name = str(getattr(function, "__name__", type(function).__name__))
    said = {"name": name, "named": dict(parameters.named), "takes_all": parameters.takes_all, "is_async": only_begins}
    channel.answer(0, said)
    if only_begins or settings["threads"]:
        asyncio.run(_serve_several(function, 0 if only_begins else settings["threads"], channel))
        return
    for number, arguments in channel:
        channel.answer(number, _called(function, arguments))


async def _serve_several(function: Callable[..., Any], threads: int, channel: Questions) -> None:
    loop, is_over = asyncio.get_running_loop(), asyncio.Event()
    pool = ThreadPoolExecutor(threads) if threads else None
    tasks: set[asyncio.Task[None]] = set()

    async def call(number: int, arguments: dict[str, Any]) -> None:
        if pool is None:
            answer = await _called_async(function, arguments)
        else:
            answer = await loop.run_in_executor(pool, _called, function, arguments)
        channel.answer(number, answer)

    def begin(number: int, arguments: dict[str, Any]) -> None:
        task = loop.create_task(call(number, arguments))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def read() -> None:
        for number, arguments in channel:
            loop.call_soon_threadsafe(begin, number, arguments)
        loop.call_soon_threadsafe(is_over.set)

    threading.Thread(target=read, name="questions", daemon=True).start()
    await is_over.wait()


def _called(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """What is answered to the trainer: scores, or what went wrong."""
    num = len(arguments["completions"])
    try:
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return {"scores": scores_of(result, num)}
    except BaseException as error:  # User code may raise anything; nothing of it may end this process.
        return _failed(error)


async def _called_async(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    num = len(arguments["completions"])
    try:
        return {"scores": scores_of(await function(**arguments), num)}
    except BaseException as error:  # As in ``_called``.
        return _failed(error)


async def _awaited(result: Any) -> Any:
    return await result


def _failed(error: BaseException) -> dict[str, Any]:
    fault = error if isinstance(error, BadReturn) else BadReturn.of(error)
    return {"what": fault.what, "sample": fault.sample, "where": fault.where, "traceback": fault.traceback}
