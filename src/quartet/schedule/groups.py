"""Groups of trajectories that answer one prompt, the chunks that they travel in, and the weights that made them.

The batch of a group (``group_batch``) is made where its tokens are: in the process of a rollout worker.

How far generation may run ahead of training: the bound on the age of weights that a group was sampled with.

The group stream: a standing producer of groups under an admission rule.

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
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quartet.batch.ragged import RaggedBatch, Segments
from quartet.batch.trajectory import REWARD_PREFIX, Trajectory, TrajectorySequence
from quartet.observe.health import measure_repetition
from quartet.rollout.protocol import Completion, FinishReason
from quartet.schedule.clock import Condition, await_uncancelled

NO_VERSION = -1
"""In ``policy_version`` of tokens that no weights of this run have sampled: prompts, observations."""
_ENDED = (FinishReason.STOP.value, FinishReason.STOP_STRING.value)

GREEDY = "greedy"
"""Sequence field (bool), and the last part of the name, of trajectories that serve as a baseline only."""
TEXT_END = "text_end"
"""Sequence field: characters of the last action's text before its stop string, -1 where there is none."""
REPETITION = "repetition"
"""Object of each sequence: how far its actions repeat themselves (``quartet.observe.health.measure_repetition``)."""
STATE = "state"
"""Object of each sequence: what its last action answers, as text or messages; None for the data set's prompt."""


@dataclass(frozen=True)
class Chunk:
    """Groups that are scored together.

    Args:
        step: the iteration.
        index: place of the chunk in the step.
        data: the groups' batches, one after the other.
    """

    step: int
    index: int
    data: RaggedBatch


@dataclass(frozen=True)
class PromptGroup:
    """All trajectories of one prompt.

    Args:
        index: the group's place in the stream.
        prompt: the data set's item.
        batch: as of ``group_batch``, with the object ``prompt`` in place of ``state``: an item whose text is what the
            sequence's last action answers, and the columns of sources of reward that were needed before the group was
            accepted. Where rollout workers are elsewhere it is an outline without token ids.
    """

    index: int
    prompt: Any
    batch: RaggedBatch

    @classmethod
    def of(cls, index: int, prompt: Any, made: RaggedBatch) -> PromptGroup:
        """Makes the group of a batch that ``group_batch`` has made."""
        batch, states = made.pop(STATE)
        items = [prompt if state is None else replace(prompt, prompt=state) for state in states]
        return cls(index, prompt, batch.with_objects(prompt=items))

    def made(self) -> RaggedBatch:
        """Returns the batch that ``of`` makes this group of."""
        batch, items = self.batch.pop("prompt")
        return batch.with_objects(**{STATE: [None if item is self.prompt else item.prompt for item in items]})


def make_chunk(step: int, index: int, groups: Sequence[PromptGroup]) -> Chunk:
    return Chunk(step, index, RaggedBatch.concat([group.batch for group in groups]))


def group_members(batch: RaggedBatch) -> dict[int, list[int]]:
    """Returns the sequences of each group among several, by its index."""
    members: dict[int, list[int]] = {}
    for s, group in enumerate(batch.sequence["group"].tolist()):
        members.setdefault(group, []).append(s)
    return members


def split_by_group(batch: RaggedBatch) -> dict[int, RaggedBatch]:
    """Returns the batch of each group, by its index; of groups that were joined, as each was before."""
    return {group: batch.select(picked, keep_order=True) for group, picked in group_members(batch).items()}


def drop_texts(batch: RaggedBatch) -> RaggedBatch:
    """Returns scored batches without texts: of their objects those that are none, and the prompts' names as
    ``prompt_id``."""
    names = [item.prompt_id for item in batch.objects["prompt"]]
    kept = {name: batch.objects[name] for name in ("finish_reason", REPETITION)}
    return batch.without_objects().with_objects(prompt_id=names, **kept)


def staleness_metrics(batch: RaggedBatch, step: int) -> dict[str, float]:
    """Measures by how many versions the weights that are trained are newer than those that sampled, over action
    tokens."""
    staleness = step - batch.token["policy_version"][batch.token["action_mask"]]
    return {"staleness/mean": float(staleness.double().mean()), "staleness/max": float(staleness.max())}


