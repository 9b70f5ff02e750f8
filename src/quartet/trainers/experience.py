"""From scored chunks to the experience a step learns from: rewards, baselines, advantages.

Shapes: T stored tokens, S sequences, N trajectories (of one sequence each, or several where an environment rewrote the
state).

What an advantage is, is the method's business (``quartet.trainers.experience``). Baselines need whole groups and
whitening the whole batch, so this runs once per step on scalar columns.

The greedy baseline (Li et al. 2024, ReMax) is what the most likely response would have scored: each group has one
greedy trajectory beside those it is trained on. It travels in their chunk and is scored by the rewards, apart from the
others, and by nothing else: no reference, critic or actor reads it.

From scores to advantages, method by method.

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

Which tokens of a step learn, and how, by what the trainer's policy says of all of them before the first update.

On scalar columns of the whole step, where advantages are computed: no mini-batch, micro-batch or rank changes a choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quartet.algorithms.advantages import (
    completion_rewards,
    discounted_returns,
    gae,
    group_relative_advantages,
    leave_one_out_advantages,
    length_weighted_advantages,
    normalise_in_groups,
    optimal_token_baseline,
    overlong_penalty,
    pass_at_k_advantages,
    penalise_missing_eos,
    rescale_by_informative_groups,
    score_energy,
    subtract_baseline,
    teacher_advantages,
    token_rewards,
    whiten_unless_equal,
)
from quartet.algorithms.losses import SampledTokens, adaptive_kl_coef, kl_estimate, within_ratio_limits
from quartet.algorithms.preference import best_and_worst, best_of_groups_mask
from quartet.algorithms.segments import (
    covariance_terms,
    gather_owner,
    last_token_positions,
    masked_mean,
    masked_owner,
    masked_whiten,
    sample_between_mask,
    segment_count,
    segment_is_constant,
    segment_sum,
    top_fraction_mask,
)
from quartet.batch.ragged import ColumnSet, RaggedBatch, join_columns
from quartet.batch.trajectory import REWARD_PREFIX, STEP_PREFIX, Trajectories, TrajectoryEnd
from quartet.config.algorithms import (
    GPG,
    OPO,
    PPO,
    RLOO,
    BestOfN,
    ClipCovLoss,
    Distillation,
    GroupAlgorithm,
    GroupRelativeAlgorithm,
    KLCovLoss,
    OnlineDPO,
    OptimalTokenBaseline,
    PassAtK,
    PolicyGradient,
    PolicyGradientConfig,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    RejectionConfig,
    ReMax,
    RewardedAlgorithm,
    ScoredAlgorithm,
    SelectionAlgorithm,
    SelectionConfig,
    kl_term,
)
from quartet.config.common import StrictModel
from quartet.config.plugins import load_object, plugin_entries
from quartet.rewards.source import LEFT_OUT_PREFIX, combine_scores, effective_weights, source_metrics
from quartet.schedule.groups import GREEDY
from quartet.schedule.iteration import Chunk
from quartet.train.objectives import HIGH_COVARIANCE, HIGH_ENTROPY, answer_logprobs, trajectory_index

BASELINE = "baseline"
"""Sequence column that ReMax needs: the greedy response's score after ``shaped_scores``, NaN where it has none."""
SHARP = "sharp_logprobs"
"""Token column that ``optimal_token_baseline`` needs: log-probabilities at half the temperature of sampling."""


@dataclass(frozen=True)
class ScoredBatch:
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
        """Sums a token field over the action tokens of each trajectory, ``[N]``."""
        return segment_sum(values_T, self.owner_T, len(self.scores_N))


