"""Losses of critics, demonstrations and reward models, and the terms beside a policy loss.

Shape suffixes: T stored tokens of a micro-batch, P pairs.

Each per-token loss takes the tokens that have loss (``LossTokens``; their owners are trajectories or sequences in the
mini-batch's numbering) and returns the micro-batch's share of the mini-batch's loss. Masked positions may hold
anything. Figures beside the loss are detached *sums*, to be added over micro-batches and ranks and divided by the
mini-batch's counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from quartet.algorithms.aggregate import LossTokens, aggregate
from quartet.algorithms.kl import KLKind, kl_estimate
from quartet.algorithms.segments import keep, wide


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
