"""Groups of trajectories that answer one prompt, the chunks that they travel in, and the weights that made them.

The batch of a group (``group_batch``) is made where its tokens are: in the process of a rollout worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from quartet.batch.ragged import RaggedBatch, Segments
from quartet.batch.trajectory import REWARD_PREFIX, Trajectory, TrajectorySequence
from quartet.config import UserError
from quartet.observe.health import repetition, script_counts
from quartet.rollout.protocol import Completion, FinishReason
from quartet.schedule.journal import Consumed

NO_VERSION = -1
"""In ``policy_version`` of tokens that no weights of this run have sampled: prompts, observations."""
_ENDED = (FinishReason.STOP.value, FinishReason.STOP_STRING.value)

GREEDY = "greedy"
"""Sequence field (bool), and the last part of the name, of trajectories that serve as a baseline only."""
TEXT_END = "text_end"
"""Sequence field: characters of the last action's text before its stop string, -1 where there is none."""
DIAGNOSED = "diagnosed"
"""Object of each sequence: the ``repetition`` of its actions, and the ``scripts`` of its last one's text, as counts."""
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
class Group:
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
    def of(cls, index: int, prompt: Any, made: RaggedBatch) -> Group:
        """The group of a batch that ``group_batch`` has made."""
        batch, states = made.pop(STATE)
        items = [prompt if state is None else replace(prompt, prompt=state) for state in states]
        return cls(index, prompt, batch.with_objects(prompt=items))

    def made(self) -> RaggedBatch:
        """The batch that ``of`` makes this group of."""
        batch, items = self.batch.pop("prompt")
        return batch.with_objects(**{STATE: [None if item is self.prompt else item.prompt for item in items]})

    @property
    def first_version(self) -> int:
        """Of the oldest weights that a token was sampled with."""
        return int(self.batch.sequence["version"].min())

    def consumed(self) -> Consumed:
        """As the journal of an asynchronous run has it; parts are the policy's tokens, trajectory after trajectory."""
        batch = self.batch
        if GREEDY in batch.sequence:
            batch = batch.select((~batch.sequence[GREEDY]).nonzero().squeeze(1).tolist())
        versions = batch.token["policy_version"].tolist()
        sampled = [version for version in versions if version != NO_VERSION]
        return self.index, tuple((version, len(list(run))) for version, run in groupby(sampled))


def chunk_of(step: int, index: int, groups: Sequence[Group]) -> Chunk:
    return Chunk(step, index, RaggedBatch.concat([group.batch for group in groups]))


def group_members(batch: RaggedBatch) -> dict[int, list[int]]:
    """Sequences of each group among several, by its index."""
    members: dict[int, list[int]] = {}
    for s, group in enumerate(batch.sequence["group"].tolist()):
        members.setdefault(group, []).append(s)
    return members


def by_group(batch: RaggedBatch) -> dict[int, RaggedBatch]:
    """The batch of each group, by its index; of groups that were joined, as each was before."""
    return {group: batch.select(picked, keep_order=True) for group, picked in group_members(batch).items()}


def without_texts(batch: RaggedBatch) -> RaggedBatch:
    """Scored batches without texts: of their objects those that are none, and the prompts' names as ``prompt_id``."""
    names = [item.prompt_id for item in batch.objects["prompt"]]
    kept = {name: batch.objects[name] for name in ("finish_reason", DIAGNOSED)}
    return batch.without_objects().with_objects(prompt_id=names, **kept)


def staleness_metrics(batch: RaggedBatch, step: int) -> dict[str, float]:
    """By how many versions the weights that are trained are newer than those that sampled, over action tokens."""
    staleness = step - batch.token["policy_version"][batch.token["action_mask"]]
    return {"staleness/mean": float(staleness.double().mean()), "staleness/max": float(staleness.max())}


# The batch of a group -----------------------------------------------------------------------------------


