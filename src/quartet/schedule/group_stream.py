"""The group stream: a standing producer of groups under an admission rule.

Generation is started group by group, as many as the rule admits, and consumed in the order of the prompts'
indices, never in that of completion (short groups finish first: taking them first would bias the batch to
short ones). A filter may reject a group; the stream then admits the next index in its place. Which groups
form a step, and how they are cut into chunks, therefore depends on the groups alone and not on when they
arrive.

Replacements start in rounds, when nothing is in flight any more. An engine computes its requests in one batch,
and which requests share it shows in the last bits, while the filter may wait for the outside world. In rounds
that, too, depends on the groups alone.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from quartet.config.errors import UserError
from quartet.schedule.clock import News, drained
from quartet.schedule.staleness import AdmissionRule


class Aged(Protocol):
    @property
    def first_version(self) -> int:
        """Of the oldest weights that made the group."""


G = TypeVar("G", bound=Aged)


@dataclass(frozen=True)
class BufferedGroups(Generic[G]):
    """What has been produced beyond the last whole step: accepted groups by index, and the indices rejected."""

    groups: Mapping[int, G] = field(default_factory=dict)
    rejected: tuple[int, ...] = ()


@dataclass(frozen=True)
class TooFewGroups:
    """A filter has used up the attempts of a step: ``accepted`` of the ``wanted`` groups in ``attempts``."""

    step: int
    wanted: int
    accepted: int
    attempts: int


@dataclass(eq=False)
class GroupStream(Generic[G]):
    """Produces groups ahead of their consumption and hands them out step by step.

    `produce(i)` makes the group of index `i` (0, 1, 2, ... for ever; the caller maps it to a prompt);
    `accept` keeps or rejects it. `max_attempts` bounds the indices that one step may use up; `shortage` makes
    the error that is raised then. One consumer, steps in order; use it as `async with GroupStream(...) as
    stream`, or call `close()`.
    """

    produce: Callable[[int], Awaitable[G]]
    rule: AdmissionRule
    _: KW_ONLY
    chunk_size: int
    accept: Callable[[G], bool] | None = None
    max_attempts: int | None = None
    shortage: Callable[[TooFewGroups], Exception] = RuntimeError

    def __post_init__(self) -> None:
        self._running: dict[int, asyncio.Task[G | None]] = {}
        self._decided: dict[int, G | None] = {}  # produced, but not yet passed by the cursor; None where rejected
        self._passed: dict[int, G | None] = {}  # passed by it since the last whole step
        self._cursor = 0  # every index below it is consumed or rejected
        self._next_launch = 0
        self._consumed = 0
        self._num_waiting = 0  # accepted and not yet passed by the cursor
        self._open_steps = 0
        self._versions_published = 0
        self._boundary = self._snapshot()  # where the last whole step ended
        self._failure: BaseException | None = None
        self._closed = False
        self._news = News()  # for the consumer, and for what looks ahead

    @property
    def num_running(self) -> int:
        """Groups being produced now."""
        return len(self._running)

    @property
    def num_accepted(self) -> int:
        """Groups accepted since the start of the run, those not consumed yet included."""
        return self._consumed + self._num_waiting

    async def chunks(self, step: int) -> AsyncIterator[list[G]]:
        """The next `prompts_per_step` accepted groups in index order, each chunk as soon as it is complete.

        The last chunk is smaller where `chunk_size` does not divide the step. `step` counts from 0 and only
        ever by one: it is checked against what was consumed. Raises `UserError` when the filter leaves a step
        short, and once whatever `produce` or `accept` raised, after everything in flight has been stopped.
        """
        self._begin(step)
        first_index, size = self._cursor, self.rule.prompts_per_step
        chunk: list[G] = []
        for taken in range(1, size + 1):
            chunk.append(await self._take(step, first_index, taken))
            if taken == size:  # before the last yield: a consumer need not come back after it
                self._boundary = self._snapshot()
                self._passed.clear()
            if len(chunk) == self.chunk_size or taken == size:
                full, chunk = chunk, []
                yield full

    def buffered_chunks(self) -> Iterator[tuple[int, int, list[G]]]:
        """Chunks of steps that have not begun whose groups are all there: (step, place in the step, groups), in order.

        They are what `chunks` will give.
        """
        size, place = self.rule.prompts_per_step, self._consumed
        chunk: list[G] = []
        index = self._cursor
        while index in self._decided:
            group = self._decided[index]
            index += 1
            if group is None:
                continue
            step, place_in_step = divmod(place, size)
            place += 1
            if step < self._open_steps:
                continue
            chunk.append(group)
            if len(chunk) == self.chunk_size or place % size == 0:
                yield step, place_in_step // self.chunk_size, chunk
                chunk = []

    async def change(self) -> None:
        """Until another group was produced."""
        await self._news.wait(lambda: "waits for a group of a coming step")

    def published(self, version: int) -> None:
        """Says that the weights of `version` are out (0 are the first ones): admits more groups."""
        if version < self._versions_published:
            raise ValueError(f"version {version} published after version {self._versions_published}")
        self._versions_published = version
        if self._open_steps:
            self._launch()

    def state(self) -> dict[str, int]:
        """The cursor at the end of the last step consumed whole, as plain numbers.

        Groups waiting beyond it are `buffered()`; what is in flight then, a restored stream produces again.
        """
        return {**self._boundary, "versions_published": self._versions_published}

    def buffered(self) -> BufferedGroups[G]:
        """What is complete beyond `state()`."""
        decided = sorted({**self._passed, **self._decided}.items())
        groups = {index: group for index, group in decided if group is not None}
        return BufferedGroups(groups, tuple(index for index, _ in decided if index not in groups))

    def restore(self, state: Mapping[str, int], buffered: BufferedGroups[G] | None = None) -> None:
        """Continues from `state()`; only before the first step of this stream.

        Args:
            buffered: groups that need not be produced again.

        Raises:
            UserError: the rule differs, so that the steps would be others or these groups too old in theirs.
        """
        size = self.rule.prompts_per_step
        if state["accepted"] != state["steps"] * size:
            raise UserError(
                "the number of prompts per step differs from that of the saved run",
                found=f"{state['accepted']} groups in {state['steps']} steps, now prompts_per_step={size}",
                remedy="resume with the recipe that the run was saved with",
            )
        self._cursor = self._next_launch = state["next_index"]
        self._consumed = state["accepted"]
        self._open_steps = state["steps"]
        self._versions_published = state["versions_published"]
        self._boundary = self._snapshot()
        if buffered is not None:
            self._check_age(buffered)
            self._decided = {**buffered.groups, **dict.fromkeys(buffered.rejected)}
            self._num_waiting = len(buffered.groups)

    def _check_age(self, buffered: BufferedGroups[G]) -> None:
        """A group's step is at the latest the one that it comes into when all before it are accepted."""
        rejected = sorted(buffered.rejected)
        for index, group in buffered.groups.items():
            ahead = (index - self._cursor - bisect_left(rejected, index)) // self.rule.prompts_per_step
            step = self._open_steps + ahead
            self.rule.check_restored(index, first_version=group.first_version, step=step, ahead=ahead)

    async def close(self) -> None:
        """Cancels what is in flight and waits until it has really stopped. May be called again."""
        self._closed = True
        for task in self._running.values():
            task.cancel()
        try:
            if self._running:  # a worker may still be at it: leave only when none is
                await drained(asyncio.wait([*self._running.values()]))
        finally:
            self._news.tell()

    async def __aenter__(self) -> GroupStream[G]:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _begin(self, step: int) -> None:
        if self._closed and self._failure is None:
            raise RuntimeError("the stream is closed")
        if self._consumed != step * self.rule.prompts_per_step:
            raise RuntimeError(
                f"step {step} asked for after {self._consumed} groups of "
                f"{self.rule.prompts_per_step} per step: steps are consumed whole and in order"
            )
        self._open_steps = step + 1
        if self._failure is None:
            self._launch()

    async def _take(self, step: int, first_index: int, wanted: int) -> G:
        """The next accepted group in index order; `wanted` is its number within the step, from 1."""
        while True:
            if self._failure is not None:  # it comes out once; the stream stays closed after it
                await self.close()
                failure, self._failure = self._failure, None
                raise failure
            attempts = self._cursor - first_index
            if self.max_attempts is not None and attempts >= self.max_attempts:
                await self.close()
                raise self.shortage(TooFewGroups(step, self.rule.prompts_per_step, wanted - 1, attempts))
            if self._cursor in self._decided:
                group = self._passed[self._cursor] = self._decided.pop(self._cursor)
                self._cursor += 1
                if group is not None:
                    self._consumed += 1
                    self._num_waiting -= 1
                    return group
                continue
            if self._closed:
                raise RuntimeError("the stream was closed while a step was being consumed")
            await self._news.wait(lambda: f"waits for group {self._cursor} of step {step}")

    def _launch(self) -> None:
        """Starts as many groups as the rule admits, in index order; restored ones are there already."""
        self._skip_restored()
        while not self._closed and self._admits_another():
            index = self._next_launch
            self._next_launch += 1
            self._skip_restored()  # at once: they may be consumed before the next launch
            task = asyncio.get_running_loop().create_task(self._attempt(index), name=f"group {index}")
            self._running[index] = task
            task.add_done_callback(partial(self._settle, index))

    def _skip_restored(self) -> None:
        while self._next_launch in self._decided:
            self._next_launch += 1

    def _admits_another(self) -> bool:
        """Whether the rule and ``max_attempts`` let one more group start; counts are since the run's first step."""
        admitted = self.rule.num_admitted(open_steps=self._open_steps, versions_published=self._versions_published)
        if self.num_accepted + len(self._running) >= admitted:
            return False
        if self.max_attempts is None:
            return True
        # Without this a filter that rejects everything would keep an idle consumer's producer busy for ever.
        steps_ahead = 1 + (self.rule.max_staleness or 0)
        return self._next_launch < self._boundary["next_index"] + steps_ahead * self.max_attempts

    async def _attempt(self, index: int) -> G | None:
        group = await self.produce(index)
        return group if self.accept is None or self.accept(group) else None

    def _settle(self, index: int, task: asyncio.Task[G | None]) -> None:
        """A producer has ended: books its group, or stops the stream."""
        del self._running[index]
        if task.cancelled():
            failure: BaseException | None = RuntimeError(f"producing group {index} was cancelled")
        else:
            failure = task.exception()
        if self._closed:
            return
        if failure is not None:
            self._failure = failure
            self._closed = True
            for other in self._running.values():
                other.cancel()
        else:
            group = self._decided[index] = task.result()
            self._num_waiting += group is not None
            if not self._running:
                self._launch()
        self._news.tell()

    def _snapshot(self) -> dict[str, int]:
        return {
            "next_index": self._cursor,
            "steps": self._open_steps,
            "accepted": self._consumed,
            "rejected": self._cursor - self._consumed,
        }
