"""Rewards that are Python functions: ``f(prompts, completions, **columns) -> list[float | None]``.

A function receives, by keyword, those of ``prompts``, ``completions`` and the data's columns that it names
(all, if it takes ``**columns``), each a list with one entry per completion. ``None`` in its answer means
"does not apply to this sample". It may be ``async``. For chat prompts both are conversational: a prompt is
its list of messages, a completion ``[{"role": "assistant", "content": …}]``.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quartet.config.errors import UserError
from quartet.config.nearest import nearest
from quartet.config.scores import as_score
from quartet.config.targets import load_target
from quartet.rewards.source import RewardError, Threads
from quartet.text.examples import PromptText


def load_function(target: str) -> Callable[..., Any]:
    """The function named by ``path/to/file.py:name`` (relative to the current directory) or
    ``package.module:name``.

    Raises:
        UserError: no such file, module or name, a module that fails while it is imported, or not a function.
    """
    return load_target(target, "function")


class FunctionReward:
    """A reward function under a name.

    Args:
        function: see this module's head.
        name: how metrics and messages call it; the function's own name when left out.
        threads: calls a function that is not async in so many threads, beside generation; None: in the event loop.
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None, threads: int | None = None) -> None:
        self.function = function
        # A lambda is called "<lambda>", which no metric may be.
        self.name = name or str(getattr(function, "__name__", type(function).__name__)).strip("<>")
        self._threads = Threads(threads, self.name) if threads is not None else None

    def check_columns(self, columns: Sequence[str]) -> None:
        """Fails before any work where the function asks for a column that the data do not have.

        Raises:
            UserError: such a column, or a signature without ``completions``.
        """
        self._accepted({"prompts", "completions", *columns})

    async def score(
        self,
        prompts: Sequence[PromptText],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
    ) -> list[float | None]:
        """One score per completion; None where the function says that it does not apply.

        Args:
            prompts: text, or messages for chat prompts.
            completions: decoded text without special tokens.
            columns: the data's other columns, one entry per completion.

        Raises:
            RewardError: the function raised, or returned a wrong count, NaN, an infinity, a number too large for
                float32 or something not a number.
            UserError: the function asks for a column that is not there.
        """
        chat = [not isinstance(prompt, str) for prompt in prompts]
        offered: dict[str, Any] = {
            **{name: list(values) for name, values in columns.items()},
            "prompts": list(prompts),
            "completions": [
                [{"role": "assistant", "content": text}] if is_chat else text
                for text, is_chat in zip(completions, chat, strict=True)
            ],
        }
        arguments = {name: offered[name] for name in self._accepted(offered)}
        try:
            if self._threads is not None and not inspect.iscoroutinefunction(self.function):
                result = await self._threads.run(self.function, **arguments)
            else:
                result = self.function(**arguments)
            if inspect.isawaitable(result):
                result = await result
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Something inside was cancelled, and not this call: nobody would ever hear of it.
            raise self._error("raised CancelledError", prompts, completions, 0) from error
        except (Exception, SystemExit) as error:  # User code may raise anything; it is passed on with its cause.
            what = f"raised {type(error).__name__}: {error}"
            raise self._error(what, prompts, completions, 0) from error
        return self._validated(result, prompts, completions)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()

    def _accepted(self, offered: Mapping[str, Any] | set[str]) -> list[str]:
        """Which of the offered arguments the function takes."""
        parameters = _parameters(self.function)
        takes_all = parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters or () if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not takes_all and "completions" not in {p.name for p in named}:
            raise UserError(
                f"the reward function {self.name!r} has no parameter `completions`",
                found=f"its parameters are {', '.join(p.name for p in named) or 'none'}",
                remedy="write it as def f(prompts, completions, **columns)",
            )
        for parameter in named:
            if parameter.default is parameter.empty and parameter.name not in offered:
                columns = sorted(set(offered) - {"prompts", "completions"})
                raise UserError(
                    f"the reward function {self.name!r} asks for a column that the data do not have",
                    found=f"{parameter.name!r}; the columns are {', '.join(columns) or 'none'}",
                    remedy=nearest(parameter.name, columns)
                    or f"give the data that column, or map it: data.columns.{parameter.name}=…",
                )
        return list(offered) if takes_all else [p.name for p in named if p.name in offered]

    def _validated(self, result: Any, prompts: Sequence[PromptText], completions: Sequence[str]) -> list[float | None]:
        values = result.tolist() if hasattr(result, "tolist") else result
        if not isinstance(values, (list, tuple)):
            raise self._error(f"returned {type(result).__name__}, not a list", prompts, completions, 0)
        if len(values) != len(completions):
            raise self._error(
                f"returned {len(values)} scores for {len(completions)} completions",
                prompts,
                completions,
                min(len(values), len(completions) - 1),
            )
        scores: list[float | None] = []
        for n, value in enumerate(values):
            number = None if value is None else as_score(value)
            if isinstance(number, str):
                raise self._error(f"returned {number} for sample {n}", prompts, completions, n)
            scores.append(number)
        return scores

    def _error(self, what: str, prompts: Sequence[PromptText], completions: Sequence[str], n: int) -> RewardError:
        sample = "no sample"
        if completions:
            sample = f"sample {n}: prompt {_excerpt(prompts[n])}, completion {_excerpt(completions[n])}"
        return RewardError(
            f"the reward {self.name!r} {what}",
            found=sample,
            remedy="correct the function and resume the run: it stopped before the update, nothing is lost "
            "(return None for a sample to which the reward does not apply)",
        )


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The function's parameters, or None where Python cannot tell (some functions written in C)."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _excerpt(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else text[:110] + " … " + text[-40:]
