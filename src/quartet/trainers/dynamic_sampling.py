"""Dynamic sampling (Yu et al. 2025, DAPO §3.2): groups without variance are replaced by newly sampled prompts.

A group whose responses all have the same score has advantages of exactly 0, so a step full of such groups learns
nothing. Here a group is scored as soon as it is complete, and takes part only if its shaped scores differ, the same
question as `groups/zero_variance` asks. The reward columns stay with the group and are not computed again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quartet.batch.columns import join
from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.config.algorithms import DynamicSamplingConfig
from quartet.schedule.group_stream import GroupStream, TooFewGroups
from quartet.schedule.groups import Group, chunk_of
from quartet.schedule.iteration import Scorer, score_all
from quartet.schedule.staleness import AdmissionRule
from quartet.trainers.experience import ScoredGroups


class DynamicSampling:
    """Scores groups when they are complete and keeps those with variance.

    Args:
        source: ``index → group``.
        version: that of the weights now in force, which is also the number of the step.
        scorers: the reward sources.
        judge: scores of a batch with its reward columns.
    """

    def __init__(
        self,
        config: DynamicSamplingConfig,
        source: Callable[[int], Awaitable[Group]],
        version: Callable[[], int],
        scorers: Sequence[Scorer],
        judge: Callable[[RaggedBatch], ScoredGroups],
    ) -> None:
        self.config = config
        self._source = source
        self._version = version
        self._scorers = scorers
        self._judge = judge
        self._outcomes: dict[int, tuple[bool, Tensor]] = {}  # by group: whether its scores differ, and they themselves

    def stream(self, rule: AdmissionRule, *, chunk_size: int) -> GroupStream[Group]:
        """The stream of groups with variance, replaced in rounds, as which requests share the engine's batch must not
        depend on how long a reward takes."""
        return GroupStream(
            self.produce,
            rule,
            chunk_size=chunk_size,
            accept=self.accept,
            max_attempts=int(self.config.max_prompts_factor * rule.prompts_per_step),
            shortage=self._too_few,
        )

    async def produce(self, index: int) -> Group:
        """The group at ``index`` with its reward columns."""
        group = await self._source(index)
        chunk = chunk_of(self._version(), index, [group])
        scored = join(chunk.data, *await score_all(self._scorers, chunk))
        judged = self._judge(scored)
        values = judged.shaped_N[judged.applies_N]
        varies = len(values) > 1 and bool((values != values[0]).any())
        self._outcomes[index] = varies, judged.scores_N[judged.applies_N].to(torch.float64)
        return replace(group, batch=scored)

    def accept(self, group: Group) -> bool:
        return self._outcomes[group.index][0]

    def take_metrics(self) -> dict[str, float]:
        """Figures of the groups sampled since the last call."""
        # In the order of the stream: sums must not depend on which group was scored first.
        outcomes = [self._outcomes[index] for index in sorted(self._outcomes)]
        self._outcomes.clear()
        if not outcomes:  # all of the step's were sampled earlier: generation runs ahead
            return {}
        rejected = sum(not varies for varies, _ in outcomes)
        found = {"groups/sampled": float(len(outcomes)), "groups/rejected_frac": rejected / len(outcomes)}
        num = sum(len(scores) for _, scores in outcomes)
        if num:
            found["reward/sampled_score_mean"] = sum(float(scores.sum()) for _, scores in outcomes) / num
        return found

    def _too_few(self, shortage: TooFewGroups) -> UserError:
        key = "algorithm.dynamic_sampling.max_prompts_factor"
        return UserError(
            f"step {shortage.step + 1}: too few groups have responses with different scores",
            found=f"{shortage.attempts} groups tried, {shortage.accepted} with variance, {shortage.wanted} needed; "
            f"{key}={self.config.max_prompts_factor:g}",
            remedy="use prompts that the model solves sometimes, more responses_per_prompt or a reward with more "
            f"grades; a resumed run may also raise {key}. Nothing of this step was trained on",
        )
