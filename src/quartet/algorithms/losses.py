"""Losses of critics, demonstrations and reward models, and the terms beside a policy loss.

Shape suffixes: T stored tokens of a micro-batch, P pairs.

Each per-token loss takes the tokens that have loss (``LossTokens``; their owners are trajectories or sequences in the
mini-batch's numbering) and returns the micro-batch's share of the mini-batch's loss. Masked positions may hold
anything. Figures beside the loss are detached *sums*, to be added over micro-batches and ranks and divided by the
mini-batch's counts.

Estimators of the Kullback-Leibler divergence from one sample per token, and the coefficient that follows it.

Shape suffixes: T stored tokens.

From per-token losses to one number, independent of how the mini-batch was cut.

Shape suffixes: T stored tokens of a micro-batch or mini-batch, N trajectories of the mini-batch.

=============================== ===============================================================
``token_mean``                  sum of all / number of loss tokens
``sequence_mean_token_mean``    mean over sequences of (sum / number of its loss tokens)
``sequence_mean_token_sum``     mean over sequences of its sum
``sequence_mean_token_sum_norm`` mean over sequences of (sum / ``norm``), ``norm`` a constant
=============================== ===============================================================

Denominators are those of the whole mini-batch, so micro-batches *add up* to the mini-batch's loss. "Sequence"
is the owner that the caller's index names: the trajectory where one has several sequences. Those without loss
tokens are not counted.

Policy losses: what an actor minimises, given advantages.

Shape suffixes: T stored tokens of a micro-batch, N trajectories of the mini-batch.

With A the advantage, ``r_t = exp(policy - old)`` a token's ratio and ``s`` a sequence's:

========================= ======================================= ===========================================
``policy_loss``           ``max(-A r_t, -A clip(r_t))``           PPO, GRPO, DAPO, token-level RLOO
``sequence_policy_loss``  ``max(-A s, -A clip(s))``, ``s = Π r_t`` RLOO as published
``gspo_loss``             the same, ``s = (Π r_t)^(1/length)``    GSPO
``cispo_loss``            ``-A stop(clip(r_t)) policy``           CISPO
``sapo_loss``             ``-A 4/τ sigmoid(τ (r_t - 1))``         SAPO
``gmpo_loss``             ``-A s``, ``s = (Π clip(r_t))^(1/len)`` GMPO
``kl_cov_loss``           ``-A r_t``, and ``|log r_t|`` for some  KL-Cov
``reinforce_loss``        ``-A policy``                           REINFORCE, GPG, ReMax, distillation
========================= ======================================= ===========================================

Each takes a micro-batch (``PolicyTokens``) and returns its share of the mini-batch's loss. Figures beside the loss are
detached *sums*, to be added over micro-batches and ranks and divided by the mini-batch's counts. All log-ratios are
clamped to ±20 before ``exp``.

Importance weights for tokens that another policy, or another implementation of it, sampled.

Shape suffixes: T stored tokens, N trajectories.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from quartet.algorithms.segments import (
    gather_owner,
    masked_mean,
    masked_owner,
    reduction_dtype,
    segment_count,
    segment_mean,
    segment_sum,
    to_reduction_dtype,
    zero_unmasked,
)

KLKind = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before ``exp``, so that no ratio overflows."""


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """Returns ``exp`` of a log-ratio clamped to ±20; no gradient beyond."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_estimate(logprobs_T: Tensor, ref_logprobs_T: Tensor, kind: KLKind, *, mask_T: Tensor | None = None) -> Tensor:
    """Returns ``[T]`` an estimate of KL(policy ‖ reference) per token, for tokens sampled from the policy.

    With ``d = logprobs - ref_logprobs`` (Schulman, "Approximating KL divergence", 2020):
    k1 ``d`` (unbiased, any sign), k2 ``d² / 2`` (biased, low variance),
    k3 ``exp(-d) - 1 + d`` (unbiased, never negative; only the exponent is clamped to ±20).

    Args:
        logprobs_T: ``[T]`` log-probabilities of the tokens under the policy they were sampled from.
        ref_logprobs_T: ``[T]`` under the reference.
        kind: the estimator.
        mask_T: ``[T]`` bool; elsewhere the result is 0, whatever the inputs hold there. Default: all tokens.

    Returns:
        ``[T]`` fp32 (fp64 for fp64 input), differentiable in both arguments.
    """
    dtype = torch.promote_types(reduction_dtype(logprobs_T), reduction_dtype(ref_logprobs_T))
    policy_T, ref_T = logprobs_T.to(dtype), ref_logprobs_T.to(dtype)
    if mask_T is not None:
        policy_T, ref_T = torch.where(mask_T, policy_T, 0), torch.where(mask_T, ref_T, 0)
    log_ratio_T = policy_T - ref_T
    match kind:
        case "k1":
            return log_ratio_T
        case "k2":
            return 0.5 * log_ratio_T.square()
        case "k3":
            # expm1 keeps the digits that exp(x) - 1 loses where the two policies nearly agree.
            return (-log_ratio_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1() + log_ratio_T


MAX_ERROR = 0.2
"""The relative error of the observed KL counts at most this much per update."""


def adaptive_kl_coef(coef: float, observed: float, target: float, horizon: float, num_samples: int) -> float:
    """Returns the KL coefficient after a step (Ziegler et al., 2019, section 2.2).

    ``coef * (1 + clip(observed / target - 1, ±0.2) * num_samples / horizon)``: proportional control in log
    space.

    Args:
        coef: the coefficient of the step.
        observed: the step's mean KL per trajectory, in nats, in the unit of ``target``.
        target: the KL to hold, above 0.
        horizon: number of samples over which the full error is applied, above 0.
        num_samples: trajectories of the step.
    """
    error = min(max(observed / target - 1.0, -MAX_ERROR), MAX_ERROR)
    return coef * (1.0 + error * num_samples / horizon)


Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
]


@dataclass(frozen=True)
class AggregationDenominators:
    """What a mini-batch's loss is divided by.

    ``num_tokens`` and ``num_sequences`` (scalars, int64) are sums: with several data-parallel ranks, replace
    them by their sums over ranks. ``tokens_per_sequence`` ``[N]`` int64 is addressed by the owner index of
    the micro-batches, which therefore keeps the mini-batch's numbering. ``norm`` is the constant of
    ``sequence_mean_token_sum_norm``; ``mean_weight`` (scalar) divides importance weights (``off_policy``).
    """

    num_tokens: Tensor
    num_sequences: Tensor
    tokens_per_sequence: Tensor
    norm: float | None = None
    mean_weight: Tensor | None = None


def aggregation_denominators(
    loss_mask_T: Tensor, owner_T: Tensor, num_owners: int, *, norm: float | None = None
) -> AggregationDenominators:
    """Returns the denominators of a whole mini-batch.

    Args:
        loss_mask_T: ``[T]`` bool.
        owner_T: ``[T]`` int64 owner index; tokens owned by none never count.
        num_owners: N.
        norm: tokens, above 0 (usually the longest response allowed); needed by
            ``sequence_mean_token_sum_norm``.
    """
    count_N = segment_count(masked_owner(owner_T, loss_mask_T), num_owners)
    return AggregationDenominators(count_N.sum(), (count_N > 0).sum(), count_N, norm)


@dataclass(frozen=True)
class LossTokens:
    """The tokens of a micro-batch that have loss, and how their losses become one number.

    Attributes:
        loss_mask_T: ``[T]`` bool.
        owner_T: ``[T]`` int64 owner in the mini-batch's numbering, -1 for none; -1, too, where the mask is False.
        denominators: of the whole mini-batch.
        aggregation: one of the four.
    """

    loss_mask_T: Tensor
    owner_T: Tensor
    denominators: AggregationDenominators
    aggregation: Aggregation = "token_mean"

    def __post_init__(self) -> None:
        object.__setattr__(self, "owner_T", masked_owner(self.owner_T, self.loss_mask_T))

    @cached_property
    def mask_T(self) -> Tensor:
        """``[T]`` bool: in the loss mask, and owned."""
        return self.owner_T >= 0


def aggregate_loss(values_T: Tensor, tokens: LossTokens) -> Tensor:
    """Returns a micro-batch's share of the mini-batch's loss; the shares of all micro-batches add up to it.

    Args:
        values_T: ``[T]`` per-token losses of the micro-batch; elsewhere they are ignored, whatever they are.
        tokens: which have loss.

    Returns:
        Scalar fp32 (fp64 for fp64 input), 0 where there are no loss tokens.
    """
    kept_T, denominators = zero_unmasked(values_T, tokens.mask_T), tokens.denominators
    num_sequences = denominators.num_sequences.clamp(min=1)
    match tokens.aggregation:
        case "token_mean":
            return kept_T.sum() / denominators.num_tokens.clamp(min=1)
        case "sequence_mean_token_mean":
            count_T = gather_owner(denominators.tokens_per_sequence, tokens.owner_T).clamp(min=1)
            return (kept_T / count_T).sum() / num_sequences
        case "sequence_mean_token_sum":
            return kept_T.sum() / num_sequences
        case "sequence_mean_token_sum_norm":
            if denominators.norm is None:
                raise ValueError("sequence_mean_token_sum_norm needs denominators with a norm")
            return kept_T.sum() / (num_sequences * denominators.norm)


@dataclass(frozen=True)
class ValueLossOutput:
    """``loss`` with gradient, the number of loss tokens, and those where the clipped branch was larger."""

    loss: Tensor
    num_tokens: Tensor
    num_clipped: Tensor


@dataclass(frozen=True)
class PairwiseLossOutput:
    """``loss`` with gradient; pairs whose chosen side scores higher; sum of ``chosen - rejected``."""

    loss: Tensor
    num_correct: Tensor
    margin_sum: Tensor


def kl_loss(policy_logprobs_T: Tensor, ref_logprobs_T: Tensor, tokens: LossTokens, kind: KLKind) -> Tensor:
    """Returns the aggregated KL estimate with gradient, to be added to a policy loss times ``kl_coef``.

    The gradient of k1 has expectation 0; k2's is that of the true KL on-policy; k3's is an approximation of
    it.
    """
    return aggregate_loss(kl_estimate(policy_logprobs_T, ref_logprobs_T.detach(), kind, mask_T=tokens.mask_T), tokens)


def value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, tokens: LossTokens, *, clip_eps: float | None
) -> ValueLossOutput:
    """Computes ``0.5 * max((V - R)², (clip(V, old ± clip_eps) - R)²)`` per token; unclipped where ``clip_eps`` is None.

    Args:
        values_T: ``[T]`` with gradient.
        old_values_T: ``[T]`` constants, the critic's values when the step began.
        returns_T: ``[T]`` constants.
        tokens: see the module.
        clip_eps: above 0, in the unit of the values.
    """
    mask_T = tokens.mask_T
    value_T, return_T = zero_unmasked(values_T, mask_T), zero_unmasked(returns_T, mask_T).detach()
    loss_T = unclipped_T = (value_T - return_T).square()
    if clip_eps is not None:
        old_T = zero_unmasked(old_values_T, mask_T).detach()
        clipped_T = (value_T.clamp(old_T - clip_eps, old_T + clip_eps) - return_T).square()
        loss_T = torch.maximum(unclipped_T, clipped_T)
    loss = 0.5 * aggregate_loss(loss_T, tokens)
    return ValueLossOutput(loss, mask_T.sum(), (mask_T & (loss_T > unclipped_T)).sum())


def sft_loss(policy_logprobs_T: Tensor, tokens: LossTokens) -> Tensor:
    """Returns the negative log-likelihood of the demonstrations' loss tokens, in nats."""
    return aggregate_loss(-policy_logprobs_T, tokens)


