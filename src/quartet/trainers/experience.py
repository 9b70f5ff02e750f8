"""From scored chunks to the experience a step learns from: rewards, baselines, advantages.

Shapes: T stored tokens, S sequences, N trajectories (of one sequence each, or several where an environment rewrote the
state).

What an advantage is, is the method's business (``quartet.trainers.estimators``). Baselines need whole groups and
whitening the whole batch, so this runs once per step on scalar columns.

The greedy baseline (Li et al. 2024, ReMax) is what the most likely response would have scored: each group has one
greedy trajectory beside those it is trained on. It travels in their chunk and is scored by the rewards, apart from the
others, and by nothing else: no reference, critic or actor reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quartet.algorithms.advantages import normalised_in_groups
from quartet.algorithms.kl import adaptive_kl_coef, kl_estimate
from quartet.algorithms.segments import masked_mean, masked_owner, segment_count, segment_is_constant
from quartet.batch.columns import ColumnSet, join
from quartet.batch.ragged import RaggedBatch
from quartet.batch.trajectory import REWARD_PREFIX, STEP_PREFIX, Trajectories, TrajectoryEnd
from quartet.config.algorithms import (
    Distillation,
    GroupAlgorithm,
    PolicyGradientConfig,
    ScoredAlgorithm,
    Selection,
    SelectionConfig,
    kl_term,
)
from quartet.config.plugins import load
from quartet.config.reward_types import PLUGIN_REWARDS
from quartet.rewards.combine import LEFT_OUT_PREFIX, combine, effective_weights, source_metrics
from quartet.schedule.groups import GREEDY
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
from quartet.trainers.token_selection import with_selected_tokens

_LARGE = 2.0**50
"""Scores beyond it are computed with in fp64."""


@dataclass(frozen=True)
class Experience:
    """One step's batch with every column, the step's scalar metrics, and the greedy sequences where there are any."""

    batch: RaggedBatch
    metrics: Mapping[str, float]
    greedy: RaggedBatch | None = None


@dataclass(frozen=True)
class ScoredGroups:
    """Scores of a batch's trajectories before KL enters.

    ``rewards`` are the sources' own scores by name, ``scores_N`` their sum (0 where no source applies), ``shaped_N``
    that less the recipe's penalties, ``applies_N`` says where any source applies, ``length_N`` counts action tokens.
    """

    trajectories: Trajectories
    trajectory_T: Tensor
    rewards: Mapping[str, Tensor]
    scores_N: Tensor
    shaped_N: Tensor
    applies_N: Tensor
    length_N: Tensor
    ended_N: Tensor


class KLCoefficient:
    """The coefficient of the KL term: ``value`` is the present one; an adaptive one changes after each step.

    Args:
        warmup_steps: of the critic, at the run's beginning: neither the actor nor the coefficient changes.
    """

    def __init__(self, config: PolicyGradientConfig | SelectionConfig, warmup_steps: int = 0) -> None:
        self.term = kl_term(config)
        self.value = self.term.coef
        self._warmup_steps = warmup_steps

    def adapt(self, batch: RaggedBatch, step: int) -> None:
        """Adapts ``value`` to the mean KL of the responses of ``batch`` that are trained on."""
        num = len(torch.unique(trajectory_index(batch)[batch.token["action_mask"]]))
        if self.term.target is None or "ref_logprobs" not in batch.token or step < self._warmup_steps or not num:
            return
        observed = float(batch.token["kl"].sum()) / num
        self.value = adaptive_kl_coef(self.value, observed, self.term.target, self.term.horizon, num)


class Assembler:
    """Joins scored chunks and computes advantages.

    Args:
        config: the algorithm.
        weights: weight of every reward source by name.
        kl_coef: the coefficient now in force (an adaptive one changes between steps).
        shuffle: permutation of the scores within the batch, for control experiments; None leaves them.
        max_new_tokens: the longest response allowed, needed by ``overlong``.
        seed: of the run, for methods that draw tokens.
    """

    def __init__(
        self,
        config: PolicyGradientConfig | SelectionConfig,
        weights: Mapping[str, float],
        kl_coef: Callable[[], float],
        shuffle: Callable[[int, int], Tensor] | None = None,
        max_new_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        self.config = config
        self._seed = seed
        self.max_new_tokens = max_new_tokens
        self.weights = weights
        self._kl_coef = kl_coef
        self._shuffle = shuffle

    def __call__(self, chunks: Sequence[tuple[Chunk, Sequence[ColumnSet]]]) -> Experience:
        batch = RaggedBatch.concat([join(chunk.data, *columns) for chunk, columns in chunks])
        batch, greedy = self._with_baseline(batch)
        judged = self.judge(batch, step=chunks[0][0].step)
        trajectories, trajectory_T = judged.trajectories, judged.trajectory_T
        group_N = batch.sequence["group"][trajectories.final_N]
        baseline_N = batch.sequence[BASELINE][trajectories.final_N] if BASELINE in batch.sequence else None
        takes_part_N = self._taking_part(judged.applies_N, group_N, baseline_N)
        takes_part_N &= ~failed_episodes(batch, trajectories.final_N)
        action_mask_T = batch.token["action_mask"] & takes_part_N[trajectory_T.clamp(min=0)]
        batch = batch.with_sequence(trajectory=trajectories.owner_S)
        batch = batch.with_token(action_mask=action_mask_T, loss_mask=batch.token["loss_mask"] & action_mask_T)
        kl_T, kl_metrics = self._kl(batch, action_mask_T)
        scored = Scored(
            batch=batch,
            owner_T=masked_owner(trajectory_T, action_mask_T),
            scores_N=judged.scores_N,
            shaped_N=judged.shaped_N,
            kl_T=kl_T,
            kl_coef=self._kl_coef() if kl_term(self.config).place == "reward" else 0.0,
            group_N=group_N,
            length_N=judged.length_N,
            ended_N=judged.ended_N,
            baseline_N=baseline_N,
            step_rewards_T=self._step_rewards(batch, judged),
        )
        result = estimate(self.config, scored)
        fields = {"advantages": result.advantages_T, "token_rewards": result.token_rewards_T, "kl": kl_T}
        if result.returns_T is not None:
            fields["returns"] = result.returns_T
        batch = batch.with_token(**{name: values.float() for name, values in fields.items()}).with_sequence(
            score=judged.scores_N.masked_fill(~judged.applies_N, math.nan)[trajectories.owner_S],
            total_reward=result.rewards_N[trajectories.owner_S],
        )
        draw = (self._seed * 1_000_003 + chunks[0][0].step) * 1_009
        batch, token_metrics = with_selected_tokens(self.config, batch, len(trajectories), draw)
        metrics = {
            **kl_metrics,
            **token_metrics,
            **self._plugin_metrics(batch, judged),
            **self._score_metrics(batch, judged, result),
            **self._advantage_metrics(batch, result),
        }
        return Experience(batch, metrics, greedy)

    def _plugin_metrics(self, batch: RaggedBatch, judged: ScoredGroups) -> dict[str, float]:
        figures = [load(kind.metrics) for kind in PLUGIN_REWARDS.values() if kind.metrics is not None]
        return {name: value for of in figures for name, value in of(batch, judged.rewards, self.weights).items()}

    def judge(self, batch: RaggedBatch, step: int | None = None) -> ScoredGroups:
        """Scores of a batch that has the columns of rewards; it needs no others.

        Args:
            step: whose scores are shuffled, in a control experiment; None leaves them.
        """
        trajectories = Trajectories.of(batch)
        final_N, config = trajectories.final_N, self.config
        failed_N = failed_episodes(batch, final_N)
        columns = {name: _wide_enough(batch.sequence[REWARD_PREFIX + name][final_N]) for name in self.weights}
        rewards = {name: values_N.masked_fill(failed_N, math.nan) for name, values_N in columns.items()}
        if self.weights:
            scores_N, applies_N = combine(rewards, self.weights)
            scores_N = _wide_enough(scores_N)
        else:
            scores_N, applies_N = torch.zeros(len(final_N)), torch.zeros(len(final_N), dtype=torch.bool)
        compared_N = scores_N
        if (
            isinstance(config, GroupAlgorithm)
            and config.multi_objective_aggregation == "normalize_then_sum"
            and rewards
        ):
            group_N = batch.sequence["group"][final_N]
            of_groups = {name: normalised_in_groups(values_N, group_N) for name, values_N in rewards.items()}
            compared_N = _wide_enough(combine(of_groups, self.weights)[0])
        if self._shuffle is not None and step is not None:
            order = self._shuffle(step, len(trajectories))
            scores_N, applies_N, compared_N = scores_N[order], applies_N[order], compared_N[order]
        trajectory_T = trajectory_index(batch.with_sequence(trajectory=trajectories.owner_S))
        length_N = segment_count(masked_owner(trajectory_T, batch.token["action_mask"]), len(final_N))
        ended_N = batch.sequence["ended"][final_N]
        shaped_N = shaped_scores(config, compared_N, ended_N, length_N, self.max_new_tokens)
        return ScoredGroups(trajectories, trajectory_T, rewards, scores_N, shaped_N, applies_N, length_N, ended_N)

    def _with_baseline(self, batch: RaggedBatch) -> tuple[RaggedBatch, RaggedBatch | None]:
        """The sampled sequences with the column ``baseline`` ``[S]``, and the greedy ones, with their ``score`` and as
        they were sampled; where the method has none, the batch as it is."""
        if GREEDY not in batch.sequence:
            return batch, None
        sampled, greedy = (batch.select(part).pop(GREEDY)[0] for part in sampled_and_greedy(batch))
        judged = self.judge(greedy)
        baseline_N = judged.shaped_N.masked_fill(~judged.applies_N, math.nan)
        place = {group: n for n, group in enumerate(greedy.sequence["group"].tolist())}
        owner_S = torch.tensor([place[group] for group in sampled.sequence["group"].tolist()])
        kept = {name: greedy.token[name] for name in ("action_mask", "rollout_logprobs", "policy_version")}
        untrained = torch.zeros(greedy.num_tokens, dtype=torch.bool)
        greedy = replace(greedy, token={**kept, "loss_mask": untrained}).with_sequence(score=baseline_N)
        return sampled.with_sequence(**{BASELINE: baseline_N[owner_S]}), greedy

    def _taking_part(self, applies_N: Tensor, group_N: Tensor, baseline_N: Tensor | None) -> Tensor:
        """``[N]`` bool trajectories that are learned from: those with a score, and what it is compared with."""
        if isinstance(self.config, Distillation):
            return torch.ones_like(applies_N)
        if isinstance(self.config, GroupAlgorithm | Selection):
            labels_N = _dense(group_N)
            counts = torch.bincount(labels_N[applies_N], minlength=int(labels_N.max()) + 1)
            return applies_N & (counts[labels_N] >= 2)
        return applies_N if baseline_N is None else applies_N & ~baseline_N.isnan()

    def _step_rewards(self, batch: RaggedBatch, judged: ScoredGroups) -> Tensor | None:
        """``[T]`` weighted sum over the sources that say where their score was earned; None without such a source.

        Shuffled scores belong to other trajectories, so nothing of them was earned on the way.
        """
        steps = {name: STEP_PREFIX + name for name in self.weights if STEP_PREFIX + name in batch.token}
        if not steps or self._shuffle is not None:
            return None
        shares = effective_weights(judged.rewards, self.weights)
        owner_T = judged.trajectory_T.clamp(min=0)
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

    def _score_metrics(self, batch: RaggedBatch, judged: ScoredGroups, result: Estimate) -> dict[str, float]:
        config, applies_N, num = self.config, judged.applies_N, len(judged.applies_N)
        found: dict[str, float] = {"reward/not_applicable": float((~applies_N).sum())} if self.weights else {}
        if bool(applies_N.any()):
            valid = judged.scores_N[applies_N]
            found["reward/score_mean"] = float(valid.mean())
            found["reward/score_std"] = float(valid.std()) if len(valid) > 1 else 0.0
            found["reward/with_kl_mean"] = float(result.rewards_N[applies_N].mean())
            if isinstance(config, ScoredAlgorithm) and config.overlong is not None:
                taken_N = length_penalty(config, judged.length_N, self.max_new_tokens)
                found["reward/overlong_penalty"] = float(taken_N[applies_N].mean())
        final_N = judged.trajectories.final_N
        left_out = {
            name.removeprefix(LEFT_OUT_PREFIX): values[final_N]
            for name, values in batch.sequence.items()
            if name.startswith(LEFT_OUT_PREFIX)
        }
        found.update(source_metrics(judged.rewards, self.weights, left_out))
        group_N = _dense(batch.sequence["group"][final_N])
        num_groups = int(group_N.max()) + 1
        if self.weights and num > num_groups:
            is_constant = segment_is_constant(judged.shaped_N, torch.where(applies_N, group_N, -1), num_groups)
            found["groups/zero_variance"] = float(is_constant.float().mean())
        return found

    def _advantage_metrics(self, batch: RaggedBatch, result: Estimate) -> dict[str, float]:
        mask_T = batch.token["action_mask"]
        if not bool(mask_T.any()):
            return {}
        advantages = result.advantages_T[mask_T]
        found = {
            "advantages/mean": float(advantages.mean()),
            "advantages/std": float(advantages.std()) if len(advantages) > 1 else 0.0,
        }
        if result.returns_T is not None:
            returns, values = result.returns_T[mask_T], batch.token["values"][mask_T]
            found["returns/mean"] = float(returns.mean())
            spread = float(returns.var()) if len(returns) > 1 else 0.0
            if spread > 0:
                found["critic/explained_variance"] = 1.0 - float((returns - values).var()) / spread
        if "old_logprobs" in batch.token:
            gap = (batch.token["old_logprobs"] - batch.token["rollout_logprobs"]).abs()[mask_T]
            found["agreement/logprob_diff_mean"] = float(gap.mean())
            found["agreement/logprob_diff_max"] = float(gap.max())
        return found


def failed_episodes(batch: RaggedBatch, final_N: Tensor) -> Tensor:
    """``[N]`` bool trajectories in which the environment failed: no source scores them."""
    reasons = batch.objects.get("finish_reason")
    failed = [reasons is not None and reasons[s] == TrajectoryEnd.FAILED for s in final_N.tolist()]
    return torch.tensor(failed, dtype=torch.bool)


def sampled_and_greedy(batch: RaggedBatch) -> list[list[int]]:
    """Places of the sequences that were sampled, and of the greedy ones."""
    is_greedy = batch.sequence[GREEDY].tolist()
    return [[s for s, found in enumerate(is_greedy) if found == wanted] for wanted in (False, True)]


def sampled_only(batch: RaggedBatch) -> list[list[int]]:
    return sampled_and_greedy(batch)[:1]


def _wide_enough(scores_N: Tensor) -> Tensor:
    """``[N]`` in fp32, or in fp64 where sums of squares would leave the range of fp32."""
    return scores_N.to(torch.float64 if bool((scores_N.abs() > _LARGE).any()) else torch.float32)


def _dense(labels_N: Tensor) -> Tensor:
    return torch.unique(labels_N, return_inverse=True)[1]
