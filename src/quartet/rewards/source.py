"""What every source of reward is, and what holds for all of them: batches, concurrency, deadlines, failures."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

from quartet.config.errors import UserError
from quartet.config.nearest import nearest
from quartet.config.rewards import OnError
from quartet.text.examples import PromptText

P = ParamSpec("P")
T = TypeVar("T")

_LAST_LOOK = 5
"""Turns of the event loop that a result needs from the thread that made it to the task that waits for it, and some."""


class RewardError(UserError):
    """A source failed. Raised before any update is made with its scores, so the run can be resumed.

    ``splits``: one sample of several may be at fault; they are worth another try in smaller batches.
    """

    splits = False


Score: TypeAlias = "float | RewardError | None"


class RewardSource(Protocol):
    """Scores completions. ``name`` is how metrics and messages call it."""

    @property
    def name(self) -> str: ...

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raises ``UserError`` before any work where the source needs a column that the data do not have."""

    async def score(
        self, prompts: Sequence[PromptText], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[float | None]:
        """One finite score per completion; None where the source does not apply.

        Args:
            prompts: text, or messages for chat prompts.
            completions: decoded text without special tokens.
            columns: the data's other columns, one entry per completion.

        Raises:
            RewardError: these samples cannot be scored.
        """

    def close(self) -> None:
        """Lets go of threads, processes and connections; the source is not used after it."""


@runtime_checkable
class Remarking(Protocol):
    """A source that notices something the user should know."""

    def remarks(self) -> list[str]: ...


@runtime_checkable
class Starting(Protocol):
    """A source with something to start, which is not to cost the calls their time."""

    async def ready(self) -> None:
        """Returns when all of it is there."""


@dataclass(frozen=True)
class Outcome:
    """Scores of one chunk. ``failed``: which samples have none because the source failed, with the reasons; the others
    without a score are those to which the source does not apply.
    """

    scores: list[float | None]
    failed: list[bool]
    reasons: tuple[RewardError, ...] = ()


class GuardedReward:
    """A source under its recipe's rules.

    Args:
        on_error: ``stop`` raises the first failure; ``leave_out`` gives failed samples no score.
        deadline_s: most seconds for one chunk; calls that are not through by then have failed.
        batch_size: completions per call of the source; None: a whole chunk.
        concurrency: most calls under way at a time, over all chunks; None: no limit.

    Raises:
        UserError: there is a deadline, and nothing could end a call of the source.
    """

    def __init__(
        self,
        source: RewardSource,
        *,
        on_error: OnError = "stop",
        deadline_s: float | None = None,
        batch_size: int | None = None,
        concurrency: int | None = None,
    ) -> None:
        if deadline_s is not None and getattr(source, "holds_loop", False):
            raise UserError(
                f"deadline_s does not hold for the reward {source.name!r}",
                found=f"deadline_s: {deadline_s} and a plain Python function, which nothing can end in this process",
                remedy="name it in the recipe (type: function, target: file.py:name), where it has a process of its "
                "own; or write it as async def, and let it await what takes long",
            )
        self.source = source
        self._on_error = on_error
        self._deadline_s = deadline_s
        self._batch_size = batch_size
        self._concurrency = concurrency
        self.has_scored = False
        self._num_left_out = 0
        self._first_reason: RewardError | None = None
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def may_leave_out(self) -> bool:
        return self._on_error == "leave_out"

    def check_columns(self, columns: Sequence[str]) -> None:
        self.source.check_columns(columns)

    def close(self) -> None:
        self.source.close()

    async def score(
        self,
        prompts: Sequence[PromptText],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        mark: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Scores in the order of the completions, whenever the calls end.

        Args:
            mark: called when a call begins and when it has ended; the scores may be waited for longer, where other work
                keeps the event loop busy.

        Raises:
            RewardError: a call failed and the rule is to stop.
        """
        num = len(completions)
        size = self._batch_size or max(1, num)
        if isinstance(self.source, Starting):
            await self.source.ready()
        parts = [slice(start, min(start + size, num)) for start in range(0, num, size)]
        tasks = [
            asyncio.create_task(
                self._marked_call(
                    prompts[part], completions[part], {name: values[part] for name, values in columns.items()}, mark
                )
            )
            for part in parts
        ]
        if not tasks:
            return Outcome([], [])
        try:
            _, waiting = await asyncio.wait(tasks, timeout=self._deadline_s, return_when=asyncio.FIRST_EXCEPTION)
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
        return Outcome([None if isinstance(score, RewardError) else score for score in found], failed, reasons)

    def remarks(self) -> list[str]:
        """How many samples were left out so far and why the first of them was, and what the source has to say."""
        found = self.source.remarks() if isinstance(self.source, Remarking) else []
        if self._first_reason is not None:
            reason = f"{self._first_reason.problem}: {self._first_reason.found}"
            found = [*found, f"reward {self.name!r}: {self._num_left_out} samples left out; the first because {reason}"]
        return found

    async def _marked_call(
        self,
        prompts: Sequence[PromptText],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        mark: Callable[[], None],
    ) -> list[Score]:
        mark()
        try:
            return await self._call(prompts, completions, columns)
        finally:
            mark()

    async def _call(
        self, prompts: Sequence[PromptText], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        """One score per completion, or why there is none."""
        try:
            async with self._place():
                return [*await self.source.score(prompts, completions, columns)]
        except RewardError as error:
            if not self.may_leave_out:
                raise
            num = len(completions)
            if num == 1 or not error.splits:
                return [error] * num
        found: list[Score] = []
        for part in (slice(num // 2), slice(num // 2, num)):
            cut = {name: values[part] for name, values in columns.items()}
            found += await self._call(prompts[part], completions[part], cut)
        return found

    def _place(self) -> contextlib.AbstractAsyncContextManager[Any]:
        if self._concurrency is None:
            return contextlib.nullcontext()
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            # One per event loop: training and a later evaluation may each have their own.
            self._places = (loop, asyncio.Semaphore(self._concurrency))
        return self._places[1]

    def _result(self, task: asyncio.Task[list[Score]], part: slice) -> list[Score]:
        if task.done():
            return task.result()
        late = RewardError(
            f"the reward {self.name!r} is late",
            found=f"no answer within deadline_s={self._deadline_s} for a chunk",
            remedy="raise deadline_s or concurrency, or set on_error: leave_out, and resume the run",
        )
        if not self.may_leave_out:
            raise late
        return [late] * (part.stop - part.start)


class Threads:
    """A few threads in which calls wait or compute beside the event loop.

    They keep no process alive: the end of a run does not wait for a call that never comes back.
    """

    def __init__(self, concurrency: int, name: str) -> None:
        self._most, self._name = concurrency, f"reward-{name}"
        self._started: list[threading.Thread] = []
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False

    async def run(self, function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if not waiting.done():
                waiting.set_result((result, error))

        def call() -> None:
            if waiting.cancelled():
                return
            result, error = None, None
            try:
                result = function(*arguments, **keywords)
            except BaseException as raised:  # Whatever it is, it is raised where the call is waited for.
                error = raised
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits.
                loop.call_soon_threadsafe(settle, result, error)

        self._calls.put(call)
        self._start_another()
        result, error = await waiting
        if error is not None:
            raise error
        return cast(T, result)

    def close(self) -> None:
        """Calls that are under way end by themselves, those that have not begun never begin."""
        self._is_closed = True
        for _ in self._started:
            self._calls.put(None)

    def _start_another(self) -> None:
        with self._lock:
            if len(self._started) < self._most:
                name = f"{self._name}_{len(self._started)}"
                self._started.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._started[-1].start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None and not self._is_closed:
            call()


def check_column(name: str, column: str, columns: Sequence[str]) -> None:
    """Raises ``UserError`` where ``column``, which the reward ``name`` needs, is not among those of the data."""
    if column not in columns:
        raise UserError(
            f"the reward {name!r} asks for a column that the data do not have",
            found=f"{column!r}; the columns are {', '.join(columns) or 'none'}",
            remedy=nearest(column, columns) or f"give the data that column, or map it: data.columns.{column}=…",
        )
