"""One RL iteration, written once: only data dependencies, no word about where a role lives.

::

    group stream ──► chunk ──► every scorer ──► assemble ──► every learner ──► publish version + 1
                     (scored as soon as it is complete,      (side by side; the actor's weights are
                     while later groups are generated)        published while others still learn)

The same function runs real roles under leases and simulated ones on a virtual clock, because it touches data only
through chunks and named steps.

Under placements that do not overlap them scoring begins when the step's generation has ended.

Scoring ahead: where generation runs ahead, chunks of coming steps are scored while the learners of this one work.

::

    step k      generate ── score k ──► assemble ──► train k ─────────► publish k + 1
    step k + 1  generate ─────────────────────────── score (frozen) ──────────────────► score (trained) ──► …

Rewards and reference log-probabilities do not depend on weights that are trained, so a chunk can have them as soon as
its groups are there. Old log-probabilities and values need the weights of the chunk's own step and wait for it. The
learners ask for their leases first: what is scored ahead takes what they leave.

Scorers: the columns that the models of a run give for a chunk, or for parts of it.

Learners: all updates of one step on the step's experience, in one lease.

A drafter that learns along has a learner of their own, which follows the actor's while the critic may still train.

Mini-batches are unions of whole groups. The first epoch takes the groups in prompt order, later ones in an order drawn
from (seed, step, epoch).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch

from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.config import UserError
from quartet.config.placement import HEADS, ResolvedPlacement
from quartet.schedule.groups import Chunk, GroupStream, PromptGroup, group_members, make_chunk
from quartet.schedule.leases import LeaseContext
from quartet.schedule.model_worker import ModelWorker, TrainWorker, UpdateSpec
from quartet.schedule.role_group import RoleGroup
from quartet.schedule.rollout import RolloutDriver
from quartet.train.engine import Objective
from quartet.train.forward import ForwardNeeds


@dataclass(eq=False)
class ScorePrefetcher:
    """Begins the scoring of coming steps' chunks, and hands it over when their step has come.

    What fails is raised in the step that it was for. Nothing of it is saved: a resumed run scores its chunks anew.

    Args:
        scorers: those of the iteration whose columns depend on no weights that are trained.
        num_steps: of the run, behind which nothing is scored, however far generation goes.
    """

    stream: GroupStream
    collect: Collect
    scorers: Sequence[Scorer]
    num_steps: int | None = None

    def __post_init__(self) -> None:
        self._begun: dict[tuple[int, int], tuple[Chunk, Begun]] = {}
        self._next = (0, 0)  # no chunk before it is begun any more
        self._watch: asyncio.Task[None] | None = None

    def resume(self) -> None:
        """Scores chunks from now on as soon as they are complete, as the learners of a step are at work."""
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._look(), name="scoring ahead")

    async def pause(self) -> None:
        """Begins no other chunk from now on, as a step begins, whose own scoring comes first.

        Raises:
            whatever collecting a chunk raised.
        """
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.wait({watch})
            if not watch.cancelled():
                watch.result()

    def take(self, step: int, index: int) -> tuple[Chunk, Begun] | None:
        """Returns the chunk, and what scores it already."""
        return self._begun.pop((step, index), None)

    async def close(self) -> None:
        """Stops all of it and waits until it has stopped; what failed unasked is forgotten."""
        tasks: list[asyncio.Task[Any]] = [task for _, begun in self._begun.values() for task in begun.values()]
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

    def _begin(self, step: int, index: int, groups: list[PromptGroup]) -> None:
        self._next = (step, index + 1)
        chunk = self.collect(step, index, groups)
        loop = asyncio.get_running_loop()
        self._begun[step, index] = chunk, {id(one): loop.create_task(one.score(chunk)) for one in self.scorers}


T = TypeVar("T")
Collect = Callable[[int, int, Sequence[PromptGroup]], Chunk]
"""``(step, index, groups) → chunk``."""


Begun = Mapping[int, asyncio.Task[ColumnSet]]
"""Columns that are being computed, by the ids of their scorers."""


class Scorer(Protocol):
    async def score(self, chunk: Chunk) -> ColumnSet:
        """Computes the columns of one chunk with the weights of version ``chunk.step``."""


class StepLearner(Protocol):
    async def train(self, experience: Any, step: int) -> Mapping[str, float]:
        """Makes all updates of one step; advances the role's weights by one version. Returns metrics."""


