"""From scored chunks to the experience a step learns from: rewards, baselines, advantages.

Shapes: T stored tokens, S sequences, N trajectories (of one sequence each, or several where an environment rewrote the
state).

What an advantage is, is the method's business (``quartet.trainers.estimators``). Baselines need whole groups and
whitening the whole batch, so this runs once per step on scalar columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quartet.algorithms.kl import kl_estimate
from quartet.algorithms.segments import masked_mean, masked_owner, segment_count, segment_is_constant
from quartet.batch.columns import ColumnSet, join
from quartet.batch.ragged import RaggedBatch
from quartet.batch.trajectory import REWARD_PREFIX, STEP_PREFIX
from quartet.config.algorithms import (
    Distillation,
    GroupAlgorithm,
    PolicyGradientConfig,
    ScoredAlgorithm,
    Selection,
    SelectionConfig,
    kl_term,
)
from quartet.rewards.combine import LEFT_OUT_PREFIX, combine, effective_weights, source_metrics
from quartet.schedule.iteration import Chunk
from quartet.train.objectives import trajectory_index
from quartet.trainers.estimators import (
    BASELINE,
    Estimate,
    Scored,
    estimate,
    length_penalty,
    sampled_logprobs,
    shaped_scores,
)
from quartet.trainers.greedy import with_baseline
from quartet.trainers.process_metrics import process_metrics
from quartet.trainers.selection import selected
from quartet.trainers.trajectories import Trajectories


@dataclass(frozen=True)
class Experience:
    """One step's batch with every column, the step's scalar metrics, and the greedy sequences where there are any."""

    batch: RaggedBatch
    metrics: Mapping[str, float]
    greedy: RaggedBatch | None = None


@dataclass(frozen=True)
class Judgement:
    """Scores of a batch's trajectories before KL enters: raw ones (0 where no source applies), those less the recipe's
    penalties, and where any source applies; each ``[N]``."""

    scores_N: Tensor
    shaped_N: Tensor
    applies_N: Tensor

    @property
    def valid_N(self) -> Tensor:
        """Shaped scores, NaN where no source applies."""
        return self.shaped_N.masked_fill(~self.applies_N, math.nan)


class Assembler:
    """Joins scored chunks and computes advantages.

    Args:
        config: the algorithm.
        weights: weight of every reward source by name.
        kl_coef: the coefficient now in force (an adaptive one changes between steps).
        shuffle: permutation of the scores within the batch, for control experiments; None leaves them.
        max_new_tokens: the longest response allowed, needed by ``overlong``.
    """

    def __init__(
        self,
        config: PolicyGradientConfig | SelectionConfig,
        weights: Mapping[str, float],
        kl_coef: Callable[[], float],
        shuffle: Callable[[int, int], Tensor] | None = None,
        max_new_tokens: int | None = None,
    ) -> None:
        self.config = config
        self.max_new_tokens = max_new_tokens
        self.weights = weights
        self._kl_coef = kl_coef
        self._shuffle = shuffle

    def __call__(self, chunks: Sequence[tuple[Chunk[RaggedBatch], Sequence[ColumnSet]]]) -> Experience:
        batch = RaggedBatch.concat([join(chunk.data, *columns) for chunk, columns in chunks])
        batch, greedy = with_baseline(batch, lambda found: self.judge(found).valid_N)
        trajectories = Trajectories.of(batch)
        final_N = trajectories.final_N
        group_N = batch.sequence["group"][final_N]
        batch = batch.with_sequence(trajectory=trajectories.owner_S)
        scores_N, applies_N = self._scores(batch, final_N)
        if self._shuffle is not None:
            order = self._shuffle(chunks[0][0].step, len(trajectories))
            scores_N, applies_N = scores_N[order], applies_N[order]
        kept_N = self._taking_part(batch, final_N, group_N, applies_N)
        trajectory_T = trajectory_index(batch)
        length_N = segment_count(masked_owner(trajectory_T, batch.token["action_mask"]), len(final_N))
        action_mask_T = batch.token["action_mask"] & kept_N[trajectory_T.clamp(min=0)]
        batch = _replace_token(batch, action_mask=action_mask_T, loss_mask=batch.token["loss_mask"] & action_mask_T)

        kl_T, kl_metrics = self._kl(batch, action_mask_T)
        in_reward = self._kl_coef() if kl_term(self.config).place == "reward" else 0.0
        ended_N = batch.sequence["ended"][final_N]
        shaped_N = shaped_scores(self.config, scores_N, ended_N, length_N, self.max_new_tokens)
        scored = Scored(
            batch=batch,
            trajectory_T=trajectory_T,
            action_mask_T=action_mask_T,
            scores_N=scores_N,
            shaped_N=shaped_N,
            kl_T=kl_T,
            kl_coef=in_reward,
            group_N=group_N,
            length_N=length_N,
            ended_N=ended_N,
            baseline_N=batch.sequence[BASELINE][final_N] if BASELINE in batch.sequence else None,
            step_rewards_T=self._step_rewards(batch, final_N, trajectory_T),
        )
        config = self.config
        result = selected(config, scored) if isinstance(config, Selection) else estimate(config, scored)
        fields = {
            "advantages": result.advantages_T.float(),
            "token_rewards": result.token_rewards_T.float(),
            "kl": kl_T.float(),
        }
        if result.returns_T is not None:
            fields["returns"] = result.returns_T.float()
        batch = batch.with_token(**fields).with_sequence(
            score=scores_N.masked_fill(~applies_N, math.nan)[trajectories.owner_S],
            total_reward=result.rewards_N[trajectories.owner_S],
        )
        rewards = self._by_source(batch, final_N)
        metrics = {
            **kl_metrics,
            **process_metrics(batch, rewards, self.weights),
            **self._metrics(batch, scored, applies_N, result),
        }
        return Experience(batch, metrics, greedy)

    def judge(self, batch: RaggedBatch) -> Judgement:
        """What the rewards say of a batch that has their columns, whatever else it has."""
        trajectories = Trajectories.of(batch)
        scores_N, applies_N = self._scores(batch, trajectories.final_N)
        trajectory_T = trajectory_index(batch.with_sequence(trajectory=trajectories.owner_S))
        length_N = segment_count(masked_owner(trajectory_T, batch.token["action_mask"]), len(trajectories))
        ended_N = batch.sequence["ended"][trajectories.final_N]
        shaped_N = shaped_scores(self.config, scores_N, ended_N, length_N, self.max_new_tokens)
        return Judgement(scores_N, shaped_N, applies_N)

    def _taking_part(self, batch: RaggedBatch, final_N: Tensor, group_N: Tensor, applies_N: Tensor) -> Tensor:
        """``[N]`` bool trajectories that are learned from: those with a score, and what it is compared with."""
        if isinstance(self.config, Distillation):
            return torch.ones_like(applies_N)
        if isinstance(self.config, GroupAlgorithm | Selection):
            return applies_N & _has_company(group_N, applies_N)
        if BASELINE in batch.sequence:
            return applies_N & ~batch.sequence[BASELINE][final_N].isnan()
        return applies_N

    def _scores(self, batch: RaggedBatch, final_N: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted sum of the sources that apply, under their gates, and whether any did; each ``[N]``."""
        if not self.weights:
            return torch.zeros(len(final_N)), torch.zeros(len(final_N), dtype=torch.bool)
        total, applies = combine(self._by_source(batch, final_N), self.weights)
        return total.float(), applies

    def _by_source(self, batch: RaggedBatch, final_N: Tensor) -> dict[str, Tensor]:
        return {name: batch.sequence[REWARD_PREFIX + name][final_N] for name in self.weights}

    def _step_rewards(self, batch: RaggedBatch, final_N: Tensor, trajectory_T: Tensor) -> Tensor | None:
        """``[T]`` weighted sum over the sources that say where their score was earned; None without such a source.

        Shuffled scores belong to other trajectories, so nothing of them was earned on the way.
        """
        steps = {name: STEP_PREFIX + name for name in self.weights if STEP_PREFIX + name in batch.token}
        if not steps or self._shuffle is not None:
            return None
        shares = effective_weights(self._by_source(batch, final_N), self.weights)
        owner_T = trajectory_T.clamp(min=0)
        earned = [
            shares[name].nan_to_num(nan=0.0).float()[owner_T] * batch.token[column] for name, column in steps.items()
        ]
        return torch.stack(earned).sum(0)

    def _kl(self, batch: RaggedBatch, mask_T: Tensor) -> tuple[Tensor, dict[str, float]]:
        if "ref_logprobs" not in batch.token:
            return torch.zeros(batch.num_tokens), {}
        policy, reference = sampled_logprobs(batch), batch.token["ref_logprobs"]
        kl_T = kl_estimate(policy, reference, kl_term(self.config).estimator, mask_T=mask_T)
        k1 = masked_mean(kl_estimate(policy, reference, "k1", mask_T=mask_T), mask_T)
        k3 = masked_mean(kl_estimate(policy, reference, "k3", mask_T=mask_T), mask_T)
        coef = {"kl/coef": self._kl_coef()} if kl_term(self.config).coef > 0 else {}
        return kl_T, {"kl/ref": float(k1), "kl/ref_k3": float(k3), **coef}

    def _metrics(self, batch: RaggedBatch, scored: Scored, applies_N: Tensor, result: Estimate) -> dict[str, float]:
        mask_T, scores_N = batch.token["action_mask"], scored.scores_N
        found: dict[str, float] = {"reward/not_applicable": float((~applies_N).sum())} if self.weights else {}
        if bool(applies_N.any()):
            valid = scores_N[applies_N]
            found["reward/score_mean"] = float(valid.mean())
            found["reward/score_std"] = float(valid.std()) if len(valid) > 1 else 0.0
            found["reward/with_kl_mean"] = float(result.rewards_N[applies_N].mean())
            found.update(self._length_metrics(scored, applies_N))
        found.update(self._source_metrics(batch))
        if bool(mask_T.any()):
            advantages = result.advantages_T[mask_T]
            found["advantages/mean"] = float(advantages.mean())
            found["advantages/std"] = float(advantages.std()) if len(advantages) > 1 else 0.0
        if result.returns_T is not None and bool(mask_T.any()):
            returns, values = result.returns_T[mask_T], batch.token["values"][mask_T]
            found["returns/mean"] = float(returns.mean())
            spread = float(returns.var()) if len(returns) > 1 else 0.0
            if spread > 0:
                found["critic/explained_variance"] = 1.0 - float((returns - values).var()) / spread
        group_N = _dense(scored.group_N)
        if self.weights and len(scores_N) > int(group_N.max()) + 1:
            scored_N = torch.where(applies_N, group_N, -1)
            is_constant = segment_is_constant(scored.shaped_N, scored_N, int(group_N.max()) + 1)
            found["groups/zero_variance"] = float(is_constant.float().mean())
        if "old_logprobs" in batch.token and bool(mask_T.any()):
            gap = (batch.token["old_logprobs"] - batch.token["rollout_logprobs"]).abs()[mask_T]
            found["agreement/logprob_diff_mean"] = float(gap.mean())
            found["agreement/logprob_diff_max"] = float(gap.max())
        return found

    def _source_metrics(self, batch: RaggedBatch) -> dict[str, float]:
        final_N = Trajectories.of(batch).final_N
        left_out = {
            name.removeprefix(LEFT_OUT_PREFIX): values[final_N]
            for name, values in batch.sequence.items()
            if name.startswith(LEFT_OUT_PREFIX)
        }
        return source_metrics(self._by_source(batch, final_N), self.weights, left_out)

    def _length_metrics(self, scored: Scored, applies_N: Tensor) -> dict[str, float]:
        """What was taken off the scores for length, where the recipe has it."""
        if not isinstance(self.config, ScoredAlgorithm) or self.config.overlong is None:
            return {}
        taken_N = length_penalty(self.config, scored.length_N, self.max_new_tokens)
        return {"reward/overlong_penalty": float(taken_N[applies_N].mean())}


def _dense(labels_N: Tensor) -> Tensor:
    return torch.unique(labels_N, return_inverse=True)[1]


def _has_company(labels_N: Tensor, applies_N: Tensor) -> Tensor:
    """``[N]`` bool: at least two members of the trajectory's group have a score."""
    group_N = _dense(labels_N)
    counts = torch.bincount(group_N[applies_N], minlength=int(group_N.max()) + 1)
    return counts[group_N] >= 2


def _replace_token(batch: RaggedBatch, **fields: Tensor) -> RaggedBatch:
    for name in fields:
        batch, _ = batch.pop(name)
    return batch.with_token(**fields)
