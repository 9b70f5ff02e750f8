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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from quartet.schedule.ahead import Begun, ScoringAhead

Group = TypeVar("Group")
Data = TypeVar("Data")
Columns = TypeVar("Columns")
Experience = TypeVar("Experience")

Columns_co = TypeVar("Columns_co", covariant=True)
Experience_contra = TypeVar("Experience_contra", contravariant=True)


@dataclass(frozen=True)
class Chunk(Generic[Data]):
    """Groups that are scored together: a manifest, and the data or a reference to it.

    Args:
        step: the iteration.
        index: place of the chunk in the step.
        num_tokens: stored tokens, for spans and balancing.
    """

    step: int
    index: int
    num_tokens: int
    data: Data


Collect = Callable[[int, int, Sequence[Group]], Chunk[Data]]
"""``(step, index, groups) → chunk``."""


class ChunkSource(Protocol[Group]):
    def chunks(self, step: int) -> AsyncIterator[list[Group]]: ...

    def published(self, version: int) -> None: ...


class Scorer(Protocol[Data, Columns_co]):
    async def score(self, chunk: Chunk[Data]) -> Columns_co:
        """Columns of one chunk, computed with the weights of version ``chunk.step``."""


class Learner(Protocol[Experience_contra]):
    async def train(self, experience: Experience_contra, step: int) -> Mapping[str, float]:
        """All updates of one step; advances the role's weights by one version. Returns metrics."""


@dataclass(frozen=True)
class Roles(Generic[Group, Data, Columns, Experience]):
    """What an iteration calls. ``collect`` makes a chunk; ``assemble`` computes advantages on the whole step;
    ``publish(version)`` waits for the actor's weights of that version and hands them to the rollout engine, be other
    roles still learning. ``ahead`` has begun to score some of the chunks already."""

    stream: ChunkSource[Group]
    collect: Collect[Group, Data]
    scorers: Sequence[Scorer[Data, Columns]]
    assemble: Callable[[Sequence[tuple[Chunk[Data], Sequence[Columns]]]], Awaitable[Experience]]
    learners: Sequence[Learner[Experience]]
    publish: Callable[[int], Awaitable[Mapping[str, float]]]
    ahead: ScoringAhead[Group, Data, Columns] | None = None


@dataclass(frozen=True)
class StepResult(Generic[Experience]):
    experience: Experience
    metrics: Mapping[str, float]


async def run_iteration(step: int, roles: Roles[Group, Data, Columns, Experience]) -> StepResult[Experience]:
    """Generates, scores, learns, publishes. A failing part cancels the others and its error comes out as it is."""
    try:
        if roles.ahead is not None:
            await roles.ahead.pause()
        experience = await roles.assemble(await _scored_chunks(step, roles))  # no texts live on beside it
        async with asyncio.TaskGroup() as tasks:
            updates = [tasks.create_task(learner.train(experience, step)) for learner in roles.learners]
            updates.append(tasks.create_task(_publish(roles, step + 1)))
            if roles.ahead is not None:
                roles.ahead.resume()
        metrics = {name: value for task in updates for name, value in task.result().items()}
    except BaseExceptionGroup as failures:
        raise _first(failures) from None
    return StepResult(experience, metrics)


async def _scored_chunks(step: int, roles: Roles[Group, Data, Columns, Any]) -> list[tuple[Chunk[Data], list[Columns]]]:
    async with asyncio.TaskGroup() as tasks:
        pending: list[tuple[Chunk[Data], list[asyncio.Task[Columns]]]] = []
        async for groups in roles.stream.chunks(step):
            begun = roles.ahead.take(step, len(pending)) if roles.ahead is not None else None
            chunk = begun.chunk if begun is not None else roles.collect(step, len(pending), groups)
            scores = [tasks.create_task(_score(scorer, chunk, begun)) for scorer in roles.scorers]
            pending.append((chunk, scores))
    return [(chunk, [task.result() for task in scores]) for chunk, scores in pending]


async def score_all(scorers: Sequence[Scorer[Data, Columns]], chunk: Chunk[Data]) -> list[Columns]:
    """Every scorer's columns of one chunk, computed side by side; the error that came first comes out as it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            scores = [tasks.create_task(_score(scorer, chunk)) for scorer in scorers]
    except BaseExceptionGroup as failures:
        raise _first(failures) from None
    return [task.result() for task in scores]


async def _score(
    scorer: Scorer[Data, Columns], chunk: Chunk[Data], begun: Begun[Data, Columns] | None = None
) -> Columns:
    task = begun.task(scorer) if begun is not None else None
    return await (scorer.score(chunk) if task is None else task)


async def _publish(roles: Roles[Any, Any, Any, Any], version: int) -> Mapping[str, float]:
    metrics = await roles.publish(version)
    roles.stream.published(version)
    return metrics


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that came first; the others are its consequences (cancellations are left out already)."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