def pairwise_reward_loss(
    chosen_P: Tensor, rejected_P: Tensor, num_pairs: int, *, margin_P: Tensor | None = None, centring: float = 0.0
) -> PairwiseLossOutput:
    """Computes the Bradley-Terry loss of preference pairs (Ouyang et al., 2022, eq. 1), a micro-batch's share of the
    mean.

    Per pair ``-logsigmoid(chosen - rejected - margin) + centring * (chosen + rejected)²``. The margin is that
    of Touvron et al., 2023 (Llama 2), eq. 2; the centring term that of Eisenstein et al., 2023, eq. 2: it
    fixes the otherwise free offset of the scores without touching their difference.

    Args:
        chosen_P: ``[P]`` scores with gradient.
        rejected_P: ``[P]`` scores with gradient.
        num_pairs: pairs of the whole mini-batch, the denominator.
        margin_P: ``[P]`` how far apart a pair should be, or None for 0.
        centring: coefficient of the centring term, at least 0.
    """
    chosen, rejected = to_reduction_dtype(chosen_P), to_reduction_dtype(rejected_P)
    difference = chosen - rejected
    target = difference if margin_P is None else difference - margin_P.detach().to(difference.dtype)
    loss_P = -logsigmoid(target) + centring * (chosen + rejected).square()
    return PairwiseLossOutput(loss_P.sum() / max(num_pairs, 1), (difference > 0).sum(), difference.detach().sum())


