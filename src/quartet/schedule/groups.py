"""Groups of answers to a prompt, the chunks that they travel in, and the weights that made them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from quartet.batch.columns import ColumnSet, join
from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.rollout.protocol import Completion, FinishReason
from quartet.schedule.iteration import Chunk
from quartet.schedule.journal import Consumed

NO_VERSION = -1
"""In ``policy_version`` of tokens that no weights of this run have sampled: prompts, observations."""


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

    @property
    def first_version(self) -> int:
        """Of the oldest weights that a token was sampled with."""
        return min(completion.versions[0] for completion in self.completions)

    def consumed(self) -> Consumed:
        """As the journal of an asynchronous run has it; parts are tokens, response after response."""
        runs = groupby(version for completion in self.completions for version in completion.versions)
        return self.index, tuple((version, len(list(run))) for version, run in runs)


def chunk_of(
    step: int, index: int, groups: Sequence[PromptGroup], texts: Callable[[Sequence[int], Completion], str]
) -> Chunk[RaggedBatch]:
    """A chunk's ragged batch: one prompt segment per group, one child per response.

    Token fields ``action_mask``, ``loss_mask`` (bool), ``rollout_logprobs`` and ``policy_version`` (of the weights that
    sampled the token, -1 where none have); sequence fields ``group`` (place in the stream), ``response`` (place in the
    group), ``ended`` (bool), ``version`` (the first token's, the oldest); objects ``prompt``, ``completion`` (text)
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
    versions = torch.full((batch.num_tokens,), NO_VERSION)
    versions[mask] = torch.tensor([version for _, _, c in members for version in c.versions])
    ended = [c.finish_reason in (FinishReason.STOP, FinishReason.STOP_STRING) for _, _, c in members]
    batch = batch.with_token(
        action_mask=mask, loss_mask=mask, rollout_logprobs=logprobs, policy_version=versions
    ).with_sequence(
        group=torch.tensor([group.index for group, _, _ in members]),
        response=torch.tensor([r for _, r, _ in members]),
        ended=torch.tensor(ended),
        version=torch.tensor([c.versions[0] for _, _, c in members]),
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


def staleness_metrics(batch: RaggedBatch, step: int) -> dict[str, float]:
    """By how many versions the weights that are trained are newer than those that sampled, over action tokens."""
    staleness = step - batch.token["policy_version"][batch.token["action_mask"]]
    return {"staleness/mean": float(staleness.double().mean()), "staleness/max": float(staleness.max())}


# In checkpoints ------------------------------------------------------------------------------------------


def group_state(group: PromptGroup) -> dict[str, Any]:
    """Tensors and plain values; without the prompt, which its index gives."""
    return {
        "index": group.index,
        "prompt_ids": list(group.prompt_ids),
        "completions": [completion_state(completion) for completion in group.completions],
        "greedy": None if group.greedy is None else completion_state(group.greedy),
        "rewards": [columns_state(columns) for columns in group.rewards],
    }


def group_from_state(state: Mapping[str, Any], prompt: Any) -> PromptGroup:
    """The group as it was.

    Args:
        prompt: the data set's item of its index.

    Raises:
        UserError: that item has other tokens now.
    """
    check_prompt(state["index"], state["prompt_ids"], prompt)
    return PromptGroup(
        state["index"],
        prompt,
        tuple(state["prompt_ids"]),
        tuple(completion_from_state(found) for found in state["completions"]),
        None if state["greedy"] is None else completion_from_state(state["greedy"]),
        tuple(columns_from_state(found) for found in state["rewards"]),
    )


def check_prompt(index: int, prompt_ids: Sequence[int], prompt: Any) -> None:
    if list(prompt.token_ids) != list(prompt_ids):
        raise UserError(
            "the data or the tokenizer changed since the checkpoint was saved",
            found=f"prompt {index} of the run, {prompt.prompt_id!r}, has other tokens than the answers saved for it",
            remedy="resume with the data and the tokenizer of the run, or start another run",
        )


def completion_state(completion: Completion) -> dict[str, Any]:
    return {
        "request_id": completion.request_id,
        "group": completion.group,
        "token_ids": torch.tensor(completion.token_ids, dtype=torch.int64),
        "logprobs": torch.tensor(completion.logprobs, dtype=torch.float64),
        "versions": torch.tensor(completion.versions, dtype=torch.int64),
        "finish_reason": completion.finish_reason.value,
        "text_end": completion.text_end,
    }


def completion_from_state(state: Mapping[str, Any]) -> Completion:
    return Completion(
        state["request_id"],
        state["group"],
        tuple(state["token_ids"].tolist()),
        tuple(state["logprobs"].tolist()),
        tuple(state["versions"].tolist()),
        FinishReason(state["finish_reason"]),
        state["text_end"],
    )


def columns_state(columns: ColumnSet) -> dict[str, Any]:
    return {"ids": list(columns.ids), "token": dict(columns.token), "sequence": dict(columns.sequence)}


def columns_from_state(state: Mapping[str, Any]) -> ColumnSet:
    return ColumnSet(tuple(state["ids"]), state["token"], state["sequence"])
