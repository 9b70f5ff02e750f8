"""Rewards that are Python functions: ``f(prompts, completions, **columns) -> list[float | None]``.

A function receives, by keyword, those of ``prompts``, ``completions`` and the data's columns that it names
(all, if it takes ``**columns``), each a list with one entry per completion. ``None`` in its answer means
"does not apply to this sample". It may be ``async``. For chat prompts both are conversational: a prompt is
its list of messages, a completion ``[{"role": "assistant", "content": …}]``.

A function that a recipe names is called in processes of its own (``SubprocessFunction``), one that Python code
passes in this process while nothing else computes (``PassedFunction``).
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quartet.config.errors import UserError, describe_error, excerpt
from quartet.config.rewards import FunctionReward
from quartet.observe.global_state import RandomStateGuard
from quartet.processes import ProcessDied
from quartet.rewards.function_worker import FunctionParameters, InvalidReturn, parse_scores
from quartet.rewards.source import Columns, LimitedThreads, RewardError, RewardSource, Scores
from quartet.rewards.subprocesses import Subprocess, SubprocessPool
from quartet.text.examples import PromptText

_WORKER = "quartet.rewards.function_worker:serve_function"


class FunctionSource(RewardSource):
    """What every function has: its parameters, and errors that show the sample."""

    _parameters: FunctionParameters

    def check_columns(self, columns: Sequence[str]) -> None:
        """Fails before any work where the function asks for a column that the data do not have.

        Raises:
            UserError: such a column, or a signature without ``completions``.
        """
        self._parameters.accepted(self.name, ["prompts", "completions", *columns])

    def _arguments(self, prompts: Sequence[PromptText], completions: Sequence[str], columns: Columns) -> dict[str, Any]:
        """Returns what the function is called with, in lists of its own.

        Raises:
            UserError: it asks for a column that is not there.
        """
        offered: dict[str, Any] = {
            **{column: list(values) for column, values in columns.items()},
            "prompts": list(prompts),
            "completions": [
                text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                for prompt, text in zip(prompts, completions, strict=True)
            ],
        }
        return {argument: offered[argument] for argument in self._parameters.accepted(self.name, [*offered])}

    def _failure(self, fault: InvalidReturn, prompts: Sequence[PromptText], completions: Sequence[str]) -> RewardError:
        """Makes the error for what the function did wrong: with the sample, and the place in its code."""
        found = "no sample"
        if completions:
            n = max(0, min(fault.sample, len(completions) - 1))
            found = f"sample {n}: prompt {excerpt(prompts[n])}, completion {excerpt(completions[n])}"
        if fault.where is not None:
            found += f"; raised in {fault.where}"
        return RewardError(
            f"the reward {self.name!r} {fault.what}",
            found=found,
            remedy="correct the function and resume the run: it stopped before the update, nothing is lost "
            "(return None for a sample to which the reward does not apply)",
        )


class PassedFunction(FunctionSource):
    """A function passed from Python. It runs in the event loop, so a plain one while generation waits.

    It has random generators of its own; what else it changes about the process stays changed.

    Args:
        function: see this module's head.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        # A lambda is called "<lambda>", which no metric may be.
        self.name = str(getattr(function, "__name__", type(function).__name__)).strip("<>")
        self._parameters = FunctionParameters.of(function)
        self._guard = RandomStateGuard(f"the reward {self.name!r}")

    async def score(self, prompts: Sequence[PromptText], completions: Sequence[str], columns: Columns) -> Scores:
        """Returns one score per completion; None where the function says that it does not apply.

        Args:
            prompts: text, or messages for chat prompts.
            completions: decoded text without end-of-text and padding; other special tokens stay.
            columns: the data's other columns, one entry per completion.

        Raises:
            RewardError: the function raised, or returned a wrong count, NaN, an infinity, a number too large for
                float32 or something not a number.
            UserError: the function asks for a column that is not there.
        """
        arguments = self._arguments(prompts, completions, columns)
        try:
            with self._guard.held():
                result = self.function(**arguments)
                if not inspect.isawaitable(result):
                    return parse_scores(result, len(completions))
            result = await self._guard.driven(result)
            with self._guard.held():
                return parse_scores(result, len(completions))
        except InvalidReturn as fault:
            raise self._failure(fault, prompts, completions) from None
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Something inside was cancelled, and not this call: the error would be lost.
            raise self._failure(InvalidReturn("raised CancelledError"), prompts, completions) from error
        except (KeyboardInterrupt, GeneratorExit, UserError):
            raise  # Ctrl-C, the end of the event loop, or a run that was started inside.
        except BaseException as error:  # User code may raise anything; it is passed on with its cause.
            raise self._failure(InvalidReturn.of(error), prompts, completions) from error

    def warnings(self) -> list[str]:
        """Tells which random numbers the function draws."""
        return self._guard.warnings()


# In processes of their own ----------------------------------------------------------------------------------


@dataclass
class _Call:
    """One call: the process that computes it, and whether its caller was cancelled (set by the event loop's thread)."""

    process: Subprocess | None = None
    is_abandoned: bool = False


