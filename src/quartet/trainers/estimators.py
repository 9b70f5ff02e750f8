"""From scores to advantages: one function per method.

Shapes: T stored tokens, N trajectories.

========================== ==================================================================================
``ppo``                    token rewards (score at the end, KL per token), GAE over action tokens, whitening
``grpo``, ``dr_grpo``,     score relative to the group, over its standard deviation if asked for
``dapo``, ``gspo``,
``cispo``
``gpg``                    the same, times the step's responses over those in groups with variance
``rloo``                   score less the summed KL, less the mean of the group's others
``opo``                    score less the mean of the group weighted by length
``reinforce_pp``           discounted returns of token rewards, whitened over the batch
``reinforce_pp_baseline``  score less the mean of the group, whitened over the batch
``remax``                  discounted returns of token rewards, less the greedy response's score
``distillation``           log-probability of the teacher less the actor's, per token
========================== ==================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quartet.algorithms.advantages import (
    broadcast_to_tokens,
    discounted_returns,
    gae,
    group_relative,
    leave_one_out,
    length_weighted,
    less_baseline,
    rescaled_by_variance,
    teacher_advantages,
    whitened_unless_equal,
)
from quartet.algorithms.rewards import completion_rewards, overlong_penalty, penalise_missing_eos, token_rewards
from quartet.algorithms.segments import (
    gather_owner,
    last_token,
    masked_owner,
    masked_whiten,
    segment_is_constant,
    segment_sum,
)
from quartet.batch.ragged import RaggedBatch
from quartet.config.algorithms import (
    GPG,
    OPO,
    PPO,
    RLOO,
    Distillation,
    GroupRelative,
    PolicyGradientConfig,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    ScoredAlgorithm,
    SelectionConfig,
)

BASELINE = "baseline"
"""Sequence column that ReMax needs: the greedy response's score after ``shaped_scores``, NaN where it has none."""


@dataclass(frozen=True)
class Scored:
    """What an estimator sees.

    ``scores_N`` raw scores (0 where none applies), ``shaped_N`` less the penalties of the recipe, ``kl_T`` the KL to
    the reference per action token (0 without a reference), ``kl_coef`` the coefficient of KL in the reward. ``group_N``
    labels the groups, ``length_N`` counts action tokens, ``ended_N`` says who ended by itself. ``baseline_N`` is the
    shaped score of the greedy response (ReMax). ``step_rewards_T`` is the part of the scores that is earned before the
    end, weighted; None: all of it lands on the last action token.
    """

    batch: RaggedBatch
    trajectory_T: Tensor
    action_mask_T: Tensor
    scores_N: Tensor
    shaped_N: Tensor
    kl_T: Tensor
    kl_coef: float
    group_N: Tensor
    length_N: Tensor
    ended_N: Tensor
    baseline_N: Tensor | None = None
    step_rewards_T: Tensor | None = None


@dataclass(frozen=True)
class Estimate:
    """``advantages_T``, ``token_rewards_T`` ``[T]``, ``returns_T`` for a critic, and the total reward ``[N]``."""

    advantages_T: Tensor
    token_rewards_T: Tensor
    returns_T: Tensor | None
    rewards_N: Tensor


# Scores and rewards --------------------------------------------------------------------------------------


def shaped_scores(
    config: PolicyGradientConfig | SelectionConfig,
    scores_N: Tensor,
    ended_N: Tensor,
    length_N: Tensor,
    max_new_tokens: int | None,
) -> Tensor:
    """``[N]`` scores less the penalties for a missing end and for length.

    Args:
        ended_N: ``[N]`` bool, True where the policy emitted its end of text.
        length_N: ``[N]`` action tokens.
        max_new_tokens: the longest response allowed; needed where ``config.overlong`` is given.
    """
    if not isinstance(config, ScoredAlgorithm):
        return scores_N
    shaped_N = penalise_missing_eos(scores_N, ended_N, config.missing_eos_penalty)
    return shaped_N - length_penalty(config, length_N, max_new_tokens)


