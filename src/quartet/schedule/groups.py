"""Groups of trajectories that answer one prompt, the chunks that they travel in, and the weights that made them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import torch

from quartet.batch.columns import ColumnSet, join
from quartet.batch.prefixes import Segments
from quartet.batch.ragged import RaggedBatch
from quartet.batch.trajectory import REWARD_PREFIX, Trajectory, TrajectoryEnd, TrajectorySequence
from quartet.config import UserError
from quartet.rollout.protocol import Completion, FinishReason
from quartet.schedule.iteration import Chunk
from quartet.schedule.journal import Consumed
from quartet.schedule.stream import Ahead

NO_VERSION = -1
"""In ``policy_version`` of tokens that no weights of this run have sampled: prompts, observations."""
_ENDED = (FinishReason.STOP.value, FinishReason.STOP_STRING.value)

GREEDY = "greedy"
"""Sequence field (bool), and the last part of the name, of trajectories that serve as a baseline only."""
Texts = Callable[[TrajectorySequence], str]
"""The text of a sequence's last action."""


@dataclass(frozen=True)
class Group:
    """All trajectories of one prompt. ``index`` is the group's place in the stream; ``prompt`` is the data set's item.

    ``greedy`` is the one that only serves as a baseline, where the method has one. ``rewards`` are the columns of the
    reward sources over the group's own batch, where they were needed before the group was accepted.
    """

    index: int
    prompt: Any
    trajectories: tuple[Trajectory, ...]
    greedy: Trajectory | None = None
    rewards: tuple[ColumnSet, ...] = ()

    @property
    def first_version(self) -> int:
        """Of the oldest weights that a token was sampled with."""
        return min(trajectory.first_version for trajectory in self.trajectories)

    def consumed(self) -> Consumed:
        """As the journal of an asynchronous run has it; parts are the policy's tokens, trajectory after trajectory."""
        sequences = [sequence for trajectory in self.trajectories for sequence in trajectory.sequences]
        sampled = [version for sequence in sequences for version in sequence.versions if version != NO_VERSION]
        return self.index, tuple((version, len(list(run))) for version, run in groupby(sampled))


def answered(prompt_ids: Sequence[int], completion: Completion, text: str | None = None) -> Trajectory:
    """A trajectory of one turn; ``text`` of the completion where it is known."""
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


# Chunks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """One sequence of a chunk and where it belongs."""

    group: Group
    response: int
    part: int
    trajectory: Trajectory

    @property
    def sequence(self) -> TrajectorySequence:
        return self.trajectory.sequences[self.part]

    @property
    def is_final(self) -> bool:
        return self.part == len(self.trajectory.sequences) - 1

    @property
    def is_greedy(self) -> bool:
        return self.trajectory is self.group.greedy

    @property
    def name(self) -> str:
        place = GREEDY if self.is_greedy else str(self.response)
        return f"{self.group.index}.{place}" + (f".{self.part}" if self.part else "")

    @property
    def prompt(self) -> Any:
        state = self.sequence.state
        return self.group.prompt if state is None else replace(self.group.prompt, prompt=state)

    @property
    def finish_reason(self) -> str:
        """Of a trajectory's last sequence how it ended; of the others that the state was rewritten."""
        return self.trajectory.finish_reason if self.is_final else "rewritten"