def answered(prompt_ids: Sequence[int], completion: Completion, text: str) -> Trajectory:
    """A trajectory of one turn; ``text`` of the completion."""
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
    """One leaf per sequence of the group ``index``, behind the segments of its first state.

    Token fields ``action_mask``, ``loss_mask`` (bool), ``rollout_logprobs``, ``policy_version`` (of the weights that
    sampled the token, -1 where none have) and the sequences' own ``columns`` (0 elsewhere); sequence fields ``group``
    (place in the stream), ``response`` (the trajectory in its group), ``ended`` (the trajectory's last action ended by
    itself), ``version`` (the first token's, the oldest), ``text_end``; objects ``state``, ``completion`` (text of the
    last action), ``finish_reason`` and ``diagnosed``.

    Trajectories of an environment have ``observation_mask`` (bool ``[T]``: tokens of a leaf that the policy only read),
    ``part`` (the sequence in its trajectory), ``num_turns`` and ``reward/<source>`` (on the last sequence, NaN on the
    others) as well. A greedy trajectory, the baseline of some methods, stands behind the others, and ``greedy`` (bool)
    tells them apart.
    """
    members = trajectories if greedy is None else (*trajectories, greedy)
    rows = [
        _Row(response, part, trajectory, trajectory is greedy)
        for response, trajectory in enumerate(members)
        for part in range(len(trajectory.sequences))
    ]
    sequences = [row.sequence for row in rows]
    segments = Segments()
    ends = segments.add_prompts(s.prompt_ids for s in sequences)
    leaves = [segments.add(s.token_ids, ends[s.prompt_ids]) for s in sequences]
    batch = segments.batch(leaves, [f"{index}.{row.name}" for row in rows])
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
    for name in _column_names(sequences, token):
        own = [s.columns[name] for s in sequences]
        whole = all(type(value) is int for column in own for value in column)
        token[name] = on_leaves(own, 0, torch.int64 if whole else torch.float32)
    sequence = {
        "group": torch.full((len(rows),), index),
        "response": torch.tensor([row.response for row in rows]),
        "ended": torch.tensor([row.finish_reason in _ENDED for row in rows]),
        "version": torch.tensor([s.versions[0] for s in sequences]),
        TEXT_END: torch.tensor([-1 if s.text_end is None else s.text_end for s in sequences]),
    }
    if greedy is not None:
        sequence[GREEDY] = torch.tensor([row.is_greedy for row in rows])
    if sources := rows[0].trajectory.scores:
        token["observation_mask"] = is_leaf & ~actions
        sequence["part"] = torch.tensor([row.part for row in rows])
        sequence["num_turns"] = torch.tensor([s.num_turns for s in sequences])
        for name in sources:
            scores = [row.trajectory.scores[name] if row.is_final else math.nan for row in rows]
            sequence[REWARD_PREFIX + name] = torch.tensor(scores)
    objects = {
        STATE: [s.state for s in sequences],
        "completion": [s.completion for s in sequences],
        "finish_reason": [row.finish_reason for row in rows],
        DIAGNOSED: [_diagnosed(s) for s in sequences],
    }
    return replace(batch, token=token, sequence=sequence).with_objects(**objects)


def _diagnosed(sequence: TrajectorySequence) -> dict[str, Any]:
    acted = [token for token, is_action in zip(sequence.token_ids, sequence.action_mask, strict=True) if is_action]
    return {"repetition": repetition(acted), "scripts": script_counts(sequence.completion)}


@dataclass(frozen=True)
class _Row:
    """One sequence of a group and where it belongs."""

    response: int
    part: int
    trajectory: Trajectory
    is_greedy: bool

    @property
    def sequence(self) -> TrajectorySequence:
        return self.trajectory.sequences[self.part]

    @property
    def is_final(self) -> bool:
        return self.part == len(self.trajectory.sequences) - 1

    @property
    def name(self) -> str:
        place = GREEDY if self.is_greedy else str(self.response)
        return place + (f".{self.part}" if self.part else "")

    @property
    def finish_reason(self) -> str:
        """Of a trajectory's last sequence how it ended; of the others that the state was rewritten."""
        return self.trajectory.finish_reason if self.is_final else "rewritten"


def _column_names(sequences: Sequence[TrajectorySequence], taken: Iterable[str]) -> tuple[str, ...]:
    """Of the sequences' own columns."""
    names = sequences[0].columns.keys()
    other = next((s.columns.keys() for s in sequences if s.columns.keys() != names), names)
    if other != names or names & set(taken):
        raise UserError(
            "completions need the same columns, under names of their own",
            found=f"{sorted(names)} and {sorted(other)}; taken: {sorted(names & set(taken))}",
            remedy="give every completion of a run columns of the same names, other than those of the batch",
        )
    return tuple(names)