@dataclass(frozen=True)
class IterationStages:
    """What an iteration calls. ``collect`` makes a chunk; ``assemble`` computes advantages on the whole step;
    ``publish(version)`` waits for the actor's weights of that version and hands them to the rollout engine, be other
    roles still learning. ``scores_early``: each chunk as soon as it is complete, else once the step's last one is.
    ``prefetch`` has begun to score some of the chunks already."""

    stream: GroupStream
    collect: Collect
    scorers: Sequence[Scorer]
    assemble: Callable[[Sequence[tuple[Chunk, Sequence[ColumnSet]]]], Awaitable[Any]]
    learners: Sequence[StepLearner]
    publish: Callable[[int], Awaitable[Mapping[str, float]]]
    prefetch: ScorePrefetcher | None = None
    scores_early: bool = True

    @classmethod
    def wired(
        cls,
        rollout: RolloutDriver,
        stream: GroupStream,
        scorers: Sequence[tuple[Scorer, bool]],
        assemble: Callable[[Sequence[tuple[Chunk, Sequence[ColumnSet]]]], Awaitable[Any]],
        learners: Sequence[StepLearner],
        *,
        placement: ResolvedPlacement,
        on_chunk: Callable[[int, Sequence[PromptGroup]], object],
        num_steps: int | None = None,
    ) -> IterationStages:
        """Makes the stages of a run, be its roles real or simulated, under its placement.

        Args:
            scorers: each with whether its columns depend on no weights that are trained.
            on_chunk: called with the step and the groups of a chunk that is complete.
            num_steps: as for ``ScorePrefetcher``.
        """

        def collect(step: int, index: int, groups: Sequence[PromptGroup]) -> Chunk:
            on_chunk(step, groups)
            return make_chunk(step, index, groups)

        frozen = [scorer for scorer, is_frozen in scorers if is_frozen]
        return cls(
            stream,
            collect,
            [scorer for scorer, _ in scorers],
            assemble,
            learners,
            rollout.publish,
            ScorePrefetcher(stream, collect, frozen, num_steps) if placement.max_staleness is not None else None,
            placement.scores_early,
        )


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
    chunks: list[Chunk] = []
    scores: list[list[asyncio.Task[ColumnSet]]] = []
    async with asyncio.TaskGroup() as tasks:

        def score(chunk: Chunk, begun: Begun) -> None:
            scores.append([tasks.create_task(_score(scorer, chunk, begun)) for scorer in stages.scorers])

        async for groups in stages.stream.chunks(step):
            ahead = stages.prefetch.take(step, len(chunks)) if stages.prefetch is not None else None
            chunk, begun = ahead or (stages.collect(step, len(chunks), groups), {})
            chunks.append(chunk)
            if stages.scores_early:
                score(chunk, begun)
        for chunk in chunks[len(scores) :]:
            score(chunk, {})
    return [(chunk, [task.result() for task in of_chunk]) for chunk, of_chunk in zip(chunks, scores, strict=True)]


async def score_chunk(scorers: Sequence[Scorer], chunk: Chunk) -> list[ColumnSet]:
    """Returns every scorer's columns of one chunk, computed side by side; errors as of ``run_concurrently``."""
    return await run_concurrently([scorer.score(chunk) for scorer in scorers])


