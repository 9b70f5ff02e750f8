"""What every source of reward is, and what holds for all of them: batches, concurrency, deadlines, failures.

Several sources, one reward: the weighted sum.

Shapes: N completions. Scores are NaN where a source does not apply.
"""

from __future__ import annotations

import abc
import asyncio
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from quartet.config.errors import UserError
from quartet.config.rewards import FallibleReward, OnError
from quartet.rewards.function_worker import check_column
from quartet.text.examples import PromptText

P = ParamSpec("P")
T = TypeVar("T")

_LAST_LOOK = 5
"""Turns of the event loop that a result needs from the thread that made it to the task that waits for it, and some."""


class RewardError(UserError):
    """A source failed. Raised before any update is made with its scores, so the run can be resumed."""


Columns: TypeAlias = Mapping[str, Sequence[Any]]
"""Of the data beside the prompts, one entry per completion."""
Scores: TypeAlias = list[float | None]
"""One per completion; None where the source does not apply."""
_Result: TypeAlias = "float | RewardError | None"


class RewardSource(abc.ABC):
    """Scores completions. ``name`` is how metrics and messages call it, ``column`` the data's column that it needs;
    ``compares``: that holds right answers.
    """

    name: str
    column: str | None = None
    compares = False

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raises ``UserError`` before any work where the source needs a column that the data do not have.

        Args:
            columns: names; of what is inside objects with dots, ``reward_model.ground_truth``.
        """
        if self.column is not None:
            check_column(f"the reward {self.name!r}", self.column, columns)

    async def ready(self) -> None:  # noqa: B027 - most have nothing to start
        """Returns when all that is to be started is there, so that starts do not cost the calls their time."""

    @abc.abstractmethod
    async def score(self, prompts: Sequence[PromptText], completions: Sequence[str], columns: Columns) -> Scores:
        """Returns one finite score per completion; None where the source does not apply.

        Args:
            prompts: text, or messages for chat prompts.
            completions: decoded text without end-of-text and padding; other special tokens stay.
            columns: the data's other columns, one entry per completion.

        Raises:
            RewardError: these samples cannot be scored.
        """

    def warnings(self) -> list[str]:
        """Returns what the user should know."""
        return []

    def close(self) -> None:  # noqa: B027 - or to let go of
        """Lets go of threads, processes and connections; the source is not used after it."""


@dataclass(frozen=True)
class ScoreOutcome:
    """Scores of one chunk. ``failed``: which samples have none because the source failed, with the reasons; the others
    without a score are those to which the source does not apply.
    """

    scores: list[float | None]
    failed: list[bool]
    reasons: tuple[RewardError, ...] = ()


@dataclass(eq=False)
class GuardedReward:
    """A source under its recipe's rules.

    Args:
        on_error: ``stop`` raises the first failure; ``leave_out`` gives failed samples no score.
        deadline_s: most seconds for one chunk; calls that are not through by then have failed.
        batch_size: completions per call of the source; None: a whole chunk.
        concurrency: most calls under way at a time, over all chunks; None: no limit.
    """

    source: RewardSource
    _: KW_ONLY
    on_error: OnError = "stop"
    deadline_s: float | None = None
    batch_size: int | None = None
    concurrency: int | None = None
    has_scored: bool = field(default=False, init=False)
    _num_left_out: int = field(default=0, init=False)
    _first_reason: RewardError | None = field(default=None, init=False)
    _places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = field(default=None, init=False)

    @classmethod
    def of(cls, source: RewardSource, config: FallibleReward) -> GuardedReward:
        """Puts the source under the rules of its recipe's section; one completion per call where that has no batch
        size."""
        return cls(
            source,
            on_error=config.on_error,
            deadline_s=config.deadline_s,
            batch_size=getattr(config, "batch_size", 1),
            concurrency=getattr(config, "concurrency", None),
        )

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def may_leave_out(self) -> bool:
        return self.on_error == "leave_out"

    def check_columns(self, columns: Sequence[str]) -> None:
        self.source.check_columns(columns)

    def close(self) -> None:
        self.source.close()

    async def score(
        self,
        prompts: Sequence[PromptText],
        completions: Sequence[str],
        columns: Columns,
        mark: Callable[[], None] = lambda: None,
    ) -> ScoreOutcome:
        """Returns the scores in the order of the completions, whenever the calls end.

        Args:
            mark: called when a call begins and when it has ended; the scores may be waited for longer, where other work
                keeps the event loop busy.

        Raises:
            RewardError: a call failed and the rule is to stop.
        """

        async def marked_call(part: slice) -> list[_Result]:
            mark()
            try:
                return await self._call(prompts, completions, columns, part)
            finally:
                mark()

        num = len(completions)
        if not num:
            return ScoreOutcome([], [])
        size = self.batch_size or num
        await self.source.ready()
        parts = [slice(start, min(start + size, num)) for start in range(0, num, size)]
        tasks = [asyncio.create_task(marked_call(part)) for part in parts]
        try:
            _, waiting = await asyncio.wait(tasks, timeout=self.deadline_s, return_when=asyncio.FIRST_EXCEPTION)
            for _ in range(_LAST_LOOK if waiting else 0):
                # The loop may have been busy with generation: what was done in time must not count as late.
                await asyncio.sleep(0)
            for task in tasks:
                if task.done():
                    task.result()  # where the rule is to stop, what failed goes before what is late
            found = [score for task, part in zip(tasks, parts, strict=True) for score in self._result(task, part)]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        reasons = tuple({id(score): score for score in found if isinstance(score, RewardError)}.values())
        failed = [isinstance(score, RewardError) for score in found]
        self.has_scored |= not all(failed)
        self._num_left_out += sum(failed)
        self._first_reason = self._first_reason or next(iter(reasons), None)
        return ScoreOutcome([None if isinstance(score, RewardError) else score for score in found], failed, reasons)

    def warnings(self) -> list[str]:
        """Tells how many samples were left out so far and why the first of them was, and what the source has to say."""
        found = self.source.warnings()
        if self._first_reason is not None:
            reason = f"{self._first_reason.problem}: {self._first_reason.found}"
            found = [*found, f"reward {self.name!r}: {self._num_left_out} samples left out; the first because {reason}"]
        return found

    async def _call(
        self, prompts: Sequence[PromptText], completions: Sequence[str], columns: Columns, part: slice
    ) -> list[_Result]:
        """Returns one score per completion of the part, or why there is none."""
        num = part.stop - part.start
        try:
            async with self._place():
                cut = {name: values[part] for name, values in columns.items()}
                return [*await self.source.score(prompts[part], completions[part], cut)]
        except RewardError as error:
            if not self.may_leave_out:
                raise
            return [error] * num

    def _place(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            # One per event loop: training and a later evaluation may each have their own.
            self._places = (loop, asyncio.Semaphore(self.concurrency or sys.maxsize))
        return self._places[1]

    def _result(self, task: asyncio.Task[list[_Result]], part: slice) -> list[_Result]:
        if task.done():
            return task.result()
        late = RewardError(
            f"the reward {self.name!r} is late",
            found=f"no answer within deadline_s={self.deadline_s} for a chunk",
            remedy="raise deadline_s or concurrency, or set on_error: leave_out, and resume the run",
        )
        if not self.may_leave_out:
            raise late
        return [late] * (part.stop - part.start)


class LimitedThreads:
    """Runs calls beside the event loop, each in a thread of its own, at most ``concurrency`` at a time.

    They keep no process alive: the end of a run does not wait for a call that never comes back.
    """

    def __init__(self, concurrency: int, name: str) -> None:
        self._places, self._name = threading.Semaphore(concurrency), f"reward-{name}"
        self._is_closed = False

    async def run(self, function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
        result: Future[T] = Future()

        def work() -> None:
            with self._places:
                if self._is_closed or not result.set_running_or_notify_cancel():
                    return  # not waited for any more
                try:
                    result.set_result(function(*arguments, **keywords))
                except StopIteration as error:  # which no future of asyncio takes
                    result.set_exception(RuntimeError(f"it raised {error!r}"))
                except BaseException as error:  # Whatever it is, it is raised where the call is waited for.
                    result.set_exception(error)

        threading.Thread(target=work, name=self._name, daemon=True).start()
        return await asyncio.wrap_future(result)

    def close(self) -> None:
        """Calls that are under way end by themselves, those that have not begun never begin."""
        self._is_closed = True


LEFT_OUT_PREFIX = "left_out/"
"""Sequence columns of sources that may leave samples out: 1 where one did, because it failed, else 0."""


def effective_weights(scores: Mapping[str, Tensor], weights: Mapping[str, float]) -> dict[str, Tensor]:
    """Returns the weight of every source in every completion's sum, ``[N]`` float64: NaN where it does not apply.

    Args:
        scores: by name, ``[N]``, at least one.
    """
    return {
        name: torch.full(scores[name].shape, weight, dtype=torch.float64).masked_fill(scores[name].isnan(), torch.nan)
        for name, weight in weights.items()
    }


def combine_scores(scores: Mapping[str, Tensor], weights: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """Returns every completion's reward, and whether any source applies to it.

    Args:
        scores: by name, ``[N]``, at least one.

    Returns:
        ``[N]`` float64, 0 where no source applies; ``[N]`` bool.
    """
    by_source = effective_weights(scores, weights)
    total_N = torch.stack([(weight_N * scores[n].double()).nan_to_num(nan=0.0) for n, weight_N in by_source.items()])
    return total_N.sum(0), torch.stack([~weight_N.isnan() for weight_N in by_source.values()]).any(0)


def source_metrics(
    scores: Mapping[str, Tensor], weights: Mapping[str, float], left_out: Mapping[str, Tensor]
) -> dict[str, float]:
    """Returns ``reward/<source>``: its mean score where it applies; ``…/left_out``: for how many it failed.

    Args:
        left_out: by name, ``[N]``.
    """
    found: dict[str, float] = {}
    for name in weights:
        applies_N = ~scores[name].isnan()
        if bool(applies_N.any()):
            found[f"reward/{name}"] = float(scores[name].nanmean())
        if name in left_out:
            found[f"reward/{name}/left_out"] = float(left_out[name].sum())
    return found
