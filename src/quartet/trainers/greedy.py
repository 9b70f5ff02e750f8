"""The greedy baseline (Li et al. 2024, ReMax): what the most likely response would have scored.

Each group has one greedy trajectory beside those it is trained on. It travels in their chunk and is scored by the
rewards, apart from the others, and by nothing else: no reference, critic or actor reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from quartet.batch.ragged import RaggedBatch
from quartet.schedule.groups import GREEDY
from quartet.trainers.estimators import BASELINE


def sampled_and_greedy(batch: RaggedBatch) -> list[list[int]]:
    """Places of the sequences that were sampled, and of the greedy ones."""
    is_greedy = batch.sequence[GREEDY].tolist()
    return [[s for s, found in enumerate(is_greedy) if found == wanted] for wanted in (False, True)]


def sampled_only(batch: RaggedBatch) -> list[list[int]]:
    return sampled_and_greedy(batch)[:1]


def with_baseline(
    batch: RaggedBatch, judge: Callable[[RaggedBatch], torch.Tensor]
) -> tuple[RaggedBatch, RaggedBatch | None]:
    """The sampled sequences with the column ``baseline`` ``[S]``, and the greedy ones, with their ``score`` and as they
    were sampled; where the method has none, the batch as it is.

    Args:
        judge: ``[N]`` shaped score of each trajectory, NaN where no reward applies.
    """
    if GREEDY not in batch.sequence:
        return batch, None
    sampled, greedy = (batch.select(part).pop(GREEDY)[0] for part in sampled_and_greedy(batch))
    baseline_N = judge(greedy)
    place = {group: n for n, group in enumerate(greedy.sequence["group"].tolist())}
    owner_S = torch.tensor([place[group] for group in sampled.sequence["group"].tolist()])
    kept = {name: greedy.token[name] for name in ("action_mask", "rollout_logprobs", "policy_version")}
    untrained = torch.zeros(greedy.num_tokens, dtype=torch.bool)
    greedy = replace(greedy, token={**kept, "loss_mask": untrained}).with_sequence(score=baseline_N)
    return sampled.with_sequence(**{BASELINE: baseline_N[owner_S]}), greedy


def greedy_metrics(batch: RaggedBatch) -> dict[str, float]:
    """Mean baseline over the prompts of a step that have one; nothing where the method has none."""
    if BASELINE not in batch.sequence:
        return {}
    by_group = dict(zip(batch.sequence["group"].tolist(), batch.sequence[BASELINE].tolist(), strict=True))
    found = torch.tensor(list(by_group.values())).nanmean()
    return {} if bool(found.isnan()) else {"reward/greedy_mean": float(found)}
