"""One RL iteration, written once: only data dependencies, no word about where a role lives.

::

    group stream ──► chunk ──► every scorer ──► assemble ──► every learner ──► publish version + 1
                     (scored as soon as it is complete,      (side by side; the actor's weights are
                     while later groups are generated)        published while others still learn)

The same function runs real roles under leases and simulated ones on a virtual clock, because it touches data only
through chunks and named steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from quartet.batch.columns import ColumnSet
from quartet.schedule.group_stream import GroupStream
from quartet.schedule.groups import Chunk, Group
from quartet.schedule.score_prefetch import PrefetchedChunk, ScorePrefetcher

T = TypeVar("T")
Collect = Callable[[int, int, Sequence[Group]], Chunk]
"""``(step, index, groups) → chunk``."""


class Scorer(Protocol):
    async def score(self, chunk: Chunk) -> ColumnSet:
        """Columns of one chunk, computed with the weights of version ``chunk.step``."""


class StepLearner(Protocol):
    async def train(self, experience: Any, step: int) -> Mapping[str, float]:
        """All updates of one step; advances the role's weights by one version. Returns metrics."""


@dataclass(frozen=True)
class IterationStages:
    """What an iteration calls. ``collect`` makes a chunk; ``assemble`` computes advantages on the whole step;
    ``publish(version)`` waits for the actor's weights of that version and hands them to the rollout engine, be other
    roles still learning. ``prefetch`` has begun to score some of the chunks already."""

    stream: GroupStream[Group]
    collect: Collect
    scorers: Sequence[Scorer]
    assemble: Callable[[Sequence[tuple[Chunk, Sequence[ColumnSet]]]], Awaitable[Any]]
    learners: Sequence[StepLearner]
    publish: Callable[[int], Awaitable[Mapping[str, float]]]
    prefetch: ScorePrefetcher | None = None


async def run_iteration(step: int, stages: IterationStages) -> tuple[Any, dict[str, float]]:
    """Generates, scores, learns, publishes; returns the experience, and metrics of learning and publishing.

    A failing part cancels the others and its error comes out as it is.
    """
    with _first_error():
        if stages.prefetch is not None:
            await stages.prefetch.pause()
        experience = await stages.assemble(await _scored_chunks(step, stages))  # no texts live on beside it
        async with asyncio.TaskGroup() as tasks:
            updates = [tasks.create_task(learner.train(experience, step)) for learner in stages.learners]
            updates.append(tasks.create_task(_publish(stages, step + 1)))
            if stages.prefetch is not None:
                stages.prefetch.resume()
    return experience, {name: value for task in updates for name, value in task.result().items()}


async def _scored_chunks(step: int, stages: IterationStages) -> list[tuple[Chunk, list[ColumnSet]]]:
    async with asyncio.TaskGroup() as tasks:
        pending: list[tuple[Chunk, list[asyncio.Task[ColumnSet]]]] = []
        async for groups in stages.stream.chunks(step):
            begun = stages.prefetch.take(step, len(pending)) if stages.prefetch is not None else None
            chunk = begun.chunk if begun is not None else stages.collect(step, len(pending), groups)
            scores = [tasks.create_task(_score(scorer, chunk, begun)) for scorer in stages.scorers]
            pending.append((chunk, scores))
    return [(chunk, [task.result() for task in scores]) for chunk, scores in pending]


async def score_all(scorers: Sequence[Scorer], chunk: Chunk) -> list[ColumnSet]:
    """Every scorer's columns of one chunk, computed side by side; errors as of ``side_by_side``."""
    return await side_by_side([_score(scorer, chunk) for scorer in scorers])


async def side_by_side(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. When one fails the others are cancelled; the error that came first comes out as it is."""
    with _first_error():
        async with asyncio.TaskGroup() as tasks:
            begun = [tasks.create_task(work) for work in works]
    return [task.result() for task in begun]


async def all_ended(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; the first failure is raised when all have ended. One alone is simply awaited."""
    if len(works) == 1:
        return [await works[0]]
    found = await asyncio.gather(*works, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return cast(list[T], found)


async def _score(scorer: Scorer, chunk: Chunk, begun: PrefetchedChunk | None = None) -> ColumnSet:
    task = begun.task(scorer) if begun is not None else None
    return await (scorer.score(chunk) if task is None else task)


async def _publish(stages: IterationStages, version: int) -> Mapping[str, float]:
    metrics = await stages.publish(version)
    stages.stream.published(version)
    return metrics


@contextmanager
def _first_error() -> Iterator[None]:
    """Raises, of a task group's errors, the one that came first as it is: the others are its consequences."""
    try:
        yield
    except BaseExceptionGroup as failures:
        first: BaseException = failures
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from first.__cause__  # without the group as its context
