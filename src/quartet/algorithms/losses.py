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
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from quartet.algorithms.segments import gather_owner, keep, masked_owner, reduction_dtype, segment_count, wide

KLKind = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before ``exp``, so that no ratio overflows."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """``exp`` of a log-ratio clamped to ±20; no gradient beyond."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_estimate(logprobs_T: Tensor, ref_logprobs_T: Tensor, kind: KLKind, *, mask_T: Tensor | None = None) -> Tensor:
    """``[T]`` an estimate of KL(policy ‖ reference) per token, for tokens sampled from the policy.

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
    """The KL coefficient after a step (Ziegler et al., 2019, section 2.2).

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
    """Denominators of a whole mini-batch.

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


def aggregate(values_T: Tensor, tokens: LossTokens) -> Tensor:
    """A micro-batch's share of the mini-batch's loss; the shares of all micro-batches add up to it.

    Args:
        values_T: ``[T]`` per-token losses of the micro-batch; elsewhere they are ignored, whatever they are.
        tokens: which have loss.

    Returns:
        Scalar fp32 (fp64 for fp64 input), 0 where there are no loss tokens.
    """
    kept_T, denominators = keep(values_T, tokens.mask_T), tokens.denominators
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
    """Aggregated KL estimate with gradient, to be added to a policy loss times ``kl_coef``.

    The gradient of k1 has expectation 0; k2's is that of the true KL on-policy; k3's is an approximation of
    it.
    """
    return aggregate(kl_estimate(policy_logprobs_T, ref_logprobs_T.detach(), kind, mask_T=tokens.mask_T), tokens)


def value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, tokens: LossTokens, *, clip_eps: float | None
) -> ValueLossOutput:
    """``0.5 * max((V - R)², (clip(V, old ± clip_eps) - R)²)`` per token; unclipped where ``clip_eps`` is
    None.

    Args:
        values_T: ``[T]`` with gradient.
        old_values_T: ``[T]`` constants, the critic's values when the step began.
        returns_T: ``[T]`` constants.
        tokens: see the module.
        clip_eps: above 0, in the unit of the values.
    """
    mask_T = tokens.mask_T
    value_T, return_T = keep(values_T, mask_T), keep(returns_T, mask_T).detach()
    loss_T = unclipped_T = (value_T - return_T).square()
    if clip_eps is not None:
        old_T = keep(old_values_T, mask_T).detach()
        clipped_T = (value_T.clamp(old_T - clip_eps, old_T + clip_eps) - return_T).square()
        loss_T = torch.maximum(unclipped_T, clipped_T)
    loss = 0.5 * aggregate(loss_T, tokens)
    return ValueLossOutput(loss, mask_T.sum(), (mask_T & (loss_T > unclipped_T)).sum())


def sft_loss(policy_logprobs_T: Tensor, tokens: LossTokens) -> Tensor:
    """Negative log-likelihood of the demonstrations' loss tokens, in nats."""
    return aggregate(-policy_logprobs_T, tokens)


def pairwise_reward_loss(
    chosen_P: Tensor, rejected_P: Tensor, num_pairs: int, *, margin_P: Tensor | None = None, centring: float = 0.0
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
    chosen, rejected = wide(chosen_P), wide(rejected_P)
    difference = chosen - rejected
    target = difference if margin_P is None else difference - margin_P.detach().to(difference.dtype)
    loss_P = -logsigmoid(target) + centring * (chosen + rejected).square()
    return PairwiseLossOutput(loss_P.sum() / max(num_pairs, 1), (difference > 0).sum(), difference.detach().sum())