# The batch of a group -----------------------------------------------------------------------------------


def single_turn_trajectory(prompt_ids: Sequence[int], completion: Completion, text: str) -> Trajectory:
    """Makes a trajectory of one turn; ``text`` of the completion."""
    sequence = TrajectorySequence(
        prompt_ids=tuple(prompt_ids),
        token_ids=completion.token_ids,
        action_mask=(True,) * len(completion.token_ids),
        logprobs=completion.logprobs,
        versions=completion.versions,
        finish_reason=completion.finish_reason.value,
        columns=completion.columns,
        completion=text,
        text_end=completion.text_end,
    )
    return Trajectory((sequence,))


def group_batch(index: int, trajectories: Sequence[Trajectory], greedy: Trajectory | None = None) -> RaggedBatch:
    """Makes a batch with one leaf per sequence of the group ``index``, behind the segments of its first state.

    Token fields ``action_mask``, ``loss_mask`` (bool), ``rollout_logprobs``, ``policy_version`` (of the weights that
    sampled the token, -1 where none have) and the sequences' own ``columns`` (0 elsewhere); sequence fields ``group``
    (place in the stream), ``response`` (the trajectory in its group), ``ended`` (the trajectory's last action ended by
    itself), ``version`` (the first token's, the oldest), ``text_end``; objects ``state``, ``completion`` (text of the
    last action), ``finish_reason`` and ``measure_repetition``.

    Trajectories of an environment have ``observation_mask`` (bool ``[T]``: tokens of a leaf that the policy only read),
    ``part`` (the sequence in its trajectory), ``num_turns`` and ``reward/<source>`` (on the last sequence, NaN on the
    others) as well. A greedy trajectory, the baseline of some methods, stands behind the others, and ``greedy`` (bool)
    tells them apart.
    """
    members = trajectories if greedy is None else (*trajectories, greedy)
    rows = [(r, part, one) for r, one in enumerate(members) for part in range(len(one.sequences))]
    sequences = [one.sequences[part] for _, part, one in rows]
    final = [part == len(one.sequences) - 1 for _, part, one in rows]
    # Of a trajectory's last sequence how it ended; of the others that the state was rewritten.
    reasons = [one.finish_reason if last else "rewritten" for (_, _, one), last in zip(rows, final, strict=True)]
    names = [f"{index}.{GREEDY if one is greedy else r}" + (f".{part}" if part else "") for r, part, one in rows]
    segments = Segments()
    ends = segments.add_prompts(s.prompt_ids for s in sequences)
    leaves = [segments.add(s.token_ids, ends[s.prompt_ids]) for s in sequences]
    batch = segments.batch(leaves, names)
    is_leaf = batch.sequence_index() >= 0

    def on_leaves(values: Iterable[Sequence[float]], elsewhere: float, dtype: torch.dtype) -> Tensor:
        column = torch.full((batch.num_tokens,), elsewhere, dtype=dtype)
        # Leaves are stored in the order of the rows.
        column[is_leaf] = torch.tensor([value for of_row in values for value in of_row], dtype=dtype)
        return column

    actions = on_leaves([s.action_mask for s in sequences], False, torch.bool)
    token = {
        "action_mask": actions,
        "loss_mask": actions,
        "rollout_logprobs": on_leaves([s.logprobs for s in sequences], 0.0, torch.float32),
        "policy_version": on_leaves([s.versions for s in sequences], NO_VERSION, torch.int64),
    }
    for name in sequences[0].columns:
        own = [s.columns[name] for s in sequences]
        whole = all(type(value) is int for column in own for value in column)
        token[name] = on_leaves(own, 0, torch.int64 if whole else torch.float32)
    sequence = {
        "group": torch.full((len(rows),), index),
        "response": torch.tensor([r for r, _, _ in rows]),
        "ended": torch.tensor([reason in _ENDED for reason in reasons]),
        "version": torch.tensor([s.versions[0] for s in sequences]),
        TEXT_END: torch.tensor([-1 if s.text_end is None else s.text_end for s in sequences]),
    }
    if greedy is not None:
        sequence[GREEDY] = torch.tensor([one is greedy for _, _, one in rows])
    if sources := members[0].scores:
        token["observation_mask"] = is_leaf & ~actions
        sequence["part"] = torch.tensor([part for _, part, _ in rows])
        sequence["num_turns"] = torch.tensor([s.num_turns for s in sequences])
        for name in sources:
            scores = [one.scores[name] if last else math.nan for (_, _, one), last in zip(rows, final, strict=True)]
            sequence[REWARD_PREFIX + name] = torch.tensor(scores)
    objects = {
        STATE: [s.state for s in sequences],
        "completion": [s.completion for s in sequences],
        "finish_reason": reasons,
        REPETITION: [_repetition(s) for s in sequences],
    }
    return replace(batch, token=token, sequence=sequence).with_objects(**objects)


