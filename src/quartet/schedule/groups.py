"""Groups of trajectories that answer one prompt, the chunks that they travel in, and the weights that made them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from quartet.batch.columns import ColumnSet, join
from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.schedule.group_batch import GREEDY, NO_VERSION, STATE
from quartet.schedule.iteration import Chunk
from quartet.schedule.journal import Consumed
from quartet.schedule.stream import Ahead


@dataclass(frozen=True)
class Group:
    """All trajectories of one prompt.

    Args:
        index: the group's place in the stream.
        prompt: the data set's item.
        batch: as of ``group_batch``, with the object ``prompt`` in place of ``state``: an item whose text is what the
            sequence's last action answers. Where rollout workers are elsewhere it is an outline without token ids.
        rewards: columns of the reward sources, where they were needed before the group was accepted.
    """

    index: int
    prompt: Any
    batch: RaggedBatch
    rewards: tuple[ColumnSet, ...] = ()

    @classmethod
    def of(cls, index: int, prompt: Any, made: RaggedBatch) -> Group:
        """The group of a batch that ``group_batch`` has made."""
        batch, states = made.pop(STATE)
        items = [prompt if state is None else replace(prompt, prompt=state) for state in states]
        return cls(index, prompt, batch.with_objects(prompt=items))

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


def chunk_of(step: int, index: int, groups: Sequence[Group]) -> Chunk[RaggedBatch]:
    """The groups' batches one after the other, with the rewards that the groups carry as fields."""
    batch = RaggedBatch.concat([group.batch for group in groups])
    # Groups lie one after the other, so their columns do as well.
    batch = join(batch, *(ColumnSet.concat(columns) for columns in zip(*(g.rewards for g in groups), strict=True)))
    return Chunk(step, index, batch.num_tokens, batch)


def by_group(batch: RaggedBatch) -> dict[int, RaggedBatch]:
    """The batch of each group among several, by its index."""
    members: dict[int, list[int]] = {}
    for s, group in enumerate(batch.sequence["group"].tolist()):
        members.setdefault(group, []).append(s)
    return {group: batch.select(sequences) for group, sequences in members.items()}


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
    batch, prompts = group.batch.pop("prompt")
    states = [None if item is group.prompt else item.prompt for item in prompts]
    return {
        "index": group.index,
        "prompt_ids": list(group.prompt.token_ids),
        "batch": {
            "input_ids": batch.input_ids,
            **{name: list(getattr(batch, name)) for name in _STRUCTURE},
            "token": dict(batch.token),
            "sequence": dict(batch.sequence),
            "objects": {STATE: states, **{name: list(values) for name, values in batch.objects.items()}},
        },
        "rewards": [
            {"ids": list(columns.ids), "token": dict(columns.token), "sequence": dict(columns.sequence)}
            for columns in group.rewards
        ],
    }


_STRUCTURE = ("segment_lengths", "parents", "leaves", "ids")


def _group_from_state(state: Mapping[str, Any], prompt: Any) -> Group:
    if "batch" not in state:
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
    rewards = tuple(ColumnSet(tuple(c["ids"]), c["token"], c["sequence"]) for c in state["rewards"])
    return replace(Group.of(state["index"], prompt, RaggedBatch(**state["batch"])), rewards=rewards)