def length_penalty(config: ScoredAlgorithm, length_N: Tensor, max_new_tokens: int | None) -> Tensor:
    """``[N]`` what ``config.overlong`` takes off the scores; 0 without it."""
    if config.overlong is None:
        return torch.zeros(len(length_N))
    if max_new_tokens is None:
        raise ValueError("overlong needs the longest response allowed, max_new_tokens")
    return overlong_penalty(length_N, max_new_tokens, config.overlong.buffer, config.overlong.penalty)


def sampled_logprobs(batch: RaggedBatch) -> Tensor:
    """``[T]`` the trainer's own log-probabilities where it computed them, else the engine's."""
    return batch.token["old_logprobs"] if "old_logprobs" in batch.token else batch.token["rollout_logprobs"]


def _token_rewards(scored: Scored) -> Tensor:
    """``[T]`` what each action token earned: steps where they were taken, the rest of the score at the end, less KL."""
    shaped_N, mask_T, owner_T = scored.shaped_N, scored.action_mask_T, scored.trajectory_T
    steps_T = scored.step_rewards_T
    if steps_T is None:
        return token_rewards(shaped_N, scored.kl_T, scored.kl_coef, mask_T, owner_T)
    steps_T = torch.where(mask_T, steps_T, 0.0)
    rest_N = shaped_N - segment_sum(steps_T, torch.where(mask_T, owner_T, -1), len(shaped_N))
    return token_rewards(rest_N, scored.kl_T, scored.kl_coef, mask_T, owner_T) + steps_T


def _grouped(scored: Scored, advantages_N: Tensor, rewards_N: Tensor) -> Estimate:
    advantages_T = broadcast_to_tokens(advantages_N, scored.trajectory_T, scored.action_mask_T)
    rewards_T = token_rewards(rewards_N, None, 0.0, scored.action_mask_T, scored.trajectory_T)
    return Estimate(advantages_T, rewards_T, None, rewards_N)


def _completion_rewards(scored: Scored) -> Tensor:
    return completion_rewards(scored.shaped_N, scored.kl_T, scored.kl_coef, scored.action_mask_T, scored.trajectory_T)


def _acting(scored: Scored) -> Tensor:
    """``[N]`` bool: trajectories that take part."""
    acting = torch.zeros(len(scored.scores_N), dtype=torch.bool)
    acting[scored.trajectory_T[scored.action_mask_T]] = True
    return acting