@dataclass(frozen=True)
class PolicyTokens:
    """What policy losses of a micro-batch are made of. Masked positions may hold anything.

    Attributes:
        logprobs_T: ``[T]`` under the policy, with gradient.
        old_logprobs_T: ``[T]`` constants, under the policy when the step began.
        advantages: ``[T]`` constants; ``[N]`` for ``sequence_policy_loss``.
        tokens: those that have loss; their owners are trajectories in the mini-batch's numbering.
        weights_T: ``[T]`` importance weights (``off_policy``), multiplied onto each token's loss.
    """

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    advantages: Tensor
    tokens: LossTokens
    weights_T: Tensor | None = None

    @property
    def mask_T(self) -> Tensor:
        return self.tokens.mask_T

    @cached_property
    def policy_T(self) -> Tensor:
        """``[T]`` ``logprobs``, 0 where masked."""
        return zero_unmasked(self.logprobs_T, self.mask_T)

    @cached_property
    def log_ratio_T(self) -> Tensor:
        """``[T]`` ``policy - old`` with gradient, 0 where masked."""
        return self.policy_T - zero_unmasked(self.old_logprobs_T, self.mask_T).detach()

    @cached_property
    def advantages_T(self) -> Tensor:
        """``[T]`` the advantages, 0 where masked."""
        return zero_unmasked(self.advantages, self.mask_T).detach()

    def output(self, loss_T: Tensor, ratio_T: Tensor, num_clipped: Tensor | None = None) -> PolicyLossOutput:
        """Makes the output of losses per token; ``num_clipped`` is 0 where left out."""
        mask_T = self.mask_T
        if self.weights_T is not None:
            loss_T = loss_T * zero_unmasked(self.weights_T, mask_T).detach()
        num_clipped = torch.zeros_like(mask_T.sum()) if num_clipped is None else num_clipped
        return _output(aggregate_loss(loss_T, self.tokens), self.log_ratio_T, ratio_T, mask_T, num_clipped)


