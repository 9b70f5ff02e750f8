"""Groups of answers to a prompt, and the chunks that they travel in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quartet.batch.columns import ColumnSet, join
from quartet.batch.ragged import RaggedBatch
from quartet.rollout.protocol import Completion, FinishReason
from quartet.schedule.iteration import Chunk


@dataclass(frozen=True)
class PromptGroup:
    """All responses to one prompt. ``index`` is the group's place in the stream; ``prompt`` is the data set's item.

    ``greedy`` is the response that only serves as a baseline, where the method has one. ``rewards`` are the columns of
    the reward sources over the group's own batch, where they were needed before the group was accepted.
    """

    index: int
    prompt: Any
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    greedy: Completion | None = None
    rewards: tuple[ColumnSet, ...] = ()


def chunk_of(
    step: int, index: int, groups: Sequence[PromptGroup], texts: Callable[[Sequence[int], Completion], str]
) -> Chunk[RaggedBatch]:
    """A chunk's ragged batch: one prompt segment per group, one child per response.

    Token fields ``action_mask``, ``loss_mask`` (bool) and ``rollout_logprobs``; sequence fields ``group`` (place in the
    stream), ``response`` (place in the group), ``ended`` (bool), ``version``; objects ``prompt``, ``completion`` (text)
    and ``finish_reason``, and ``greedy`` where the groups have one. Rewards that the groups carry are fields, too.
    """
    members = [(group, r, c) for group in groups for r, c in enumerate(group.completions)]
    batch = RaggedBatch.from_groups(
        [group.prompt_ids for group in groups],
        [[c.token_ids for c in group.completions] for group in groups],
        [f"{group.index}.{r}" for group, r, _ in members],
    )
    mask = batch.sequence_index() >= 0
    logprobs = torch.zeros(batch.num_tokens)
    logprobs[mask] = torch.tensor([lp for _, _, c in members for lp in c.logprobs])
    ended = [c.finish_reason in (FinishReason.STOP, FinishReason.STOP_STRING) for _, _, c in members]
    batch = batch.with_token(action_mask=mask, loss_mask=mask, rollout_logprobs=logprobs).with_sequence(
        group=torch.tensor([group.index for group, _, _ in members]),
        response=torch.tensor([r for _, r, _ in members]),
        ended=torch.tensor(ended),
        version=torch.tensor([c.versions[-1] for _, _, c in members]),
    )
    batch = batch.with_objects(
        prompt=[group.prompt for group, _, _ in members],
        completion=[texts(group.prompt_ids, c) for group, _, c in members],
        finish_reason=[c.finish_reason.value for _, _, c in members],
    )
    if groups[0].greedy is not None:
        batch = batch.with_objects(greedy=[group.greedy for group, _, _ in members])
    # Groups lie one after the other, so their columns do as well.
    batch = join(batch, *(ColumnSet.concat(columns) for columns in zip(*(g.rewards for g in groups), strict=True)))
    return Chunk(step, index, batch.num_tokens, batch)
