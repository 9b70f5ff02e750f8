"""From scores to advantages, method by method.

Shapes: T stored tokens, S sequences, N trajectories.

========================== ==================================================================================
``ppo``                    token rewards (score at the end, KL per token), GAE over action tokens, whitening
``grpo``, ``dr_grpo``,     score relative to the group, over its standard deviation if asked for
``dapo``, ``gspo``,
``cispo``, ``sapo``,
``gmpo``
``gdpo``                   each source's score relative to the group over its deviation, their sum, whitened
``pass_at_k``              mean of the best of k among which the response is, less that of all, over its deviation
``optimal_token_baseline`` rewards from a token on, less a mean per position of the group, weighted by score norms
``gpg``                    the same, times the step's responses over those in groups with variance
``rloo``                   score less the summed KL, less the mean of the group's others
``opo``                    score less the mean of the group weighted by length
``reinforce_pp``           discounted returns of token rewards, whitened over the batch
``reinforce_pp_baseline``  score less the mean of the group, whitened over the batch
``remax``                  discounted returns of token rewards, less the greedy response's score
``distillation``           log-probability of the teacher less the actor's, per token
``best_of_n``              1 for the best responses of each group, learned from as demonstrations
``online_dpo``             1 and -1 for the best and the worst response of each group, a pair
========================== ==================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quartet.algorithms.advantages import (
    best_of_k,
    discounted_returns,
    gae,
    group_relative,
    leave_one_out,
    length_weighted,
    less_baseline,
    optimal_token_baseline,
    rescaled_by_variance,
    score_energy,
    teacher_advantages,
    whitened_unless_equal,
)
from quartet.algorithms.preference import best_and_worst, best_of_groups
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
    BestOfN,
    Distillation,
    GroupRelative,
    OnlineDPO,
    OptimalTokenBaseline,
    PassAtK,
    PolicyGradientConfig,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    RewardedAlgorithm,
    ScoredAlgorithm,
    Selection,
    SelectionConfig,
)
from quartet.train.preference_objectives import answer_logprobs

BASELINE = "baseline"
"""Sequence column that ReMax needs: the greedy response's score after ``shaped_scores``, NaN where it has none."""
SHARP = "sharp_logprobs"
"""Token column that ``optimal_token_baseline`` needs: log-probabilities at half the temperature of sampling."""


@dataclass(frozen=True)
class Scored:
    """What an estimator sees.

    ``owner_T`` is the trajectory of each action token, -1 for other tokens. ``scores_N`` are raw scores (0 where none
    applies), ``shaped_N`` less the penalties of the recipe, ``kl_T`` the KL to the reference per action token (0
    without a reference), ``kl_coef`` the coefficient of KL in the reward. ``group_N`` labels the groups, ``length_N``
    counts action tokens, ``ended_N`` says who ended by itself. ``baseline_N`` is the shaped score of the greedy
    response (ReMax). ``step_rewards_T`` is the part of the scores that is earned before the end, weighted; None: all of
    it lands on the last action token.
    """

    batch: RaggedBatch
    owner_T: Tensor
    scores_N: Tensor
    shaped_N: Tensor
    kl_T: Tensor
    kl_coef: float
    group_N: Tensor
    length_N: Tensor
    ended_N: Tensor
    baseline_N: Tensor | None = None
    step_rewards_T: Tensor | None = None

    @property
    def action_mask_T(self) -> Tensor:
        """``[T]`` bool: action tokens."""
        return self.owner_T >= 0

    def summed(self, values_T: Tensor) -> Tensor:
        """``[N]`` a token field over the action tokens of each trajectory."""
        return segment_sum(values_T, self.owner_T, len(self.scores_N))


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
    """``[N]`` scores within ``config.reward_clip_range``, less the penalties for a missing end and for length.

    Args:
        ended_N: ``[N]`` bool, True where the policy emitted its end of text.
        length_N: ``[N]`` action tokens.
        max_new_tokens: the longest response allowed; needed where ``config.overlong`` is given.
    """
    if not isinstance(config, ScoredAlgorithm):
        return scores_N
    if config.reward_clip_range is not None:
        scores_N = scores_N.clamp(*config.reward_clip_range)
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


# Methods -------------------------------------------------------------------------------------------------


