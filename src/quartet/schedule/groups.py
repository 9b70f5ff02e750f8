"""Groups of trajectories that answer one prompt, the chunks that they travel in, and the weights that made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from quartet.batch.ragged import RaggedBatch
from quartet.schedule.group_batch import GREEDY, NO_VERSION, STATE
from quartet.schedule.iteration import Chunk
from quartet.schedule.journal import Consumed


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


def chunk_of(step: int, index: int, groups: Sequence[Group]) -> Chunk[RaggedBatch]:
    """The groups' batches one after the other."""
    batch = RaggedBatch.concat([group.batch for group in groups])
    return Chunk(step, index, batch.num_tokens, batch)


def by_group(batch: RaggedBatch) -> dict[int, RaggedBatch]:
    """The batch of each group among several, by its index; of groups that were joined, as each was before."""
    members: dict[int, list[int]] = {}
    for s, group in enumerate(batch.sequence["group"].tolist()):
        members.setdefault(group, []).append(s)
    return {group: batch.select(sequences, keep_order=True) for group, sequences in members.items()}


def without_texts(batch: RaggedBatch) -> RaggedBatch:
    """Scored batches, of whose objects ``finish_reason`` and the names of the prompts, ``prompt_id``, are left."""
    names = [item.prompt_id for item in batch.objects["prompt"]]
    return batch.without_objects().with_objects(prompt_id=names, finish_reason=batch.objects["finish_reason"])


def staleness_metrics(batch: RaggedBatch, step: int) -> dict[str, float]:
    """By how many versions the weights that are trained are newer than those that sampled, over action tokens."""
    staleness = step - batch.token["policy_version"][batch.token["action_mask"]]
    return {"staleness/mean": float(staleness.double().mean()), "staleness/max": float(staleness.max())}