@dataclass(frozen=True)
class PolicyLossOutput:
    """A policy loss and its parts; a *unit* is a token, or a trajectory for ``sequence_policy_loss``.

    Attributes:
        loss: scalar with gradient.
        ratios: ``[T]`` or ``[N]`` detached ``policy / old``, 1 for masked units.
        num_units: units that the loss looked at.
        num_clipped: those whose ratio was clipped: where the clipped branch was the larger loss (no gradient), for
            ``cispo_loss`` where the weight was limited (the gradient stays), for ``gmpo_loss`` where the token's
            log-ratio was held, 0 for ``reinforce_loss``, ``sapo_loss`` and ``kl_cov_loss``.
        num_dual_clipped: those held by the dual clip (no gradient).
        ratio_sum: sum of their ratios.
        approx_kl_sum: sum of the k3 estimates of KL(old ‖ policy); of single tokens but for ``sequence_policy_loss``.
    """

    loss: Tensor
    ratios: Tensor
    num_units: Tensor
    num_clipped: Tensor
    num_dual_clipped: Tensor
    ratio_sum: Tensor
    approx_kl_sum: Tensor


def policy_loss(
    given: PolicyTokens, *, clip_eps_low: float, clip_eps_high: float, dual_clip: float | None = None
) -> PolicyLossOutput:
    """Computes PPO's clipped surrogate (Schulman et al., 2017, eq. 7), to be minimised; also GRPO's and token-level
    RLOO's.

    Per token ``max(-A * ratio, -A * clip(ratio, 1 - clip_eps_low, 1 + clip_eps_high))`` with
    ``ratio = exp(policy - old)``. With ``dual_clip`` c, tokens of negative advantage cost at most ``-c * A`` (Ye et
    al., 2020, eq. 5).

    Args:
        clip_eps_low: in [0, 1].
        clip_eps_high: at least 0.
        dual_clip: above 1, or None for none.
    """
    ratio_T = clamped_exp(given.log_ratio_T)
    loss_T, num_clipped = _clipped(ratio_T, given.advantages_T, given.mask_T, clip_eps_low, clip_eps_high)
    is_held_T = torch.zeros_like(given.mask_T)
    if dual_clip is not None:
        ceiling_T = -dual_clip * given.advantages_T
        is_held_T = given.mask_T & (given.advantages_T < 0) & (loss_T > ceiling_T)
        loss_T = torch.where(is_held_T, ceiling_T, loss_T)
    return replace(given.output(loss_T, ratio_T, num_clipped), num_dual_clipped=is_held_T.sum())