@dataclass(frozen=True)
class AdvantageEstimate:
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
    """Returns ``[N]`` scores within ``config.reward_clip_range``, less the penalties for a missing end and for length.

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
    """Returns what ``config.overlong`` takes off the scores, ``[N]``; 0 without it."""
    if config.overlong is None:
        return torch.zeros(len(length_N))
    assert max_new_tokens is not None, "a run has a longest response"
    return overlong_penalty(length_N, max_new_tokens, config.overlong.buffer, config.overlong.penalty)


def sampled_logprobs(batch: RaggedBatch) -> Tensor:
    """Returns the trainer's own log-probabilities ``[T]`` where it computed them, else the engine's."""
    return batch.token["old_logprobs"] if "old_logprobs" in batch.token else batch.token["rollout_logprobs"]


# Methods -------------------------------------------------------------------------------------------------


def estimate_advantages(config: PolicyGradientConfig | SelectionConfig, scored: ScoredBatch) -> AdvantageEstimate:
    """Computes the advantages of one step; those of trajectories that do not take part are 0."""
    match config:
        case PPO():
            return _ppo(config, scored)
        case ReinforcePlusPlus() | ReMax():
            return _discounted(config, scored)
        case Distillation():
            teacher, policy = scored.batch.token["ref_logprobs"], sampled_logprobs(scored.batch)
            advantages_T = teacher_advantages(teacher, policy, scored.action_mask_T)
            return AdvantageEstimate(advantages_T, advantages_T, None, scored.scores_N)
        case OptimalTokenBaseline():
            return _optimal_tokens(config, scored)
    return _within_groups(config, scored)


def _ppo(config: PPO, scored: ScoredBatch) -> AdvantageEstimate:
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
    return AdvantageEstimate(advantages_T, rewards_T, returns_T, scored.summed(rewards_T))


def _whitened(config: RewardedAlgorithm, advantages_T: Tensor, mask_T: Tensor) -> Tensor:
    """Whitens advantages over all action tokens of the step, as the recipe has it."""
    if not config.whiten_advantages:
        return advantages_T
    return masked_whiten(advantages_T, mask_T, scale=config.whiten_advantages is True)


def _values_behind(scored: ScoredBatch) -> Tensor:
    """Returns the value ``[N]`` of the state behind the last action of each trajectory that did not end by itself, 0
    for others."""
    last_N = last_token_positions(scored.owner_T, len(scored.scores_N))
    values_N = scored.batch.token["next_values"][last_N.clamp(min=0)]
    return torch.where((last_N >= 0) & ~scored.ended_N, values_N, 0.0)


def _discounted(config: ReinforcePlusPlus | ReMax, scored: ScoredBatch) -> AdvantageEstimate:
    rewards_T, owner_T = _token_rewards(scored), scored.owner_T
    returns_T = discounted_returns(rewards_T, owner_T, config.gamma)
    if isinstance(config, ReinforcePlusPlus):
        advantages_T = returns_T
    else:
        assert scored.baseline_N is not None, "ReMax has greedy responses"
        advantages_T = subtract_baseline(returns_T, scored.baseline_N, owner_T)
    return AdvantageEstimate(
        _whitened(config, advantages_T, scored.action_mask_T), rewards_T, None, scored.summed(rewards_T)
    )


def _optimal_tokens(config: OptimalTokenBaseline, scored: ScoredBatch) -> AdvantageEstimate:
    rewards_T, mask_T, owner_T = _token_rewards(scored), scored.action_mask_T, scored.owner_T
    token = scored.batch.token
    energy_T = score_energy(token["old_logprobs"], token[SHARP], mask_T)
    returns_T = discounted_returns(rewards_T, owner_T, gamma=1.0)
    advantages_T = optimal_token_baseline(returns_T, energy_T, scored.group_N, owner_T)
    acting_N = torch.bincount(owner_T[mask_T], minlength=len(scored.scores_N)) > 0
    is_equal_T = gather_owner(_in_equal_group(scored, acting_N), owner_T)
    advantages_T = torch.where(is_equal_T, 0, _whitened(config, advantages_T, mask_T))
    return AdvantageEstimate(advantages_T, rewards_T, None, scored.summed(rewards_T))


def _token_rewards(scored: ScoredBatch) -> Tensor:
    """Returns what each action token earned, ``[T]``: steps where they were taken, the rest of the score at the end,
    less KL."""
    rest_N, steps_T = scored.shaped_N, scored.step_rewards_T
    if steps_T is not None:
        steps_T = torch.where(scored.action_mask_T, steps_T, 0.0)
        rest_N = rest_N - scored.summed(steps_T)
    found_T = token_rewards(rest_N, scored.kl_T, scored.kl_coef, scored.owner_T)
    return found_T if steps_T is None else found_T + steps_T


def _within_groups(config: PolicyGradientConfig | SelectionConfig, scored: ScoredBatch) -> AdvantageEstimate:
    """Compares trajectories with the others of their group that take part; one advantage on all their tokens."""
    owner_T, group_N, shaped_N = scored.owner_T, scored.group_N, scored.shaped_N
    if isinstance(config, SelectionAlgorithm):
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
        advantages_T = whiten_unless_equal(advantages_N, is_equal_N, owner_T, scale=scale)
    else:
        advantages_T = gather_owner(advantages_N, owner_T)
    return AdvantageEstimate(advantages_T, token_rewards(rewards_N, None, 0.0, owner_T), None, rewards_N)


def _in_equal_group(scored: ScoredBatch, acting_N: Tensor) -> Tensor:
    """Tells of each trajectory, ``[N]`` bool, whether it takes part in a group whose scores are all equal."""
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
    """Returns the advantages ``[N]`` of trajectories that take part.

    Which groups are equal is judged before KL enters, but with the recipe's penalties: these are a signal.
    """
    match config:
        case PassAtK():
            return pass_at_k_advantages(rewards_N, group_N, config.k, config.normalise_std, raw_scores_N=shaped_N)
        case GroupRelativeAlgorithm():
            found_N = group_relative_advantages(rewards_N, group_N, config.normalise_std, raw_scores_N=shaped_N)
            is_rescaled = isinstance(config, GPG) and config.rescale
            return rescale_by_informative_groups(found_N, group_N, shaped_N) if is_rescaled else found_N
        case ReinforcePlusPlusBaseline():
            return group_relative_advantages(rewards_N, group_N, False, raw_scores_N=shaped_N)
        case RLOO():
            return leave_one_out_advantages(rewards_N, group_N, raw_scores_N=shaped_N)
        case OPO():
            return length_weighted_advantages(rewards_N, length_N, group_N, raw_scores_N=shaped_N)
        case BestOfN():
            is_kept_N = best_of_groups_mask(shaped_N, group_N, config.keep)
            if config.min_score is not None:
                is_kept_N &= shaped_N >= config.min_score
            return is_kept_N.to(shaped_N.dtype)
        case OnlineDPO():
            return best_and_worst(shaped_N, group_N).to(shaped_N.dtype)
    raise TypeError(f"{type(config).__name__} does not compare trajectories within groups")


# Online preference ---------------------------------------------------------------------------------------


def select_learned(config: SelectionAlgorithm, batch: RaggedBatch) -> RaggedBatch:
    """Returns the selected sequences of an experience; all of them without loss tokens where nothing was selected.

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