class SubprocessFunction(FunctionSource):
    """A function in processes of its own, beside generation.

    They are started here, keep what the module keeps between calls, and are killed with everything that they started by
    a deadline or the end of the run. What the function does to its process (its end, directory, streams, threads)
    reaches no other; the next call gets a fresh one.

    Raises:
        UserError: there is no such file, module or name, its module fails while it is imported, or it is no function.
    """

    def __init__(self, config: FunctionReward) -> None:
        self._pool = SubprocessPool(partial(_start, config.target), config.processes)
        try:
            self._pool.fill()
            with self._pool.taken() as process:
                said = process.greeting
        except BaseException:
            self._pool.close()
            raise
        # A lambda is called "<lambda>", which no metric may be.
        self.name = config.name or str(said["name"])[:100].strip("<>")
        self._parameters = FunctionParameters(dict(said["named"]), bool(said["takes_all"]))
        # A plain function has one call per process, and the others wait here.
        num_calls = config.concurrency if said["is_async"] else config.processes
        self._threads = LimitedThreads(num_calls, self.name)
        self._starts = LimitedThreads(1, f"{self.name}-start")
        # Also where a run is refused before anybody could close it.
        self._end = weakref.finalize(self, _close, self._pool, self._threads, self._starts)

    async def ready(self) -> None:
        """Waits for the start of a process in place of one that is gone."""
        if not self._pool.is_full:
            await self._starts.run(self._pool.fill)

    async def score(self, prompts: Sequence[PromptText], completions: Sequence[str], columns: Columns) -> Scores:
        """Scores as ``PassedFunction.score`` does. A call that is cancelled while it is under way costs its process.

        Raises:
            RewardError: the function or its process failed.
            UserError: the function asks for a column that is not there, or the data cannot be handed to a process.
        """
        arguments = self._arguments(prompts, completions, columns)
        call = _Call()
        try:
            answer = await self._threads.run(self._ask, arguments, call)
            return self._read(answer, len(completions))
        except asyncio.CancelledError:
            call.is_abandoned = True
            if (process := call.process) is not None:
                # What has begun cannot be interrupted otherwise. Calls of an async function that share it fail, too.
                process.kill()
            raise
        except ProcessDied as error:
            what = f"lost its process: {error} (os._exit, a crash in native code, too much memory)"
            raise self._failure(InvalidReturn(what), prompts, completions) from error
        except InvalidReturn as fault:
            cause = _Traceback(fault.traceback) if fault.traceback else None
            raise self._failure(fault, prompts, completions) from cause

    def close(self) -> None:
        self._end()

    def _ask(self, arguments: dict[str, Any], call: _Call) -> Any:
        """Asks one of the processes, in a thread of its own."""
        try:
            with self._pool.taken() as call.process:
                # Looked at after the process is known, so that one of the two threads ends what begins here.
                if call.is_abandoned:
                    raise ProcessDied("its caller was cancelled")
                try:
                    return call.process.ask(arguments)
                finally:  # before another call takes the process
                    call.process = None
        except (ProcessDied, UserError):
            raise
        except Exception as error:  # What pickling the user's objects raises.
            raise self._not_plain(describe_error(error)) from error

    def _read(self, answer: Any, num: int) -> list[float | None]:
        """Returns the scores in an answer, which may be any JSON."""
        match answer:
            case {"scores": list() as values}:
                return parse_scores(values, num)
            case {"what": str() as what, "sample": int() as sample, "where": str() | None as where, "traceback": text}:
                raise InvalidReturn(what, sample, where, str(text) if text else None)
            case {"unreadable": str() as why}:
                raise self._not_plain(why)
        raise InvalidReturn("answered with something that is no answer")

    def _not_plain(self, why: str) -> UserError:
        return UserError(
            f"the data cannot be handed to the process of the reward {self.name!r}",
            found=why,
            remedy="keep plain values in the columns (text, numbers, lists), or pass the function from Python",
        )


class _Traceback(Exception):
    """The traceback of another process, as the cause of an error in this one."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _start(target: str) -> Subprocess:
    """Starts a process that has loaded the function; its greeting is the function's name and parameters."""
    problem = f"the process of the function {target!r} does not start"
    remedy = "correct what its module does while it is imported"
    torch = sys.modules.get("torch")
    try:
        process = Subprocess(_WORKER, {"target": target}, threads=None if torch is None else torch.get_num_threads())
    except ProcessDied as error:
        raise UserError(problem, found=str(error), remedy=f"see what it printed; {remedy}") from error
    match process.greeting:
        case {"name": _, "named": dict(), "takes_all": _, "is_async": _}:
            return process
        case {"error": [str() as told, str() as found, str() as advice]}:
            refusal = UserError(told, found=found, remedy=advice)
        case said:
            refusal = UserError(problem, found=f"it said {said!r}"[:400], remedy=remedy)
    process.close()
    raise refusal


def _close(pool: SubprocessPool, *threads: LimitedThreads) -> None:
    for some in threads:
        some.close()
    pool.close()
