"""Scoring ahead: where generation runs ahead, chunks of coming steps are scored while the learners of this one work.

::

    step k      generate ── score k ──► assemble ──► train k ─────────► publish k + 1
    step k + 1  generate ─────────────────────────── score (frozen) ──────────────────► score (trained) ──► …

Rewards and reference log-probabilities do not depend on weights that are trained, so a chunk can have them as soon as
its groups are there. Old log-probabilities and values need the weights of the chunk's own step and wait for it. The
learners ask for their leases first: what is scored ahead takes what they leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quartet.batch.columns import ColumnSet
from quartet.schedule.group_stream import GroupStream
from quartet.schedule.groups import Chunk, Group

if TYPE_CHECKING:
    from quartet.schedule.iteration import Collect, Scorer


@dataclass(frozen=True)
class PrefetchedChunk:
    """A chunk whose scoring began before its step."""

    chunk: Chunk
    columns: Sequence[tuple[Scorer, asyncio.Task[ColumnSet]]]

    def task(self, scorer: Scorer) -> asyncio.Task[ColumnSet] | None:
        return next((task for known, task in self.columns if known is scorer), None)


@dataclass(eq=False)
class ScorePrefetcher:
    """Begins the scoring of coming steps' chunks, and hands it over when their step has come.

    What fails is raised in the step that it was for. Nothing of it is saved: a resumed run scores its chunks anew.

    Args:
        scorers: those of the iteration whose columns depend on no weights that are trained.
        num_steps: of the run, behind which nothing is scored, however far generation goes.
    """

    stream: GroupStream[Group]
    collect: Collect
    scorers: Sequence[Scorer]
    num_steps: int | None = None

    def __post_init__(self) -> None:
        self._begun: dict[tuple[int, int], PrefetchedChunk] = {}
        self._next = (0, 0)  # no chunk before it is begun any more
        self._watch: asyncio.Task[None] | None = None

    def resume(self) -> None:
        """The learners of a step are at work: from now on chunks are scored as soon as they are complete."""
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._look(), name="scoring ahead")

    async def pause(self) -> None:
        """A step begins, whose own scoring comes first: no other chunk is begun.

        Raises:
            whatever collecting a chunk raised.
        """
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.wait({watch})
            if not watch.cancelled():
                watch.result()

    def take(self, step: int, index: int) -> PrefetchedChunk | None:
        return self._begun.pop((step, index), None)

    async def close(self) -> None:
        """Stops all of it and waits until it has stopped; what failed unasked is forgotten."""
        tasks: list[asyncio.Task[Any]] = [task for begun in self._begun.values() for _, task in begun.columns]
        tasks += [self._watch] if self._watch is not None else []
        self._begun.clear()
        self._watch = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            for step, index, groups in self.stream.buffered_chunks():
                is_of_run = self.num_steps is None or step < self.num_steps
                if is_of_run and (step, index) >= self._next:
                    self._begin(step, index, groups)
            await self.stream.change()

    def _begin(self, step: int, index: int, groups: list[Group]) -> None:
        self._next = (step, index + 1)
        chunk = self.collect(step, index, groups)
        loop = asyncio.get_running_loop()
        tasks = [(scorer, loop.create_task(scorer.score(chunk))) for scorer in self.scorers]
        self._begun[step, index] = PrefetchedChunk(chunk, tasks)