async def run_concurrently(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs ``works`` side by side and returns their results in order. When one fails the others are cancelled; the
    error that came first comes out as it is."""
    with _first_error():
        async with asyncio.TaskGroup() as tasks:
            begun = [tasks.create_task(work) for work in works]
    return [task.result() for task in begun]


async def _score(scorer: Scorer, chunk: Chunk, begun: Begun) -> ColumnSet:
    return await (begun.get(id(scorer)) or scorer.score(chunk))


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


@dataclass(frozen=True)
class ModelScorer:
    """One pass of a model over a chunk: ``values``, ``old_logprobs``, ``ref_logprobs``, a reward model's scores.

    Args:
        column: what the pass's one field is called from then on.
        beside: names of other token columns by the pass's own name for them.
        further: token columns of passes after it, of one field each, by name.
        trains: the role's weights change: the columns are those of its weights as the step began.
        reads_text: the worker reads prompts and completions as text, so they are sent along.
        reads: other states whose tensors the pass reads, so that they are not trained meanwhile.
    """

    leases: LeaseContext
    role: str
    model: RoleGroup[ModelWorker]
    needs: ForwardNeeds
    column: str
    beside: Mapping[str, str] = field(default_factory=dict)
    further: Mapping[str, ForwardNeeds] = field(default_factory=dict)
    trains: bool = False
    reads_text: bool = False
    reads: Mapping[str, int | None] = field(default_factory=dict)

    async def score(self, chunk: Chunk) -> ColumnSet:
        batch = chunk.data
        reads = {**self.reads, self.role: chunk.step} if self.trains else self.reads
        turn = self.leases.turn(
            self.role,
            "forward",
            self.column,
            step=chunk.step,
            chunk=chunk.index,
            tokens=batch.num_tokens,
            reads=reads,
        )
        read = _with_texts(batch) if self.reads_text else batch.without_objects()
        async with turn:
            found = await self.model.call(ModelWorker.forward, read, self.needs)
            others = [await self.model.call(ModelWorker.forward, read, needs) for needs in self.further.values()]
        columns = self._named(found)
        for name, other in zip(self.further, others, strict=True):
            (values,) = other.token.values()
            columns = replace(columns, token={**columns.token, name: values})
        if not self.trains:
            self._check_finite(columns)
        return columns

    def _named(self, found: ColumnSet) -> ColumnSet:
        """Puts the one field of a pass, and those beside it, under the names that the step knows them by."""
        token = dict(found.token)
        beside = {column: token.pop(name) for name, column in self.beside.items()}
        (values,) = [*token.values(), *found.sequence.values()]
        own = {self.column: values}
        return ColumnSet(found.ids, {**own, **beside} if token else beside, {} if token else own)

    def _check_finite(self, columns: ColumnSet) -> None:
        """Refuses values that are not finite: a NaN among scores would pass for "does not apply"."""
        values = torch.cat([*columns.token.values(), *columns.sequence.values()])
        wrong = int((~torch.isfinite(values)).sum())
        if wrong:
            raise UserError(
                f"the model of role {self.role!r} computes values that are not finite",
                found=f"{wrong} of {len(values)} {self.column}",
                remedy="check that model's weights; the run stopped before the update and can be resumed",
            )


def _with_texts(batch: RaggedBatch) -> RaggedBatch:
    """Returns the batch with objects ``prompt`` and ``completion``, both as text; other columns of a data row do not
    travel."""
    prompts = [item.prompt for item in batch.objects["prompt"]]
    return batch.without_objects().with_objects(prompt=prompts, completion=batch.objects["completion"])


@dataclass(frozen=True)
class SubsetScorer:
    """A scorer that is given some sequences of a chunk at a time.

    Args:
        parts: places of the sequences that are scored together, for each call. The others, and the tokens that all
            sequences share, have no scores: NaN in sequence columns, 0 in token columns.
    """

    inner: Scorer
    parts: Callable[[RaggedBatch], Sequence[Sequence[int]]]

    async def score(self, chunk: Chunk) -> ColumnSet:
        batch, parts = chunk.data, self.parts(chunk.data)
        read = [batch.select(part) for part in parts]
        scored = await run_concurrently([self.inner.score(replace(chunk, data=part)) for part in read])
        token: dict[str, torch.Tensor] = {}
        sequence: dict[str, torch.Tensor] = {}
        for places, part, found in zip(parts, read, scored, strict=True):
            for name, values in found.token.items():
                column = token.setdefault(name, values.new_zeros(batch.num_tokens))
                for k, s in enumerate(places):
                    column[slice(*batch.leaf_span(s))] = values[slice(*part.leaf_span(k))]
            for name, values in found.sequence.items():
                column = sequence.setdefault(name, values.new_full((len(batch),), math.nan))
                column[list(places)] = values
        return ColumnSet(batch.ids, token, sequence)


_MAXIMA = {"policy/ratio_max", "agreement/logprob_diff_max"}


@dataclass(frozen=True)
class UpdatePlan:
    """How a step's experience is gone through."""

    minibatches: int
    epochs: int
    seed: int

    def first_update(self, step: int) -> int:
        """Returns the number of the step's first update: a step has ``minibatches × epochs``, whether or not each has a
        token to train."""
        return step * self.minibatches * self.epochs

    def selections(self, experience: RaggedBatch, step: int) -> list[tuple[int, ...]]:
        """Returns the sequences of each mini-batch, in the order of the updates; those without a trained token are left
        out."""
        groups = list(group_members(experience).values())
        size = -(-len(groups) // self.minibatches)
        found: list[tuple[int, ...]] = []
        for epoch in range(self.epochs):
            order = list(range(len(groups)))
            if epoch:
                generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) * 1_009 + epoch)
                order = torch.randperm(len(groups), generator=generator).tolist()
            for start in range(0, len(order), size):
                found.append(tuple(s for g in order[start : start + size] for s in groups[g]))
        trained = set(experience.sequence_index()[experience.token["loss_mask"]].tolist())
        return [picked for picked in found if trained.intersection(picked)]


