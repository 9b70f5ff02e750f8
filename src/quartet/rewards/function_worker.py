"""Calls a user's function in a process of its own; the trainer's side is :mod:`quartet.rewards.functions`.

Which arguments such a function takes and what it may return holds wherever it is called. Neither torch nor the trainer
is needed here.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quartet.config.errors import UserError, describe_error, error_location, parse_score
from quartet.config.nearest import suggest_name
from quartet.config.targets import load_target
from quartet.processes import MessagePipe
from quartet.rewards.subprocesses import WorkerRequests


@dataclass(frozen=True)
class FunctionParameters:
    """What a function can be given by keyword: name → whether it must be; ``takes_all``: any other name, too."""

    named: Mapping[str, bool]
    takes_all: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionParameters:
        """Returns the parameters of a function: all names where Python cannot tell (some functions written in C)."""
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            return cls({}, True)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls({p.name: p.default is p.empty for p in named}, any(p.kind is p.VAR_KEYWORD for p in parameters))

    def accepted(self, name: str, offered: Sequence[str]) -> list[str]:
        """Returns those of the ``offered`` arguments that the function ``name`` takes.

        Raises:
            UserError: it does not take completions, or asks for a column that the data do not have.
        """
        if not self.takes_all and "completions" not in self.named:
            raise UserError(
                f"the reward function {name!r} has no parameter `completions`",
                found=f"its parameters are {', '.join(self.named) or 'none'}",
                remedy="write it as def f(prompts, completions, **columns)",
            )
        for parameter, is_needed in self.named.items():
            if is_needed and parameter not in offered:
                columns = sorted(set(offered) - {"prompts", "completions"})
                check_column(f"the reward function {name!r}", parameter, columns)
        return list(offered) if self.takes_all else [name for name in self.named if name in offered]


def check_column(reward: str, column: str, columns: Sequence[str]) -> None:
    """Raises ``UserError`` where ``column``, which the ``reward`` needs, is not among those of the data.

    Args:
        columns: names; of what is inside objects with dots, ``reward_model.ground_truth``.
    """
    if column in columns:
        return
    # Never an object, in which the value is only somewhere.
    objects = {path.rpartition(".")[0] for path in columns}
    meant = ("ground_truth", column) if column == "answer" else (column,)
    inside = [path for name in meant for path in columns if path.endswith(f".{name}")]
    remedy = f"map it: data.columns.{column}={inside[0] if inside else '…'}"
    if not inside:
        near = suggest_name(column, [path for path in columns if path not in objects])
        remedy = near or f"give the data that column, or {remedy}"
    raise UserError(
        f"{reward} asks for a column that the data do not have",
        found=f"{column!r}; the columns are {', '.join(columns) or 'none'}",
        remedy=remedy,
    )


def is_async(function: Callable[..., Any]) -> bool:
    """Tells whether a call of the function only begins the work: an ``async def``, or an object whose ``__call__`` is
    one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class InvalidReturn(Exception):
    """What a call did wrong: ``what`` as it follows the function's name, the ``sample`` it shows in, ``where`` it was
    raised and the ``traceback``, where there is one.
    """

    def __init__(self, what: str, sample: int = 0, where: str | None = None, traceback: str | None = None) -> None:
        super().__init__(what)
        self.what, self.sample, self.where, self.traceback = what, sample, where, traceback

    @classmethod
    def of(cls, error: BaseException) -> InvalidReturn:
        return cls(
            f"raised {describe_error(error)}", 0, error_location(error), "".join(traceback.format_exception(error))
        )


def parse_scores(result: Any, num: int) -> list[float | None]:
    """Returns what a function returned for ``num`` completions, as scores.

    Raises:
        BadReturn: it is not that many finite numbers or None.
        BaseException: what an object of the user's own raises while it is read.
    """
    values = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(values, (list, tuple)):
        raise InvalidReturn(f"returned {type(result).__name__}, not a list")
    values = [*values]
    if len(values) != num:
        raise InvalidReturn(f"returned {len(values)} scores for {num} completions", min(len(values), num - 1))
    scores: list[float | None] = []
    for n, value in enumerate(values):
        number = None if value is None else parse_score(value)
        if isinstance(number, str):
            raise InvalidReturn(f"returned {number} for sample {n}", n)
        scores.append(number)
    return scores


def serve_function(settings: Mapping[str, Any], wire: MessagePipe) -> None:
    """Loads the function ``settings["target"]``, says what it is, and calls it for each question.

    A plain function is called in the main thread, one call after the other. An async one has an event loop, and as many
    calls at a time as are asked for.
    """
    channel = WorkerRequests(wire)
    try:
        function = load_target(settings["target"], "function")
        parameters = FunctionParameters.of(function)
        only_begins = is_async(function)
    except UserError as error:
        channel.answer(0, {"error": [error.problem, error.found, error.remedy]})
        return
    except BaseException as error:  # Also what load_target leaves to a trainer's own Ctrl-C.
        problem, remedy = "the module of the function cannot be imported", "correct it"
        channel.answer(0, {"error": [problem, f"{settings['target']}: {describe_error(error)}", remedy]})
        return
    name = str(getattr(function, "__name__", type(function).__name__))
    said = {"name": name, "named": dict(parameters.named), "takes_all": parameters.takes_all, "is_async": only_begins}
    channel.answer(0, said)
    if only_begins:
        asyncio.run(_serve_async(function, channel))
        return
    for number, arguments in channel:
        channel.answer(number, _called(function, arguments))


async def _serve_async(function: Callable[..., Any], channel: WorkerRequests) -> None:
    loop, is_over = asyncio.get_running_loop(), asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def call(number: int, arguments: dict[str, Any]) -> None:
        channel.answer(number, await _called_async(function, arguments))

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
    """Calls the function and returns what is answered to the trainer: scores, or what went wrong."""
    num = len(arguments["completions"])
    try:
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return {"scores": parse_scores(result, num)}
    except BaseException as error:  # User code may raise anything; nothing of it may end this process.
        return _failed(error)


async def _called_async(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    num = len(arguments["completions"])
    try:
        return {"scores": parse_scores(await function(**arguments), num)}
    except BaseException as error:  # As in ``_called``.
        return _failed(error)


async def _awaited(result: Any) -> Any:
    return await result


def _failed(error: BaseException) -> dict[str, Any]:
    fault = error if isinstance(error, InvalidReturn) else InvalidReturn.of(error)
    return {"what": fault.what, "sample": fault.sample, "where": fault.where, "traceback": fault.traceback}