def estimate(config: PolicyGradientConfig | SelectionConfig, scored: Scored) -> Estimate:
    """Advantages of one step; those of trajectories that do not take part are 0."""
    match config:
        case PPO():
            return _ppo(config, scored)
        case ReinforcePlusPlus() | ReMax():
            return _discounted(config, scored)
        case Distillation():
            teacher, policy = scored.batch.token["ref_logprobs"], sampled_logprobs(scored.batch)
            advantages_T = teacher_advantages(teacher, policy, scored.action_mask_T)
            return Estimate(advantages_T, advantages_T, None, scored.scores_N)
        case OptimalTokenBaseline():
            return _optimal_tokens(config, scored)
    return _within_groups(config, scored)


def _ppo(config: PPO, scored: Scored) -> Estimate:
    rewards_T = _token_rewards(scored)
    advantages_T, returns_T = gae(
        rewards_T,
        scored.batch.token["values"],
        scored.owner_T,
        config.gamma,
        config.gae_lambda,
        bootstrap_N=_values_behind(scored) if config.bootstrap_truncated else None,
    )
    advantages_T = _whitened(config, advantages_T, scored.action_mask_T)
    return Estimate(advantages_T, rewards_T, returns_T, scored.summed(rewards_T))


def _whitened(config: RewardedAlgorithm, advantages_T: Tensor, mask_T: Tensor) -> Tensor:
    """Over all action tokens of the step, as the recipe has it."""
    if not config.whiten_advantages:
        return advantages_T
    return masked_whiten(advantages_T, mask_T, scale=config.whiten_advantages is True)


def _values_behind(scored: Scored) -> Tensor:
    """``[N]`` value of the state behind the last action of each trajectory that did not end by itself, 0 for others."""
    last_N = last_token(scored.owner_T, len(scored.scores_N))
    values_N = scored.batch.token["next_values"][last_N.clamp(min=0)]
    return torch.where((last_N >= 0) & ~scored.ended_N, values_N, 0.0)


def _discounted(config: ReinforcePlusPlus | ReMax, scored: Scored) -> Estimate:
    rewards_T, owner_T = _token_rewards(scored), scored.owner_T
    returns_T = discounted_returns(rewards_T, owner_T, config.gamma)
    if isinstance(config, ReinforcePlusPlus):
        advantages_T = returns_T
    elif scored.baseline_N is None:
        raise ValueError(f"ReMax needs the sequence column {BASELINE!r}, the scores of greedy responses")
    else:
        advantages_T = less_baseline(returns_T, scored.baseline_N, owner_T)
    return Estimate(_whitened(config, advantages_T, scored.action_mask_T), rewards_T, None, scored.summed(rewards_T))


def _optimal_tokens(config: OptimalTokenBaseline, scored: Scored) -> Estimate:
    rewards_T, mask_T, owner_T = _token_rewards(scored), scored.action_mask_T, scored.owner_T
    token = scored.batch.token
    energy_T = score_energy(token["old_logprobs"], token[SHARP], mask_T)
    returns_T = discounted_returns(rewards_T, owner_T, gamma=1.0)
    advantages_T = optimal_token_baseline(returns_T, energy_T, scored.group_N, owner_T)
    acting_N = torch.bincount(owner_T[mask_T], minlength=len(scored.scores_N)) > 0
    is_equal_T = gather_owner(_in_equal_group(scored, acting_N), owner_T)
    advantages_T = torch.where(is_equal_T, 0, _whitened(config, advantages_T, mask_T))
    return Estimate(advantages_T, rewards_T, None, scored.summed(rewards_T))


def _token_rewards(scored: Scored) -> Tensor:
    """``[T]`` what each action token earned: steps where they were taken, the rest of the score at the end, less KL."""
    rest_N, steps_T = scored.shaped_N, scored.step_rewards_T
    if steps_T is not None:
        steps_T = torch.where(scored.action_mask_T, steps_T, 0.0)
        rest_N = rest_N - scored.summed(steps_T)
    found_T = token_rewards(rest_N, scored.kl_T, scored.kl_coef, scored.owner_T)
    return found_T if steps_T is None else found_T + steps_T


def _within_groups(config: PolicyGradientConfig | SelectionConfig, scored: Scored) -> Estimate:
    """Trajectories compared with the others of their group that take part; one advantage on all their tokens."""
    owner_T, group_N, shaped_N = scored.owner_T, scored.group_N, scored.shaped_N
    if isinstance(config, Selection):
        rewards_N = shaped_N  # KL takes no part in what is best
    else:
        rewards_N = completion_rewards(shaped_N, scored.kl_T, scored.kl_coef, owner_T)
    acting_N = torch.zeros(len(scored.scores_N), dtype=torch.bool)
    acting_N[owner_T[scored.action_mask_T]] = True
    advantages_N = torch.zeros_like(rewards_N)
    if bool(acting_N.any()):
        columns = (rewards_N, group_N, shaped_N, scored.length_N)
        advantages_N[acting_N] = _group_advantages(config, *(column[acting_N] for column in columns))
    if isinstance(config, RewardedAlgorithm) and config.whiten_advantages:
        is_equal_N, scale = _in_equal_group(scored, acting_N), config.whiten_advantages is True
        advantages_T = whitened_unless_equal(advantages_N, is_equal_N, owner_T, scale=scale)
    else:
        advantages_T = gather_owner(advantages_N, owner_T)
    return Estimate(advantages_T, token_rewards(rewards_N, None, 0.0, owner_T), None, rewards_N)


