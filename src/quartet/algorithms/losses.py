"""Losses of policies, critics, demonstrations and reward models.

Shape suffixes: T stored tokens of a micro-batch, N trajectories of the mini-batch, P pairs.

Each per-token loss takes ``loss_mask_T`` ``[T]`` bool, ``owner_T`` ``[T]`` int64 (trajectory or sequence, in
the mini-batch's numbering, -1 for none) and the mini-batch's denominators, and returns the micro-batch's
share of the mini-batch's loss. Masked positions may hold anything. Figures beside the loss are detached
*sums*, to be added over micro-batches and ranks and divided by the mini-batch's counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from quartet.algorithms.aggregate import Aggregation, AggregationDenominators, aggregate
from quartet.algorithms.kl import KLKind, bounded_exp, kl_estimate
from quartet.algorithms.segments import keep, masked_owner, segment_count, segment_sum


@dataclass(frozen=True)
class PolicyLossOutput:
    """A policy loss and its parts; a *unit* is a token, or a trajectory for ``sequence_policy_loss``.

    Attributes:
        loss: scalar with gradient.
        ratios: ``[T]`` or ``[N]`` detached ``policy / old``, 1 for masked units.
        num_units: units that the loss looked at.
        num_clipped: those where the clipped branch was the larger loss (no gradient).
        num_dual_clipped: those held by the dual clip (no gradient).
        ratio_sum: sum of their ratios.
        approx_kl_sum: sum of the k3 estimates of KL(old ‖ policy).
    """

    loss: Tensor
    ratios: Tensor
    num_units: Tensor
    num_clipped: Tensor
    num_dual_clipped: Tensor
    ratio_sum: Tensor
    approx_kl_sum: Tensor


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


def policy_loss(
    policy_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    loss_mask_T: Tensor,
    owner_T: Tensor,
    denominators: AggregationDenominators,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    dual_clip: float | None = None,
    aggregation: Aggregation,
    weights_T: Tensor | None = None,
) -> PolicyLossOutput:
    """PPO's clipped surrogate (Schulman et al., 2017, eq. 7), to be minimised; also GRPO's and token-level
    RLOO's.

    Per token ``max(-A * ratio, -A * clip(ratio, 1 - clip_eps_low, 1 + clip_eps_high))`` with
    ``ratio = exp(policy - old)``, the log-ratio clamped to ±20. With ``dual_clip`` c, tokens of negative
    advantage cost at most ``-c * A`` (Ye et al., 2020, eq. 5).

    Args:
        policy_logprobs_T: ``[T]`` with gradient.
        old_logprobs_T: ``[T]`` constants.
        advantages_T: ``[T]`` constants.
        loss_mask_T, owner_T, denominators: see the module.
        clip_eps_low: in [0, 1].
        clip_eps_high: at least 0.
        dual_clip: above 1, or None for none.
        aggregation: how tokens become one number.
        weights_T: ``[T]`` importance weights (``off_policy``), multiplied onto each token's loss.
    """
    mask_T = masked_owner(owner_T, loss_mask_T) >= 0
    log_ratio_T = keep(policy_logprobs_T, mask_T) - keep(old_logprobs_T, mask_T).detach()
    clipped = _clipped_surrogate(
        log_ratio_T, keep(advantages_T, mask_T).detach(), mask_T, clip_eps_low, clip_eps_high, dual_clip
    )
    loss_T = clipped.loss
    if weights_T is not None:
        loss_T = loss_T * keep(weights_T, mask_T).detach()
    loss = aggregate(loss_T, mask_T, owner_T, denominators, aggregation)
    return replace(clipped, loss=loss)


def sequence_policy_loss(
    policy_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_N: Tensor,
    loss_mask_T: Tensor,
    owner_T: Tensor,
    denominators: AggregationDenominators,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
) -> PolicyLossOutput:
    """RLOO as published: a whole completion is one action, the clip acts on its ratio (Ahmadian et al.,
    2024).

    The log-ratio is the sum over the trajectory's loss tokens. The loss is the mean over the mini-batch's
    trajectories that have loss tokens; arguments as for ``policy_loss`` except ``advantages_N`` ``[N]``.

    Raises:
        ValueError: a trajectory lies in this micro-batch only in part, so its ratio cannot be computed.
    """
    owner_T = masked_owner(owner_T, loss_mask_T)
    num_owners = advantages_N.shape[0]
    count_N = segment_count(owner_T, num_owners)
    present_N = count_N > 0
    if bool((present_N & (count_N != denominators.tokens_per_sequence)).any()):
        raise ValueError("a sequence ratio needs each trajectory whole in one micro-batch")
    mask_T = owner_T >= 0
    difference_T = keep(policy_logprobs_T, mask_T) - keep(old_logprobs_T, mask_T).detach()
    log_ratio_N = segment_sum(difference_T, owner_T, num_owners)
    clipped = _clipped_surrogate(
        log_ratio_N, keep(advantages_N, present_N).detach(), present_N, clip_eps_low, clip_eps_high, None
    )
    return replace(clipped, loss=clipped.loss.sum() / denominators.num_sequences.clamp(min=1))


def _clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_eps_low: float,
    clip_eps_high: float,
    dual_clip: float | None,
) -> PolicyLossOutput:
    """Losses per unit (in the output's ``loss``) and the sums, from inputs that are 0 where masked."""
    if not 0.0 <= clip_eps_low <= 1.0 or clip_eps_high < 0.0:
        raise ValueError(f"clip_eps_low must lie in [0, 1], clip_eps_high above: {clip_eps_low}, {clip_eps_high}")
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip must be above 1, found {dual_clip}")
    ratio = bounded_exp(log_ratio)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_eps_low, 1.0 + clip_eps_high)
    loss = torch.maximum(unclipped, clipped)
    is_clipped = mask & (clipped > unclipped)
    is_dual_clipped = torch.zeros_like(mask)
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        is_dual_clipped = mask & (advantages < 0) & (loss > ceiling)
        loss = torch.where(is_dual_clipped, ceiling, loss)
    log_ratio, ratio = log_ratio.detach(), ratio.detach()
    approx_kl = kl_estimate(torch.zeros_like(log_ratio), log_ratio, "k3", mask_T=mask)
    return PolicyLossOutput(
        loss=loss,
        ratios=ratio,
        num_units=mask.sum(),
        num_clipped=is_clipped.sum(),
        num_dual_clipped=is_dual_clipped.sum(),
        ratio_sum=keep(ratio, mask).sum(),
        approx_kl_sum=approx_kl.sum(),
    )


