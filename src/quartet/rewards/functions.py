"""Rewards that are Python functions: ``f(prompts, completions, **columns) -> list[float | None]``.

A function receives, by keyword, those of ``prompts``, ``completions`` and the data's columns that it names
(all, if it takes ``**columns``), each a list with one entry per completion. ``None`` in its answer means
"does not apply to this sample". It may be ``async``. For chat prompts both are conversational: a prompt is
its list of messages, a completion ``[{"role": "assistant", "content": …}]``.

A function that a recipe names is called in processes of its own (``subprocess_functions.py``), one that Python code
passes in this process while nothing else computes (``PassedFunction``).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from quartet.config.errors import UserError
from quartet.config.foreign import excerpt
from quartet.observe.global_state import RandomStateGuard
from quartet.rewards.called import BadReturn, Parameters, scores_of
from quartet.rewards.source import Columns, RewardError, RewardSource, Scores
from quartet.text.examples import PromptText


class FunctionSource(RewardSource):
    """What every function has: its parameters, and errors that show the sample."""

    _parameters: Parameters

    def check_columns(self, columns: Sequence[str]) -> None:
        """Fails before any work where the function asks for a column that the data do not have.

        Raises:
            UserError: such a column, or a signature without ``completions``.
        """
        self._parameters.accepted(self.name, ["prompts", "completions", *columns])

    def _arguments(self, prompts: Sequence[PromptText], completions: Sequence[str], columns: Columns) -> dict[str, Any]:
        """What the function is called with, in lists of its own.

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

    def _failure(self, fault: BadReturn, prompts: Sequence[PromptText], completions: Sequence[str]) -> RewardError:
        """The error for what the function did wrong: with the sample, and the place in its code."""
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
        self._parameters = Parameters.of(function)
        self._guard = RandomStateGuard(f"the reward {self.name!r}")

    async def score(self, prompts: Sequence[PromptText], completions: Sequence[str], columns: Columns) -> Scores:
        """One score per completion; None where the function says that it does not apply.

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
                    return scores_of(result, len(completions))
            result = await self._guard.driven(result)
            with self._guard.held():
                return scores_of(result, len(completions))
        except BadReturn as fault:
            raise self._failure(fault, prompts, completions) from None
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Something inside was cancelled, and not this call: the error would be lost.
            raise self._failure(BadReturn("raised CancelledError"), prompts, completions) from error
        except (KeyboardInterrupt, GeneratorExit, UserError):
            raise  # Ctrl-C, the end of the event loop, or a run that was started inside.
        except BaseException as error:  # User code may raise anything; it is passed on with its cause.
            raise self._failure(BadReturn.of(error), prompts, completions) from error

    def warnings(self) -> list[str]:
        """Which random numbers it draws."""
        return self._guard.warnings()