def _within_groups(scored: Scored, estimate: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Group baselines over the trajectories that take part; the others get 0.

    Which groups are equal is judged before KL enters, but with the recipe's penalties: these are a signal.
    """
    rewards_N = _completion_rewards(scored)
    acting = _acting(scored)
    advantages_N = torch.zeros_like(rewards_N)
    if bool(acting.any()):
        group_N = scored.group_N
        advantages_N[acting] = estimate(rewards_N[acting], group_N[acting], scored.shaped_N[acting])
    return advantages_N, rewards_N


def _summed(rewards_T: Tensor, scored: Scored) -> Tensor:
    """``[N]`` the token rewards of each trajectory."""
    return segment_sum(rewards_T, masked_owner(scored.trajectory_T, scored.action_mask_T), len(scored.scores_N))


# Baselines of groups -------------------------------------------------------------------------------------


def _group_relative(config: GroupRelative, scored: Scored) -> Estimate:
    def relative(rewards_N: Tensor, group_N: Tensor, raw_N: Tensor) -> Tensor:
        found_N = group_relative(rewards_N, group_N, config.normalise_std, raw_scores_N=raw_N)
        return rescaled_by_variance(found_N, group_N, raw_N) if isinstance(config, GPG) and config.rescale else found_N

    return _grouped(scored, *_within_groups(scored, relative))


def _rloo(scored: Scored) -> Estimate:
    advantages_N, rewards_N = _within_groups(scored, lambda r, g, raw: leave_one_out(r, g, raw_scores_N=raw))
    return _grouped(scored, advantages_N, rewards_N)


def _opo(scored: Scored) -> Estimate:
    length_N = scored.length_N[_acting(scored)]
    advantages_N, rewards_N = _within_groups(
        scored, lambda r, g, raw: length_weighted(r, length_N, g, raw_scores_N=raw)
    )
    return _grouped(scored, advantages_N, rewards_N)


def _reinforce_pp_baseline(scored: Scored) -> Estimate:
    advantages_N, rewards_N = _within_groups(scored, lambda r, g, raw: group_relative(r, g, False, raw_scores_N=raw))
    labels_N = torch.unique(scored.group_N, return_inverse=True)[1]
    acting_N = torch.where(_acting(scored), labels_N, -1)
    is_equal_N = gather_owner(segment_is_constant(scored.shaped_N, acting_N, int(labels_N.max()) + 1), acting_N)
    advantages_T = whitened_unless_equal(advantages_N, is_equal_N, scored.action_mask_T, scored.trajectory_T)
    return replace(_grouped(scored, advantages_N, rewards_N), advantages_T=advantages_T)


# Returns of tokens ---------------------------------------------------------------------------------------


def _ppo(config: PPO, scored: Scored) -> Estimate:
    rewards_T = _token_rewards(scored)
    advantages_T, returns_T = gae(
        rewards_T,
        scored.batch.token["values"],
        scored.action_mask_T,
        scored.trajectory_T,
        config.gamma,
        config.gae_lambda,
        bootstrap_N=_values_behind(scored) if config.bootstrap_truncated else None,
    )
    if config.whiten_advantages:
        advantages_T = masked_whiten(advantages_T, scored.action_mask_T)
    return Estimate(advantages_T, rewards_T, returns_T, _summed(rewards_T, scored))


def _values_behind(scored: Scored) -> Tensor:
    """``[N]`` value of the state behind the last action of each trajectory that did not end by itself, 0 for others."""
    num = len(scored.scores_N)
    last_N = last_token(masked_owner(scored.trajectory_T, scored.action_mask_T), num)
    values_N = scored.batch.token["next_values"][last_N.clamp(min=0)]
    return torch.where((last_N >= 0) & ~scored.ended_N, values_N, 0.0)


def _reinforce_pp(config: ReinforcePlusPlus, scored: Scored) -> Estimate:
    rewards_T = _token_rewards(scored)
    returns_T = discounted_returns(rewards_T, scored.action_mask_T, scored.trajectory_T, config.gamma)
    return Estimate(masked_whiten(returns_T, scored.action_mask_T), rewards_T, None, _summed(rewards_T, scored))


def _remax(config: ReMax, scored: Scored) -> Estimate:
    if scored.baseline_N is None:
        raise ValueError(f"ReMax needs the sequence column {BASELINE!r}, the scores of greedy responses")
    rewards_T = _token_rewards(scored)
    returns_T = discounted_returns(rewards_T, scored.action_mask_T, scored.trajectory_T, config.gamma)
    advantages_T = less_baseline(returns_T, scored.baseline_N, scored.action_mask_T, scored.trajectory_T)
    return Estimate(advantages_T, rewards_T, None, _summed(rewards_T, scored))


def _distillation(scored: Scored) -> Estimate:
    token = scored.batch.token
    advantages_T = teacher_advantages(token["ref_logprobs"], sampled_logprobs(scored.batch), scored.action_mask_T)
    return Estimate(advantages_T, advantages_T, None, scored.scores_N)


def estimate(config: PolicyGradientConfig, scored: Scored) -> Estimate:
    """Advantages of one step; those of trajectories that do not take part are 0."""
    match config:
        case PPO():
            return _ppo(config, scored)
        case GroupRelative():
            return _group_relative(config, scored)
        case RLOO():
            return _rloo(scored)
        case OPO():
            return _opo(scored)
        case ReinforcePlusPlus():
            return _reinforce_pp(config, scored)
        case ReinforcePlusPlusBaseline():
            return _reinforce_pp_baseline(scored)
        case ReMax():
            return _remax(config, scored)
        case Distillation():
            return _distillation(scored)