def sequence_policy_loss(given: PolicyTokens, *, clip_eps_low: float, clip_eps_high: float) -> PolicyLossOutput:
    """Computes RLOO as published: a whole completion is one action, the clip acts on its ratio (Ahmadian et al., 2024).

    The log-ratio is the sum over the trajectory's loss tokens. The loss is the mean over the mini-batch's
    trajectories that have loss tokens, without ``weights_T``; other arguments as for ``policy_loss``.

    Raises:
        ValueError: a trajectory lies in this micro-batch only in part, so its ratio cannot be computed.
    """
    tokens = given.tokens
    count_N = _whole_trajectories(tokens)
    present_N = count_N > 0
    log_ratio_N = segment_sum(given.log_ratio_T, tokens.owner_T, count_N.shape[0])
    ratio_N, advantages_N = clamped_exp(log_ratio_N), zero_unmasked(given.advantages, present_N).detach()
    loss_N, num_clipped = _clipped(ratio_N, advantages_N, present_N, clip_eps_low, clip_eps_high)
    loss = loss_N.sum() / tokens.denominators.num_sequences.clamp(min=1)
    return _output(loss, log_ratio_N, ratio_N, present_N, num_clipped)


def gspo_loss(given: PolicyTokens, *, clip_eps_low: float, clip_eps_high: float) -> PolicyLossOutput:
    """Computes GSPO (Zheng et al., 2025): the clipped surrogate under the length-normalised ratio of the sequence.

    Each token's ratio is ``exp(mean of policy - old over the trajectory's loss tokens)``, and the gradient goes through
    that mean. With one advantage per trajectory this equals the published form, and its stop-gradient form, under each
    aggregation; ``sequence_mean_token_mean`` is the published one. Arguments as for ``policy_loss``; units are tokens.

    Raises:
        ValueError: a trajectory lies in this micro-batch only in part, so its ratio cannot be computed.
    """
    ratio_T = clamped_exp(_mean_of_trajectory(given.log_ratio_T, given.tokens))
    loss_T, num_clipped = _clipped(ratio_T, given.advantages_T, given.mask_T, clip_eps_low, clip_eps_high)
    return given.output(loss_T, ratio_T, num_clipped)


def cispo_loss(given: PolicyTokens, *, clip_eps_low: float | None, clip_eps_high: float) -> PolicyLossOutput:
    """Computes CISPO (MiniMax, 2025): the policy gradient under a clipped, constant importance weight.

    Per token ``-A * stop(clip(ratio, 1 - clip_eps_low, 1 + clip_eps_high)) * policy``: no token loses its gradient.
    Arguments as for ``policy_loss``; without ``clip_eps_low`` there is no lower bound.
    """
    ratio_T = clamped_exp(given.log_ratio_T.detach())
    limited_T = ratio_T.clamp(0.0 if clip_eps_low is None else 1.0 - clip_eps_low, 1.0 + clip_eps_high)
    loss_T = -given.advantages_T * limited_T * given.policy_T
    return given.output(loss_T, ratio_T, (given.mask_T & (limited_T != ratio_T)).sum())


def sapo_loss(given: PolicyTokens, *, tau_pos: float, tau_neg: float) -> PolicyLossOutput:
    """Computes SAPO (Gao et al., 2025, arXiv 2511.20347): the ratio through a smooth gate in the place of the clip.

    Per token ``-A * 4/τ * sigmoid(τ (ratio - 1))``, τ being ``tau_pos`` where A is above 0 and ``tau_neg`` elsewhere:
    the gradient is that of ``-A * ratio`` at ratio 1, and fades on both sides of it.
    """
    ratio_T = clamped_exp(given.log_ratio_T)
    tau_T = torch.full_like(ratio_T, tau_neg).masked_fill(given.advantages_T > 0, tau_pos)
    return given.output(-given.advantages_T * 4 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1)), ratio_T)