def kl_loss(
    policy_logprobs_T: Tensor,
    ref_logprobs_T: Tensor,
    loss_mask_T: Tensor,
    owner_T: Tensor,
    denominators: AggregationDenominators,
    *,
    kind: KLKind,
    aggregation: Aggregation,
) -> Tensor:
    """Aggregated KL estimate with gradient, to be added to a policy loss times ``kl_coef``.

    The gradient of k1 has expectation 0; k2's is that of the true KL on-policy; k3's is an approximation of
    it.
    """
    mask_T = masked_owner(owner_T, loss_mask_T) >= 0
    kl_T = kl_estimate(policy_logprobs_T, ref_logprobs_T.detach(), kind, mask_T=mask_T)
    return aggregate(kl_T, mask_T, owner_T, denominators, aggregation)


def entropy_bonus(
    entropies_T: Tensor,
    loss_mask_T: Tensor,
    owner_T: Tensor,
    denominators: AggregationDenominators,
    *,
    aggregation: Aggregation,
) -> Tensor:
    """Aggregated next-token entropy, to be *subtracted* from a loss times ``entropy_coef``."""
    return aggregate(entropies_T, loss_mask_T, owner_T, denominators, aggregation)


def value_loss(
    values_T: Tensor,
    old_values_T: Tensor,
    returns_T: Tensor,
    loss_mask_T: Tensor,
    owner_T: Tensor,
    denominators: AggregationDenominators,
    *,
    clip_eps: float | None,
    aggregation: Aggregation,
) -> ValueLossOutput:
    """``0.5 * max((V - R)², (clip(V, old ± clip_eps) - R)²)`` per token; unclipped where ``clip_eps`` is
    None.

    Args:
        values_T: ``[T]`` with gradient.
        old_values_T: ``[T]`` constants, the critic's values when the step began.
        returns_T: ``[T]`` constants.
        loss_mask_T, owner_T, denominators, aggregation: as for ``policy_loss``.
        clip_eps: above 0, in the unit of the values.
    """
    if clip_eps is not None and clip_eps <= 0:
        raise ValueError(f"clip_eps must be above 0 or None, found {clip_eps}")
    mask_T = masked_owner(owner_T, loss_mask_T) >= 0
    value_T, return_T = keep(values_T, mask_T), keep(returns_T, mask_T).detach()
    loss_T = unclipped_T = (value_T - return_T).square()
    if clip_eps is not None:
        old_T = keep(old_values_T, mask_T).detach()
        clipped_T = (value_T.clamp(old_T - clip_eps, old_T + clip_eps) - return_T).square()
        loss_T = torch.maximum(unclipped_T, clipped_T)
    loss = 0.5 * aggregate(loss_T, mask_T, owner_T, denominators, aggregation)
    return ValueLossOutput(loss, mask_T.sum(), (mask_T & (loss_T > unclipped_T)).sum())


def sft_loss(
    policy_logprobs_T: Tensor,
    loss_mask_T: Tensor,
    owner_T: Tensor,
    denominators: AggregationDenominators,
    *,
    aggregation: Aggregation = "token_mean",
) -> Tensor:
    """Negative log-likelihood of the demonstrations' loss tokens, in nats."""
    return aggregate(-policy_logprobs_T, loss_mask_T, owner_T, denominators, aggregation)


def pairwise_reward_loss(
    chosen_P: Tensor,
    rejected_P: Tensor,
    num_pairs: int | Tensor,
    *,
    margin_P: Tensor | None = None,
    centring: float = 0.0,
) -> PairwiseLossOutput:
    """Bradley-Terry loss of preference pairs (Ouyang et al., 2022, eq. 1), a micro-batch's share of the mean.

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
    if centring < 0:
        raise ValueError(f"centring must be at least 0, found {centring}")
    everything = torch.ones_like(chosen_P, dtype=torch.bool)
    chosen, rejected = keep(chosen_P, everything), keep(rejected_P, everything)
    difference = chosen - rejected
    target = difference if margin_P is None else difference - margin_P.detach().to(difference.dtype)
    loss_P = -logsigmoid(target) + centring * (chosen + rejected).square()
    denominator = num_pairs.clamp(min=1) if isinstance(num_pairs, Tensor) else max(num_pairs, 1)
    return PairwiseLossOutput(loss_P.sum() / denominator, (difference > 0).sum(), difference.detach().sum())