ENTROPIES = "old_entropies"
"""Token column that ``top_entropy_quantile`` needs: entropies under the trainer's policy when the step began."""


def with_selected_tokens(
    config: StrictModel, batch: RaggedBatch, num_trajectories: int, draw: int
) -> tuple[RaggedBatch, dict[str, float]]:
    """Returns the batch with ``loss_mask`` less the responses that were rejected, and the columns by which the loss
    tells tokens apart; and the step's figures about them.

    Args:
        batch: with ``old_logprobs`` where the recipe asks for a choice, ``advantages`` and the field ``trajectory``.
        draw: seed of what is drawn.
    """
    metrics: dict[str, float] = {}
    if not isinstance(config, PolicyGradient):
        return batch, metrics
    token, correction = batch.token, config.off_policy
    if correction is not None and correction.rejection is not None:
        owner_T = masked_owner(trajectory_index(batch), token["loss_mask"])
        kept_N = _kept(correction.rejection, batch, owner_T, num_trajectories)
        learned = torch.unique(owner_T[owner_T >= 0])
        metrics["correction/rejected_frac"] = float((~kept_N[learned]).float().mean()) if len(learned) else 0.0
        batch = batch.with_token(loss_mask=(owner_T >= 0) & gather_owner(kept_N, owner_T))
    mask_T, loss = batch.token["loss_mask"], config.policy_loss
    num_tokens = max(1, int(mask_T.sum()))
    if config.top_entropy_quantile < 1:
        chosen_T = top_fraction_mask(token[ENTROPIES], mask_T, config.top_entropy_quantile)
        batch = batch.with_token(**{HIGH_ENTROPY: chosen_T})
        metrics["policy/high_entropy_frac"] = float(chosen_T.sum()) / num_tokens
    if isinstance(loss, ClipCovLoss | KLCovLoss):
        products_T = covariance_terms(token["old_logprobs"], token["advantages"], mask_T)
        if isinstance(loss, KLCovLoss):
            chosen_T = top_fraction_mask(products_T, mask_T, loss.kl_cov_ratio)
        else:
            keys_T = torch.rand(len(mask_T), generator=torch.Generator().manual_seed(draw), dtype=torch.float64)
            limits = (loss.clip_cov_lb, loss.clip_cov_ub)
            chosen_T = sample_between_mask(products_T, mask_T, *limits, loss.clip_cov_ratio, keys_T)
        batch = batch.with_token(**{HIGH_COVARIANCE: chosen_T})
        metrics["policy/high_covariance_frac"] = float(chosen_T.sum()) / num_tokens
    return batch, metrics


def _kept(config: RejectionConfig, batch: RaggedBatch, owner_T: Tensor, num_trajectories: int) -> Tensor:
    """Tells of each trajectory, ``[N]`` bool, whether it is kept."""
    logprobs = batch.token["old_logprobs"], batch.token["rollout_logprobs"]
    sampled = SampledTokens(*logprobs, owner_T >= 0, owner_T, num_trajectories)
    lower = config.lower if config.lower is not None else 1 / config.upper
    return within_ratio_limits(sampled, statistic=config.statistic, lower=lower, upper=config.upper)


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


