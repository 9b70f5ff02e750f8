"""Policy losses: what an actor minimises, given advantages.

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

Each takes the tokens that have loss (``LossTokens``; their owners are trajectories in the mini-batch's numbering) and
returns the micro-batch's share of the mini-batch's loss. Masked positions may hold anything. Figures beside the loss
are detached *sums*, to be added over micro-batches and ranks and divided by the mini-batch's counts. All log-ratios are
clamped to ±20 before ``exp``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quartet.algorithms.aggregate import LossTokens, aggregate
from quartet.algorithms.kl import bounded_exp, kl_estimate
from quartet.algorithms.segments import gather_owner, keep, segment_count, segment_sum


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
        approx_kl_sum: sum of the k3 estimates of KL(old ‖ policy).
    """

    loss: Tensor
    ratios: Tensor
    num_units: Tensor
    num_clipped: Tensor
    num_dual_clipped: Tensor
    ratio_sum: Tensor
    approx_kl_sum: Tensor


def policy_loss(
    policy_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    tokens: LossTokens,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    dual_clip: float | None = None,
    weights_T: Tensor | None = None,
) -> PolicyLossOutput:
    """PPO's clipped surrogate (Schulman et al., 2017, eq. 7), to be minimised; also GRPO's and token-level
    RLOO's.

    Per token ``max(-A * ratio, -A * clip(ratio, 1 - clip_eps_low, 1 + clip_eps_high))`` with
    ``ratio = exp(policy - old)``. With ``dual_clip`` c, tokens of negative advantage cost at most ``-c * A`` (Ye et
    al., 2020, eq. 5).

    Args:
        policy_logprobs_T: ``[T]`` with gradient.
        old_logprobs_T: ``[T]`` constants.
        advantages_T: ``[T]`` constants.
        tokens: see the module.
        clip_eps_low: in [0, 1].
        clip_eps_high: at least 0.
        dual_clip: above 1, or None for none.
        weights_T: ``[T]`` importance weights (``off_policy``), multiplied onto each token's loss.
    """
    mask_T = tokens.mask_T
    log_ratio_T = keep(policy_logprobs_T, mask_T) - keep(old_logprobs_T, mask_T).detach()
    advantages_T = keep(advantages_T, mask_T).detach()
    clipped = _clipped_surrogate(log_ratio_T, advantages_T, mask_T, clip_eps_low, clip_eps_high, dual_clip)
    return replace(clipped, loss=aggregate(_weighted(clipped.loss, weights_T, mask_T), tokens))