def gmpo_loss(given: PolicyTokens, *, clip_eps_low: float, clip_eps_high: float) -> PolicyLossOutput:
    """Computes GMPO (Zhao et al., 2025, arXiv 2507.20673, eq. 4): the geometric mean of token ratios, each clipped by
    itself.

    A token's log-ratio is held at ``clip_eps_high`` where A is above 0, at ``-clip_eps_low`` where it is below (the
    pessimistic side, as in PPO), then averaged over the trajectory's loss tokens: ``-A * exp(mean)``. The limits are
    those of the log-ratio, at least 0. The published aggregation is ``sequence_mean_token_mean``.

    Raises:
        ValueError: a trajectory lies in this micro-batch only in part, so its ratio cannot be computed.
    """
    log_ratio_T, advantages_T = given.log_ratio_T, given.advantages_T
    lowest_T = torch.full_like(log_ratio_T, -torch.inf).masked_fill(advantages_T < 0, -clip_eps_low)
    highest_T = torch.full_like(log_ratio_T, torch.inf).masked_fill(advantages_T > 0, clip_eps_high)
    held_T = torch.minimum(torch.maximum(log_ratio_T, lowest_T), highest_T)
    ratio_T = clamped_exp(_mean_of_trajectory(held_T, given.tokens))
    return given.output(-advantages_T * ratio_T, ratio_T, (given.mask_T & (held_T != log_ratio_T)).sum())


def kl_cov_loss(given: PolicyTokens, *, held_T: Tensor, ppo_kl_coef: float) -> PolicyLossOutput:
    """Computes KL-Cov (Cui et al., 2025, arXiv 2505.22617, eq. 13): the surrogate without a clip, some tokens held by a
    penalty.

    Per token ``-A * ratio``, and ``ppo_kl_coef * |policy - old|`` more where ``held_T``: the absolute log-ratio of the
    authors' code, in the place of the paper's KL. ``held_T`` ``[T]`` bool are the tokens of highest covariance
    (``token_selection.top_fraction_mask``).
    """
    ratio_T = clamped_exp(given.log_ratio_T)
    return given.output(-given.advantages_T * ratio_T + ppo_kl_coef * given.log_ratio_T.abs() * held_T, ratio_T)


def reinforce_loss(given: PolicyTokens) -> PolicyLossOutput:
    """Computes the plain policy gradient (Williams, 1992): per token ``-A * policy``; the old log-probabilities only
    measure the drift.
    """
    return given.output(-given.advantages_T * given.policy_T, clamped_exp(given.log_ratio_T.detach()))


# Parts ---------------------------------------------------------------------------------------------------


def _whole_trajectories(tokens: LossTokens) -> Tensor:
    """Returns ``[N]`` loss tokens of each trajectory, 0 for those of other micro-batches."""
    total_N = tokens.denominators.tokens_per_sequence
    count_N = segment_count(tokens.owner_T, total_N.shape[0])
    if bool(((count_N > 0) & (count_N != total_N)).any()):
        raise ValueError("a sequence ratio needs each trajectory whole in one micro-batch")
    return count_N


def _mean_of_trajectory(values_T: Tensor, tokens: LossTokens) -> Tensor:
    """Returns ``[T]`` the mean of ``values`` over the loss tokens of the token's trajectory; 0 where masked."""
    count_N = _whole_trajectories(tokens)
    mean_N = segment_sum(values_T, tokens.owner_T, count_N.shape[0]) / count_N.clamp(min=1)
    return gather_owner(mean_N, tokens.owner_T)