def chunk_of(step: int, index: int, groups: Sequence[Group], texts: Texts | None = None) -> Chunk[RaggedBatch]:
    """A chunk's ragged batch: one leaf per sequence, behind the segments of its first state.

    Token fields ``action_mask``, ``loss_mask`` (bool), ``rollout_logprobs``, ``policy_version`` (of the weights that
    sampled the token, -1 where none have) and the sequences' own ``columns`` (0 elsewhere); sequence fields ``group``
    (place in the stream), ``response`` (the trajectory in its group), ``ended`` (the trajectory's last action ended by
    itself), ``version`` (the first token's, the oldest); objects ``prompt`` (whose text is what the last action
    answers), ``completion`` (text of the last action) and ``finish_reason``.

    Trajectories of an environment have ``observation_mask`` (bool ``[T]``: tokens of a leaf that the policy only read),
    ``part`` (the sequence in its trajectory), ``num_turns`` and ``reward/<source>`` (on the last sequence, NaN on the
    others) as well. Where groups have a greedy trajectory it stands behind the others, and ``greedy`` (bool) tells them
    apart. Rewards that the groups carry are fields, too.

    Args:
        texts: decodes completions whose text is not known.
    """
    segments = Segments()
    rows: list[_Row] = []
    leaves: list[int] = []
    for group in groups:
        of_group = list(_rows(group))
        ends = segments.add_prompts(row.sequence.prompt_ids for row in of_group)
        leaves += [segments.add(row.sequence.token_ids, ends[row.sequence.prompt_ids]) for row in of_group]
        rows += of_group
    batch = RaggedBatch(
        input_ids=torch.tensor(segments.input_ids, dtype=torch.int64),
        segment_lengths=tuple(segments.lengths),
        parents=tuple(segments.parents),
        leaves=tuple(leaves),
        ids=tuple(row.name for row in rows),
    )
    batch = _with_columns(batch, rows).with_objects(
        prompt=[row.prompt for row in rows],
        completion=[_text(row.sequence, texts) for row in rows],
        finish_reason=[row.finish_reason for row in rows],
    )
    # Groups lie one after the other, so their columns do as well.
    batch = join(batch, *(ColumnSet.concat(columns) for columns in zip(*(g.rewards for g in groups), strict=True)))
    return Chunk(step, index, batch.num_tokens, batch)


def _rows(group: Group) -> Iterator[_Row]:
    members = group.trajectories if group.greedy is None else (*group.trajectories, group.greedy)
    for response, trajectory in enumerate(members):
        for part in range(len(trajectory.sequences)):
            yield _Row(group, response, part, trajectory)


def _text(sequence: TrajectorySequence, texts: Texts | None) -> str:
    if sequence.completion is not None:
        return sequence.completion
    if texts is None:
        raise ValueError("a completion without its text, and nothing to decode it")
    return texts(sequence)


def _with_columns(batch: RaggedBatch, rows: Sequence[_Row]) -> RaggedBatch:
    is_leaf = batch.sequence_index() >= 0
    sequences = [row.sequence for row in rows]

    def on_leaves(values: Iterable[Sequence[float]], empty: torch.Tensor) -> torch.Tensor:
        # Leaves are stored in the order of the rows.
        empty[is_leaf] = torch.tensor([value for of_row in values for value in of_row], dtype=empty.dtype)
        return empty

    num = batch.num_tokens
    actions = on_leaves([s.action_mask for s in sequences], torch.zeros(num, dtype=torch.bool))
    batch = batch.with_token(
        action_mask=actions,
        loss_mask=actions,
        rollout_logprobs=on_leaves([s.logprobs for s in sequences], torch.zeros(num)),
        policy_version=on_leaves([s.versions for s in sequences], torch.full((num,), NO_VERSION)),
    )
    names = _column_names(sequences, batch.token)
    columns = {name: [s.columns[name] for s in sequences] for name in names}
    batch = batch.with_token(
        **{name: on_leaves(own, torch.zeros(num, dtype=_dtype(own, torch.float32))) for name, own in columns.items()}
    ).with_sequence(
        group=torch.tensor([row.group.index for row in rows]),
        response=torch.tensor([row.response for row in rows]),
        ended=torch.tensor([row.finish_reason in _ENDED for row in rows]),
        version=torch.tensor([s.versions[0] for s in sequences]),
    )
    if any(row.is_greedy for row in rows):
        batch = batch.with_sequence(**{GREEDY: torch.tensor([row.is_greedy for row in rows])})
    sources = rows[0].trajectory.scores
    if not sources:
        return batch
    scores = {
        REWARD_PREFIX + name: torch.tensor([row.trajectory.scores[name] if row.is_final else math.nan for row in rows])
        for name in sources
    }
    return batch.with_token(observation_mask=is_leaf & ~actions).with_sequence(
        part=torch.tensor([row.part for row in rows]),
        num_turns=torch.tensor([s.num_turns for s in sequences]),
        **scores,
    )


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


def _dtype(columns: Iterable[Sequence[float]], otherwise: torch.dtype) -> torch.dtype:
    """int64 where all numbers are integers."""
    whole = all(type(value) is int for column in columns for value in column)
    return torch.int64 if whole else otherwise