def sequence_policy_loss(
    policy_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_N: Tensor,
    tokens: LossTokens,
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
    mask_T, count_N = tokens.mask_T, _whole_trajectories(tokens)
    present_N = count_N > 0
    difference_T = keep(policy_logprobs_T, mask_T) - keep(old_logprobs_T, mask_T).detach()
    log_ratio_N = segment_sum(difference_T, tokens.owner_T, count_N.shape[0])
    clipped = _clipped_surrogate(
        log_ratio_N, keep(advantages_N, present_N).detach(), present_N, clip_eps_low, clip_eps_high
    )
    return replace(clipped, loss=clipped.loss.sum() / tokens.denominators.num_sequences.clamp(min=1))


def gspo_loss(
    policy_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    tokens: LossTokens,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    weights_T: Tensor | None = None,
) -> PolicyLossOutput:
    """GSPO (Zheng et al., 2025): the clipped surrogate under the length-normalised ratio of the sequence.

    Each token's ratio is ``exp(mean of policy - old over the trajectory's loss tokens)``, and the gradient goes through
    that mean. With one advantage per trajectory this equals the published form, and its stop-gradient form, under each
    aggregation; ``sequence_mean_token_mean`` is the published one. Arguments as for ``policy_loss``; units are tokens,
    and ``approx_kl_sum`` is that of single tokens.

    Raises:
        ValueError: a trajectory lies in this micro-batch only in part, so its ratio cannot be computed.
    """
    mask_T, count_N = tokens.mask_T, _whole_trajectories(tokens)
    difference_T = keep(policy_logprobs_T, mask_T) - keep(old_logprobs_T, mask_T).detach()
    mean_N = segment_sum(difference_T, tokens.owner_T, count_N.shape[0]) / count_N.clamp(min=1)
    advantages_T = keep(advantages_T, mask_T).detach()
    log_ratio_T = gather_owner(mean_N, tokens.owner_T)
    clipped = _clipped_surrogate(log_ratio_T, advantages_T, mask_T, clip_eps_low, clip_eps_high)
    return replace(
        clipped,
        loss=aggregate(_weighted(clipped.loss, weights_T, mask_T), tokens),
        approx_kl_sum=_approx_kl(difference_T, mask_T),
    )


def cispo_loss(
    policy_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    tokens: LossTokens,
    *,
    clip_eps_low: float | None,
    clip_eps_high: float,
    weights_T: Tensor | None = None,
) -> PolicyLossOutput:
    """CISPO (MiniMax, 2025): the policy gradient under a clipped, constant importance weight.

    Per token ``-A * stop(clip(ratio, 1 - clip_eps_low, 1 + clip_eps_high)) * policy``: no token loses its gradient.
    Arguments as for ``policy_loss``; without ``clip_eps_low`` there is no lower bound.
    """
    mask_T = tokens.mask_T
    policy_T = keep(policy_logprobs_T, mask_T)
    log_ratio_T = policy_T.detach() - keep(old_logprobs_T, mask_T).detach()
    ratio_T = bounded_exp(log_ratio_T)
    limited_T = ratio_T.clamp(0.0 if clip_eps_low is None else 1.0 - clip_eps_low, 1.0 + clip_eps_high)
    loss_T = -keep(advantages_T, mask_T).detach() * limited_T * policy_T
    loss = aggregate(_weighted(loss_T, weights_T, mask_T), tokens)
    return _output(loss, log_ratio_T, ratio_T, mask_T, (mask_T & (limited_T != ratio_T)).sum())


def sapo_loss(
    policy_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    tokens: LossTokens,
    *,
    tau_pos: float,
    tau_neg: float,
    weights_T: Tensor | None = None,
) -> PolicyLossOutput:
    """SAPO (Gao et al., 2025, arXiv 2511.20347): the ratio through a smooth gate in the place of the clip.

    Per token ``-A * 4/τ * sigmoid(τ (ratio - 1))``, τ being ``tau_pos`` where A is above 0 and ``tau_neg`` elsewhere:
    the gradient is that of ``-A * ratio`` at ratio 1, and fades on both sides of it. Arguments as for ``policy_loss``.
    """
    mask_T = tokens.mask_T
    log_ratio_T = keep(policy_logprobs_T, mask_T) - keep(old_logprobs_T, mask_T).detach()
    advantages_T, ratio_T = keep(advantages_T, mask_T).detach(), bounded_exp(log_ratio_T)
    tau_T = torch.full_like(ratio_T, tau_neg).masked_fill(advantages_T > 0, tau_pos)
    loss_T = -advantages_T * 4 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1))
    loss = aggregate(_weighted(loss_T, weights_T, mask_T), tokens)
    return _output(loss, log_ratio_T, ratio_T, mask_T, torch.zeros_like(mask_T.sum()))


def gmpo_loss(
    policy_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    tokens: LossTokens,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    weights_T: Tensor | None = None,
) -> PolicyLossOutput:
    """GMPO (Zhao et al., 2025, arXiv 2507.20673, eq. 4): the geometric mean of token ratios, each clipped by itself.

    A token's log-ratio is held at ``clip_eps_high`` where A is above 0, at ``-clip_eps_low`` where it is below (the
    pessimistic side, as in PPO), then averaged over the trajectory's loss tokens: ``-A * exp(mean)``. Arguments as for
    ``gspo_loss``, but the limits are those of the log-ratio, at least 0. The published aggregation is
    ``sequence_mean_token_mean``.

    Raises:
        ValueError: a trajectory lies in this micro-batch only in part, so its ratio cannot be computed.
    """
    mask_T, count_N = tokens.mask_T, _whole_trajectories(tokens)
    difference_T = keep(policy_logprobs_T, mask_T) - keep(old_logprobs_T, mask_T).detach()
    advantages_T = keep(advantages_T, mask_T).detach()
    lowest_T = torch.full_like(difference_T, -torch.inf).masked_fill(advantages_T < 0, -clip_eps_low)
    highest_T = torch.full_like(difference_T, torch.inf).masked_fill(advantages_T > 0, clip_eps_high)
    held_T = torch.minimum(torch.maximum(difference_T, lowest_T), highest_T)
    mean_N = segment_sum(held_T, tokens.owner_T, count_N.shape[0]) / count_N.clamp(min=1)
    log_ratio_T = gather_owner(mean_N, tokens.owner_T)
    ratio_T = bounded_exp(log_ratio_T)
    loss = aggregate(_weighted(-advantages_T * ratio_T, weights_T, mask_T), tokens)
    found = _output(loss, log_ratio_T, ratio_T, mask_T, (mask_T & (held_T != difference_T)).sum())
    return replace(found, approx_kl_sum=_approx_kl(difference_T, mask_T))