def _clipped(ratio: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Returns the clipped surrogate of each unit, and for how many the clipped branch is the larger loss."""
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(plain, clipped), (mask & (clipped > plain)).sum()


def _output(loss: Tensor, log_ratio: Tensor, ratio: Tensor, mask: Tensor, num_clipped: Tensor) -> PolicyLossOutput:
    log_ratio, ratio = log_ratio.detach(), ratio.detach()
    return PolicyLossOutput(
        loss=loss,
        ratios=ratio,
        num_units=mask.sum(),
        num_clipped=num_clipped,
        num_dual_clipped=torch.zeros_like(num_clipped),
        ratio_sum=zero_unmasked(ratio, mask).sum(),
        # KL(old ‖ policy)
        approx_kl_sum=kl_estimate(torch.zeros_like(log_ratio), log_ratio, "k3", mask_T=mask).sum(),
    )


Level = Literal["token", "sequence"]


@dataclass(frozen=True)
class SampledTokens:
    """Tokens that were sampled under other log-probabilities than those when the step began.

    Attributes:
        old_logprobs_T: ``[T]`` under the trainer's policy when the step began.
        rollout_logprobs_T: ``[T]`` under the engine that sampled.
        mask_T: ``[T]`` bool, tokens that count.
        trajectory_T: ``[T]`` int64 owner index.
        num_trajectories: N.
    """

    old_logprobs_T: Tensor
    rollout_logprobs_T: Tensor
    mask_T: Tensor
    trajectory_T: Tensor
    num_trajectories: int

    @cached_property
    def owner_T(self) -> Tensor:
        """``[T]`` the owner of each token that counts, -1 for others."""
        return masked_owner(self.trajectory_T, self.mask_T)

    @property
    def log_ratio_T(self) -> Tensor:
        """``[T]`` ``old - rollout``, 0 where it does not count."""
        is_owned_T = self.owner_T >= 0
        return zero_unmasked(self.old_logprobs_T, is_owned_T) - zero_unmasked(self.rollout_logprobs_T, is_owned_T)


@dataclass(frozen=True)
class ImportanceWeights:
    """``weights`` ``[T]``, 0 on masked tokens, and the number of unmasked tokens above the cap or below the floor."""

    weights: Tensor
    num_capped: Tensor


@torch.no_grad()
def importance_weights(
    given: SampledTokens, *, level: Level, mode: Literal["truncate", "mask"], cap: float, floor: float | None = None
) -> ImportanceWeights:
    """Returns the weights ``old / rollout`` that correct a loss for the policy which really sampled; constants.

    Args:
        level: "token", or "sequence" for the product over the trajectory's masked tokens on each of them.
        mode: weights above ``cap`` become ``cap`` ("truncate") or 0 ("mask").
        cap: above 0.
        floor: weights below it become ``floor`` or 0, as those above the cap; None for no limit.
    """
    owner_T, log_weight_T = given.owner_T, given.log_ratio_T
    if level == "sequence":
        log_weight_T = gather_owner(segment_sum(log_weight_T, owner_T, given.num_trajectories), owner_T)
    weight_T = clamped_exp(log_weight_T)
    is_capped_T = weight_T > cap
    if floor is not None:
        is_capped_T = is_capped_T | (weight_T < floor)
    weight_T = weight_T.clamp(floor, cap) if mode == "truncate" else torch.where(is_capped_T, 0, weight_T)
    return ImportanceWeights(torch.where(owner_T >= 0, weight_T, 0), (is_capped_T & (owner_T >= 0)).sum())


@torch.no_grad()
def mean_weight(weights_T: Tensor, given: SampledTokens, *, level: Level) -> Tensor:
    """Returns the scalar mean of ``importance_weights`` over their tokens, or over the trajectories that have any; 1
    without any token, or where all weights are 0. Weights divided by it have mean 1: self-normalised importance
    sampling.

    ``given`` is the whole mini-batch.
    """
    owner_T, num_trajectories = given.owner_T, given.num_trajectories
    if level == "token":
        mean = masked_mean(weights_T, owner_T >= 0)
    else:
        has_any_N = segment_count(owner_T, num_trajectories) > 0
        mean = masked_mean(segment_mean(zero_unmasked(weights_T, owner_T >= 0), owner_T, num_trajectories), has_any_N)
    return torch.where(mean > 0, mean, 1)


@torch.no_grad()
def within_ratio_limits(
    given: SampledTokens, *, statistic: Literal["geometric", "sequence"], lower: float, upper: float
) -> Tensor:
    """Returns ``[N]`` bool: trajectories whose ratio ``old / rollout`` lies within both limits; True for those without
    tokens.

    The ratio is the product over the trajectory's masked tokens ("sequence"), or their geometric mean, which does not
    grow with the length ("geometric"; verl's rollout correction, "Rejection Sampling").

    Args:
        lower, upper: limits of the ratio, above 0.
    """
    of_trajectory = segment_mean if statistic == "geometric" else segment_sum
    log_ratio_N = of_trajectory(given.log_ratio_T, given.owner_T, given.num_trajectories)
    return (log_ratio_N >= math.log(lower)) & (log_ratio_N <= math.log(upper))