class ExperienceAssembler:
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
        batch = RaggedBatch.concat([join_columns(chunk.data, *columns) for chunk, columns in chunks])
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
        scored = ScoredBatch(
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
        result = estimate_advantages(self.config, scored)
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
        figures = [load_object(kind.metrics) for kind in plugin_entries("rewards").values() if kind.metrics is not None]
        return {name: value for of in figures for name, value in of(batch, judged.rewards, self.weights).items()}

    def judge(self, batch: RaggedBatch, step: int | None = None) -> ScoredGroups:
        """Computes the scores of a batch that has the columns of rewards; it needs no others.

        Args:
            step: whose scores are shuffled, in a control experiment; None leaves them.
        """
        trajectories = Trajectories.of(batch)
        final_N, config = trajectories.final_N, self.config
        failed_N = failed_episodes(batch, final_N)
        columns = {name: batch.sequence[REWARD_PREFIX + name][final_N].float() for name in self.weights}
        rewards = {name: values_N.masked_fill(failed_N, math.nan) for name, values_N in columns.items()}
        if self.weights:
            scores_N, applies_N = combine_scores(rewards, self.weights)
            scores_N = scores_N.float()
        else:
            scores_N, applies_N = torch.zeros(len(final_N)), torch.zeros(len(final_N), dtype=torch.bool)
        compared_N = scores_N
        if (
            isinstance(config, GroupAlgorithm)
            and config.multi_objective_aggregation == "normalize_then_sum"
            and rewards
        ):
            group_N = batch.sequence["group"][final_N]
            of_groups = {name: normalise_in_groups(values_N, group_N) for name, values_N in rewards.items()}
            compared_N = combine_scores(of_groups, self.weights)[0].float()
        if self._shuffle is not None and step is not None:
            order = self._shuffle(step, len(trajectories))
            scores_N, applies_N, compared_N = scores_N[order], applies_N[order], compared_N[order]
        trajectory_T = trajectory_index(batch.with_sequence(trajectory=trajectories.owner_S))
        length_N = segment_count(masked_owner(trajectory_T, batch.token["action_mask"]), len(final_N))
        ended_N = batch.sequence["ended"][final_N]
        shaped_N = shaped_scores(config, compared_N, ended_N, length_N, self.max_new_tokens)
        return ScoredGroups(trajectories, trajectory_T, rewards, scores_N, shaped_N, applies_N, length_N, ended_N)

    def _with_baseline(self, batch: RaggedBatch) -> tuple[RaggedBatch, RaggedBatch | None]:
        """Returns the sampled sequences with the column ``baseline`` ``[S]``, and the greedy ones, with their ``score``
        and as they were sampled; where the method has none, the batch as it is."""
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
        """Tells which trajectories are learned from, ``[N]`` bool: those with a score, and what it is compared with."""
        if isinstance(self.config, Distillation):
            return torch.ones_like(applies_N)
        if isinstance(self.config, GroupAlgorithm | SelectionAlgorithm):
            labels_N = _dense(group_N)
            counts = torch.bincount(labels_N[applies_N], minlength=int(labels_N.max()) + 1)
            return applies_N & (counts[labels_N] >= 2)
        return applies_N if baseline_N is None else applies_N & ~baseline_N.isnan()

    def _step_rewards(self, batch: RaggedBatch, judged: ScoredGroups) -> Tensor | None:
        """Returns the weighted sum ``[T]`` over the sources that say where their score was earned; None without such a
        source.

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

    def _score_metrics(self, batch: RaggedBatch, judged: ScoredGroups, result: AdvantageEstimate) -> dict[str, float]:
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

    def _advantage_metrics(self, batch: RaggedBatch, result: AdvantageEstimate) -> dict[str, float]:
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
    """Tells in which trajectories the environment failed, ``[N]`` bool: no source scores them."""
    reasons = batch.objects.get("finish_reason")
    failed = [reasons is not None and reasons[s] == TrajectoryEnd.FAILED for s in final_N.tolist()]
    return torch.tensor(failed, dtype=torch.bool)


def sampled_and_greedy(batch: RaggedBatch) -> list[list[int]]:
    """Returns the places of the sequences that were sampled, and of the greedy ones."""
    is_greedy = batch.sequence[GREEDY].tolist()
    return [[s for s, found in enumerate(is_greedy) if found == wanted] for wanted in (False, True)]


def sampled_only(batch: RaggedBatch) -> list[list[int]]:
    return sampled_and_greedy(batch)[:1]


def _dense(labels_N: Tensor) -> Tensor:
    return torch.unique(labels_N, return_inverse=True)[1]