def kl_cov_loss(
    policy_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    tokens: LossTokens,
    *,
    held_T: Tensor,
    ppo_kl_coef: float,
    weights_T: Tensor | None = None,
) -> PolicyLossOutput:
    """KL-Cov (Cui et al., 2025, arXiv 2505.22617, eq. 13): the surrogate without a clip, some tokens held by a penalty.

    Per token ``-A * ratio``, and ``ppo_kl_coef * |policy - old|`` more where ``held_T``: the absolute log-ratio of the
    authors' code, in the place of the paper's KL. Arguments as for ``policy_loss``; ``held_T`` ``[T]`` bool are the
    tokens of highest covariance (``token_selection.top_share``).
    """
    mask_T = tokens.mask_T
    log_ratio_T = keep(policy_logprobs_T, mask_T) - keep(old_logprobs_T, mask_T).detach()
    ratio_T = bounded_exp(log_ratio_T)
    loss_T = -keep(advantages_T, mask_T).detach() * ratio_T + ppo_kl_coef * log_ratio_T.abs() * held_T
    loss = aggregate(_weighted(loss_T, weights_T, mask_T), tokens)
    return _output(loss, log_ratio_T, ratio_T, mask_T, torch.zeros_like(mask_T.sum()))


def reinforce_loss(
    policy_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    tokens: LossTokens,
    *,
    weights_T: Tensor | None = None,
) -> PolicyLossOutput:
    """The plain policy gradient (Williams, 1992): per token ``-A * policy``.

    Arguments as for ``policy_loss``; ``old_logprobs_T`` only measures the drift.
    """
    mask_T = tokens.mask_T
    policy_T = keep(policy_logprobs_T, mask_T)
    loss_T = _weighted(-keep(advantages_T, mask_T).detach() * policy_T, weights_T, mask_T)
    loss = aggregate(loss_T, tokens)
    log_ratio_T = policy_T.detach() - keep(old_logprobs_T, mask_T).detach()
    return _output(loss, log_ratio_T, bounded_exp(log_ratio_T), mask_T, torch.zeros_like(mask_T.sum()))


# Parts ---------------------------------------------------------------------------------------------------


def _whole_trajectories(tokens: LossTokens) -> Tensor:
    """``[N]`` loss tokens of each trajectory, 0 for those of other micro-batches."""
    total_N = tokens.denominators.tokens_per_sequence
    count_N = segment_count(tokens.owner_T, total_N.shape[0])
    if bool(((count_N > 0) & (count_N != total_N)).any()):
        raise ValueError("a sequence ratio needs each trajectory whole in one micro-batch")
    return count_N


def _weighted(loss_T: Tensor, weights_T: Tensor | None, mask_T: Tensor) -> Tensor:
    return loss_T if weights_T is None else loss_T * keep(weights_T, mask_T).detach()


def _clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_eps_low: float,
    clip_eps_high: float,
    dual_clip: float | None = None,
) -> PolicyLossOutput:
    """Losses per unit (in the output's ``loss``) and the sums, from inputs that are 0 where masked."""
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
    found = _output(loss, log_ratio, ratio, mask, is_clipped.sum())
    return replace(found, num_dual_clipped=is_dual_clipped.sum())


def _output(loss: Tensor, log_ratio: Tensor, ratio: Tensor, mask: Tensor, num_clipped: Tensor) -> PolicyLossOutput:
    ratio = ratio.detach()
    return PolicyLossOutput(
        loss=loss,
        ratios=ratio,
        num_units=mask.sum(),
        num_clipped=num_clipped,
        num_dual_clipped=torch.zeros_like(num_clipped),
        ratio_sum=keep(ratio, mask).sum(),
        approx_kl_sum=_approx_kl(log_ratio, mask),
    )


def _approx_kl(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Sum of the k3 estimates of KL(old ‖ policy)."""
    log_ratio = log_ratio.detach()
    return kl_estimate(torch.zeros_like(log_ratio), log_ratio, "k3", mask_T=mask).sum()