def _repetition(sequence: TrajectorySequence) -> tuple[float, int]:
    acted = zip(sequence.token_ids, sequence.action_mask, strict=True)
    return measure_repetition([token for token, is_action in acted if is_action])


@dataclass(frozen=True)
class AdmissionRule:
    """How many groups may be in flight.

    `max_staleness` None is synchronous: only the groups of the step being consumed. Otherwise generation runs
    ahead, so far that no group is trained on with weights more than `max_staleness` versions newer than those
    it began with.
    """

    prompts_per_step: int
    max_staleness: int | None = None

    def num_admitted(self, *, open_steps: int, versions_published: int) -> int:
        """Returns how many groups may be accepted or in flight, counted since the run's first step."""
        steps = open_steps if self.max_staleness is None else self.max_staleness + versions_published + 1
        return steps * self.prompts_per_step


@dataclass(frozen=True)
class BufferedGroups:
    """What has been produced beyond the last whole step: accepted groups by index, and the indices rejected."""

    groups: Mapping[int, PromptGroup] = field(default_factory=dict)
    rejected: tuple[int, ...] = ()


@dataclass(eq=False)
class GroupStream:
    """Produces groups ahead of their consumption and hands them out step by step.

    `produce(i)` makes the group of index `i` (0, 1, 2, ... for ever; the caller maps it to a prompt);
    `accept` keeps or rejects it. `max_attempts` bounds the indices that one step may use up; `shortage` makes
    the error that is raised then, of step, groups wanted, groups accepted and attempts. One consumer, steps in order;
    use it as `async with GroupStream(...) as stream`, or call `close()`.
    """

    produce: Callable[[int], Awaitable[PromptGroup]]
    rule: AdmissionRule
    _: KW_ONLY
    chunk_size: int
    accept: Callable[[PromptGroup], bool] | None = None
    max_attempts: int | None = None
    shortage: Callable[[int, int, int, int], Exception] = RuntimeError

    def __post_init__(self) -> None:
        self._running: dict[int, asyncio.Task[PromptGroup | None]] = {}
        self._decided: dict[
            int, PromptGroup | None
        ] = {}  # produced, but not yet passed by the cursor; None where rejected
        self._passed: dict[int, PromptGroup | None] = {}  # passed by it since the last whole step
        self._cursor = 0  # every index below it is consumed or rejected
        self._next_launch = 0
        self._consumed = 0
        self._num_waiting = 0  # accepted and not yet passed by the cursor
        self._open_steps = 0
        self._versions_published = 0
        self._boundary = self._snapshot()  # where the last whole step ended
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = Condition()  # for the consumer, and for what looks ahead

    @property
    def num_running(self) -> int:
        """Groups being produced now."""
        return len(self._running)

    @property
    def num_accepted(self) -> int:
        """Groups accepted since the start of the run, those not consumed yet included."""
        return self._consumed + self._num_waiting

    async def chunks(self, step: int) -> AsyncIterator[list[PromptGroup]]:
        """Yields the next `prompts_per_step` accepted groups in index order, each chunk as soon as it is complete.

        The last chunk is smaller where `chunk_size` does not divide the step. `step` counts from 0 and only
        ever by one. Raises `UserError` when the filter leaves a step
        short, and once whatever `produce` or `accept` raised, after everything in flight has been stopped.
        """
        self._begin(step)
        first_index, size = self._cursor, self.rule.prompts_per_step
        chunk: list[PromptGroup] = []
        for taken in range(1, size + 1):
            chunk.append(await self._take(step, first_index, taken))
            if taken == size:  # before the last yield: a consumer need not come back after it
                self._boundary = self._snapshot()
                self._passed.clear()
            if len(chunk) == self.chunk_size or taken == size:
                full, chunk = chunk, []
                yield full

    def buffered_chunks(self) -> Iterator[tuple[int, int, list[PromptGroup]]]:
        """Yields chunks of steps that have not begun whose groups are all there: (step, place in the step, groups), in
        order.

        They are what `chunks` will give.
        """
        size, place = self.rule.prompts_per_step, self._consumed
        chunk: list[PromptGroup] = []
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
        """Waits until another group was produced."""
        await self._changed.wait()

    def published(self, version: int) -> None:
        """Says that the weights of `version` are out (0 are the first ones): admits more groups."""
        self._versions_published = version
        if self._open_steps:
            self._launch()

    def state(self) -> dict[str, int]:
        """Returns the cursor at the end of the last step consumed whole, as plain numbers.

        Groups waiting beyond it are `buffered()`; what is in flight then, a restored stream produces again.
        """
        return {**self._boundary, "versions_published": self._versions_published}

    def buffered(self) -> BufferedGroups:
        """Returns what is complete beyond `state()`."""
        decided = sorted({**self._passed, **self._decided}.items())
        groups = {index: group for index, group in decided if group is not None}
        return BufferedGroups(groups, tuple(index for index, _ in decided if index not in groups))

    def restore(self, state: Mapping[str, int], buffered: BufferedGroups | None = None) -> None:
        """Continues from `state()`; only before the first step of this stream.

        Args:
            buffered: groups that need not be produced again.
        """
        self._cursor = self._next_launch = state["next_index"]
        self._consumed = state["accepted"]
        self._open_steps = state["steps"]
        self._versions_published = state["versions_published"]
        self._boundary = self._snapshot()
        if buffered is not None:
            self._decided = {**buffered.groups, **dict.fromkeys(buffered.rejected)}
            self._num_waiting = len(buffered.groups)

    async def close(self) -> None:
        """Cancels what is in flight and waits until it has really stopped. May be called again."""
        self._closed = True
        for task in self._running.values():
            task.cancel()
        try:
            if self._running:  # a worker may still be at it: leave only when none is
                await await_uncancelled(asyncio.wait([*self._running.values()]))
        finally:
            self._changed.notify_all()

    async def __aenter__(self) -> GroupStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _begin(self, step: int) -> None:
        if self._closed and self._failure is None:
            raise RuntimeError("the stream is closed")
        self._open_steps = step + 1
        if self._failure is None:
            self._launch()

    async def _take(self, step: int, first_index: int, wanted: int) -> PromptGroup:
        """Returns the next accepted group in index order; `wanted` is its number within the step, from 1."""
        while True:
            if self._failure is not None:  # it comes out once; the stream stays closed after it
                await self.close()
                failure, self._failure = self._failure, None
                raise failure
            attempts = self._cursor - first_index
            if self.max_attempts is not None and attempts >= self.max_attempts:
                await self.close()
                raise self.shortage(step, self.rule.prompts_per_step, wanted - 1, attempts)
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
            await self._changed.wait()

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
        """Tells whether the rule and ``max_attempts`` let one more group start; counts are since the run's first
        step."""
        admitted = self.rule.num_admitted(open_steps=self._open_steps, versions_published=self._versions_published)
        if self.num_accepted + len(self._running) >= admitted:
            return False
        if self.max_attempts is None:
            return True
        # Without this a filter that rejects everything would keep an idle consumer's producer busy for ever.
        steps_ahead = 1 + (self.rule.max_staleness or 0)
        return self._next_launch < self._boundary["next_index"] + steps_ahead * self.max_attempts

    async def _attempt(self, index: int) -> PromptGroup | None:
        group = await self.produce(index)
        return group if self.accept is None or self.accept(group) else None

    def _settle(self, index: int, task: asyncio.Task[PromptGroup | None]) -> None:
        """Books the group of a producer that has ended, or stops the stream."""
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
        self._changed.notify_all()

    def _snapshot(self) -> dict[str, int]:
        return {
            "next_index": self._cursor,
            "steps": self._open_steps,
            "accepted": self._consumed,
            "rejected": self._cursor - self._consumed,
        }