def _in_equal_group(scored: Scored, acting_N: Tensor) -> Tensor:
    """``[N]`` bool: takes part in a group whose scores are all equal."""
    labels_N = torch.unique(scored.group_N, return_inverse=True)[1]
    compared_N = torch.where(acting_N, labels_N, -1)
    is_constant = segment_is_constant(scored.shaped_N, compared_N, int(labels_N.max()) + 1)
    return gather_owner(is_constant, compared_N)


def _group_advantages(
    config: PolicyGradientConfig | SelectionConfig,
    rewards_N: Tensor,
    group_N: Tensor,
    shaped_N: Tensor,
    length_N: Tensor,
) -> Tensor:
    """``[N]`` of trajectories that take part.

    Which groups are equal is judged before KL enters, but with the recipe's penalties: these are a signal.
    """
    match config:
        case PassAtK():
            return best_of_k(rewards_N, group_N, config.k, config.normalise_std, raw_scores_N=shaped_N)
        case GroupRelative():
            found_N = group_relative(rewards_N, group_N, config.normalise_std, raw_scores_N=shaped_N)
            is_rescaled = isinstance(config, GPG) and config.rescale
            return rescaled_by_variance(found_N, group_N, shaped_N) if is_rescaled else found_N
        case ReinforcePlusPlusBaseline():
            return group_relative(rewards_N, group_N, False, raw_scores_N=shaped_N)
        case RLOO():
            return leave_one_out(rewards_N, group_N, raw_scores_N=shaped_N)
        case OPO():
            return length_weighted(rewards_N, length_N, group_N, raw_scores_N=shaped_N)
        case BestOfN():
            is_kept_N = best_of_groups(shaped_N, group_N, config.keep)
            if config.min_score is not None:
                is_kept_N &= shaped_N >= config.min_score
            return is_kept_N.to(shaped_N.dtype)
        case OnlineDPO():
            return best_and_worst(shaped_N, group_N).to(shaped_N.dtype)
    raise TypeError(f"{type(config).__name__} does not compare trajectories within groups")


# Online preference ---------------------------------------------------------------------------------------


def learned_from(config: Selection, batch: RaggedBatch) -> RaggedBatch:
    """The selected sequences of an experience; all of them without loss tokens where nothing was selected.

    Pairs have the sequence fields ``pair``, ``chosen``, ``margin`` (the difference of their total rewards) and, where
    the loss has a reference, ``ref_logprobs``.
    """
    advantages_T, owner_T = batch.token["advantages"], batch.sequence_index()
    is_trained_T = batch.token["loss_mask"] & (advantages_T != 0)
    batch = batch.with_token(loss_mask=is_trained_T)
    trained = torch.unique(owner_T[is_trained_T]).tolist()
    if isinstance(config, OnlineDPO):
        groups = batch.sequence["group"][trained].tolist()
        # Without responses whose partner has no token to learn from.
        trained = [s for s, group in zip(trained, groups, strict=True) if groups.count(group) == 2]
    if not trained:
        return batch.with_token(loss_mask=torch.zeros_like(is_trained_T))
    batch = batch.select(trained)
    return _as_pairs(batch) if isinstance(config, OnlineDPO) else batch


def _as_pairs(batch: RaggedBatch) -> RaggedBatch:
    trained_T = masked_owner(batch.sequence_index(), batch.token["loss_mask"])
    sign_S = segment_sum(batch.token["advantages"], trained_T, len(batch)).sign()
    pair_S = torch.unique(batch.sequence["group"], return_inverse=True)[1]
    margin_P = segment_sum(sign_S * batch.sequence["total_reward"], pair_S, len(batch) // 2)
    fields = {"pair": pair_S, "chosen": sign_S > 0, "margin": margin_P[pair_S]}
    if "ref_logprobs" in batch.token:
        fields["ref_logprobs"] = answer_logprobs(batch.token["ref_logprobs"], batch)[0]
    return batch.with_sequence(**fields)