def _whole(experience: RaggedBatch) -> RaggedBatch:
    return experience


@dataclass(frozen=True)
class ModelLearner:
    """Trains one role.

    Args:
        objective: ``is_first → Objective``, of a mini-batch that is the first of its step, or is not.
        prefix: names this role's gradient norm, ``<prefix>/grad_norm``.
        warmup_steps: critic warm-up: first steps in which this role is not updated; its version advances all the same.
        learned: the batch to learn from, of the step's experience.
    """

    leases: LeaseContext
    role: str
    model: RoleGroup[TrainWorker]
    plan: UpdatePlan
    objective: Callable[[bool], Objective]
    prefix: str
    warmup_steps: int = 0
    learned: Callable[[Any], RaggedBatch] = _whole

    async def train(self, experience: Any, step: int) -> Mapping[str, float]:
        batch = self.learned(experience)
        rests = step < self.warmup_steps
        updates = [] if rests else self._updates(batch, step)
        tokens = 0 if rests else batch.num_tokens * self.plan.epochs
        read = batch.without_objects()
        turn = self.leases.turn(self.role, "train", f"train_{self.role}", step=step, tokens=tokens, writes=self.role)
        async with turn:
            rows = [] if rests else await self.model.call(TrainWorker.update, read, updates)
        return self._merge(rows)

    def _updates(self, experience: RaggedBatch, step: int) -> list[UpdateSpec]:
        first = self.plan.first_update(step)
        picks = enumerate(self.plan.selections(experience, step))
        return [UpdateSpec(picked, self.objective(i == 0), first + i) for i, picked in picks]

    def _merge(self, rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Merges metrics: means over the updates, maxima where the metric is one; the learning rate is the last
        update's."""
        merged: dict[str, float] = {}
        for name in sorted({name for row in rows for name in row}):
            values = [row[name] for row in rows if name in row]
            merged[name] = max(values) if name in _MAXIMA else sum(values) / len(values)
        grad_norm, lr = merged.pop("grad_norm", None), merged.pop("lr", None)
        merged.pop("skipped", None)
        if grad_norm is not None:
            merged[f"{self.prefix}/grad_norm"] = grad_norm
        if lr is not None and self.prefix == "policy":
            merged["optim/lr"] = rows[-1]["lr"]
        return merged


@dataclass(frozen=True)
class DrafterLearner:
    """Trains the drafter's model that learns along with the actor, from what updates of the step left behind.

    It works in the actor's processes, beside its LM head, and therefore under its leases, in mode ``forward``.
    """

    leases: LeaseContext
    model: RoleGroup[TrainWorker]

    async def train(self, experience: Any, step: int) -> Mapping[str, float]:
        await self.leases.arbiter.until("actor", step + 1)
        # Whatever version is current: to name it would use up what is reserved for the canary.
        turn = self.leases.turn(
            "actor", "forward", "train_heads", step=step, reads={"actor": None}, writes=HEADS, works_for=HEADS
        )
        async with turn:
            return await self.model.call(TrainWorker.train_drafter)