def staleness_metrics(batch: RaggedBatch, step: int) -> dict[str, float]:
    """By how many versions the weights that are trained are newer than those that sampled, over action tokens."""
    staleness = step - batch.token["policy_version"][batch.token["action_mask"]]
    return {"staleness/mean": float(staleness.double().mean()), "staleness/max": float(staleness.max())}


# In checkpoints ------------------------------------------------------------------------------------------


def ahead_state(ahead: Ahead[Group]) -> dict[str, Any] | None:
    """Groups that were ready before their step, which a resumed run neither loses nor repeats, as a checkpoint's part.

    Tensors and plain values, None where there is nothing; prompts are left out, since their indices give them.
    """
    if not ahead.groups and not ahead.rejected:
        return None
    return {"groups": [_group_state(group) for group in ahead.groups.values()], "rejected": list(ahead.rejected)}


def ahead_from_state(state: Mapping[str, Any], item: Callable[[int], Any]) -> Ahead[Group]:
    """The groups as they were.

    Args:
        item: the data set's item of a stream index.

    Raises:
        UserError: an item has other tokens now, or an earlier version saved the groups.
    """
    groups = {found["index"]: _group_from_state(found, item(found["index"])) for found in state["groups"]}
    return Ahead(groups, tuple(state["rejected"]))


def _group_state(group: Group) -> dict[str, Any]:
    return {
        "index": group.index,
        "prompt_ids": list(group.prompt.token_ids),
        "trajectories": [_trajectory_state(trajectory) for trajectory in group.trajectories],
        "greedy": None if group.greedy is None else _trajectory_state(group.greedy),
        "rewards": [
            {"ids": list(columns.ids), "token": dict(columns.token), "sequence": dict(columns.sequence)}
            for columns in group.rewards
        ],
    }


def _group_from_state(state: Mapping[str, Any], prompt: Any) -> Group:
    if "trajectories" not in state:
        raise UserError(
            "an earlier version of Quartet saved this checkpoint with groups that were generated ahead",
            found=f"group {state['index']} of the run, in the earlier format",
            remedy="finish the run with that version, or resume from a checkpoint without such groups",
        )
    if list(prompt.token_ids) != list(state["prompt_ids"]):
        raise UserError(
            "the data or the tokenizer changed since the checkpoint was saved",
            found=f"prompt {state['index']} of the run, {prompt.prompt_id!r}, has other tokens than the answers saved "
            "for it",
            remedy="resume with the data and the tokenizer of the run, or start another run",
        )
    greedy = state["greedy"]
    return Group(
        state["index"],
        prompt,
        tuple(_trajectory_from_state(found) for found in state["trajectories"]),
        None if greedy is None else _trajectory_from_state(greedy),
        tuple(ColumnSet(tuple(found["ids"]), found["token"], found["sequence"]) for found in state["rewards"]),
    )


_PER_TOKEN = {"token_ids": torch.int64, "action_mask": torch.bool, "logprobs": torch.float64, "versions": torch.int64}


def _trajectory_state(trajectory: Trajectory) -> dict[str, Any]:
    sequences = []
    for sequence in trajectory.sequences:
        plain = asdict(sequence)
        tensors = {name: torch.tensor(plain[name], dtype=dtype) for name, dtype in _PER_TOKEN.items()}
        columns = {
            name: torch.tensor(values, dtype=_dtype([values], torch.float64))
            for name, values in sequence.columns.items()
        }
        sequences.append({**plain, **tensors, "columns": columns})
    return {"sequences": sequences, "end": trajectory.end.value, "scores": dict(trajectory.scores)}


def _trajectory_from_state(state: Mapping[str, Any]) -> Trajectory:
    sequences = []
    for found in state["sequences"]:
        lists = {name: tuple(found[name].tolist()) for name in _PER_TOKEN}
        columns = {name: tuple(values.tolist()) for name, values in found["columns"].items()}
        prompt_ids = tuple(found["prompt_ids"])
        sequences.append(TrajectorySequence(**{**found, **lists, "prompt_ids": prompt_ids, "columns": columns}))
    return Trajectory(tuple(sequences), TrajectoryEnd(state["end"]), state["scores"])
