"""The greedy baseline (Li et al. 2024, ReMax): what the most likely response would have scored.

Each group has one greedy response beside those it is trained on. It is scored by the rewards and by nothing else: no
reference, critic or actor reads it, and it is no part of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quartet.batch.columns import ColumnSet, join
from quartet.batch.ragged import RaggedBatch
from quartet.rollout.protocol import Completion
from quartet.schedule.groups import PromptGroup, chunk_of
from quartet.schedule.iteration import Chunk, Scorer, score_all
from quartet.trainers.advantages import Judgement
from quartet.trainers.estimators import BASELINE


@dataclass(frozen=True)
class GreedyBaseline:
    """A scorer whose column ``baseline`` ``[S]`` is the shaped score of the greedy response to the sequence's prompt,
    NaN where no reward applies to it.

    Args:
        scorers: the reward sources.
        texts: ``(prompt ids, completion) → text``.
        judge: scores of a batch with its reward columns.
    """

    scorers: Sequence[Scorer[RaggedBatch, ColumnSet]]
    texts: Callable[[Sequence[int], Completion], str]
    judge: Callable[[RaggedBatch], Judgement]

    async def score(self, chunk: Chunk[RaggedBatch]) -> ColumnSet:
        groups = _greedy_groups(chunk.data)
        own = chunk_of(chunk.step, chunk.index, groups, self.texts)
        judged = self.judge(join(own.data, *await score_all(self.scorers, own)))
        baseline_N = judged.shaped_N.masked_fill(~judged.applies_N, float("nan"))
        place = {group.index: n for n, group in enumerate(groups)}
        owner_S = torch.tensor([place[group] for group in chunk.data.sequence["group"].tolist()])
        return ColumnSet(chunk.data.ids, sequence={BASELINE: baseline_N[owner_S]})


def _greedy_groups(batch: RaggedBatch) -> list[PromptGroup]:
    """One group per prompt of the batch, in order, with the greedy response as its only member."""
    first: dict[int, int] = {}
    for s, group in enumerate(batch.sequence["group"].tolist()):
        first.setdefault(group, s)
    prompts, greedy = batch.objects["prompt"], batch.objects["greedy"]
    return [PromptGroup(group, prompts[s], tuple(prompts[s].token_ids), (greedy[s],)) for group, s in first.items()]


def greedy_metrics(batch: RaggedBatch) -> dict[str, float]:
    """Mean baseline over the prompts of a step that have one; nothing where the method has none."""
    if BASELINE not in batch.sequence:
        return {}
    by_group = dict(zip(batch.sequence["group"].tolist(), batch.sequence[BASELINE].tolist(), strict=True))
    found = torch.tensor(list(by_group.values())).nanmean()
    return {} if bool(found.isnan()) else {"reward/greedy_mean": float(found)}
