"""Losses that learn from preferences directly: pairs of answers, or single answers judged good or bad.

Shape suffixes: P pairs of a micro-batch, S answers of a micro-batch.

What an answer enters with is one number, computed by the caller from the log-probabilities of its tokens:

=========== ========================================================================= =======================
number      what                                                                      losses
=========== ========================================================================= =======================
log-ratio   sum over its tokens of ``policy_logprobs - ref_logprobs``                 DPO, robust DPO, IPO,
                                                                                      hinge, EXO, NCA, SPPO, APO,
                                                                                      DiscoPOP, BCO, AOT, KTO
mean        mean over its tokens of ``policy_logprobs`` (no reference)                SimPO, ORPO, SFT term
=========== ========================================================================= =======================

Each loss is the micro-batch's share of the mini-batch's mean: a sum divided by the mini-batch's number of pairs (or
answers), so shares add up however the mini-batch was cut. *Implicit rewards* are what the loss compares, detached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from quartet.algorithms.segments import segment_is_constant, to_reduction_dtype


@dataclass(frozen=True)
class PreferenceLossOutput:
    """``loss`` with gradient, and the detached implicit rewards ``[P]`` of both sides."""

    loss: Tensor
    chosen_rewards_P: Tensor
    rejected_rewards_P: Tensor


@dataclass(frozen=True)
class AnswerPairs:
    """The pairs of a micro-batch, each answer by its number.

    Attributes:
        chosen_P, rejected_P: ``[P]`` with gradient.
        num_pairs: pairs of the whole mini-batch, the denominator.
    """

    chosen_P: Tensor
    rejected_P: Tensor
    num_pairs: int

    def rewards(self, beta: float) -> tuple[Tensor, Tensor]:
        """Returns ``[P]`` the implicit rewards of both sides, ``beta`` times their numbers."""
        return beta * to_reduction_dtype(self.chosen_P), beta * to_reduction_dtype(self.rejected_P)

    def output(self, loss_P: Tensor, chosen: Tensor, rejected: Tensor) -> PreferenceLossOutput:
        """Returns the share of the mean of ``loss_P``, and the implicit rewards."""
        return PreferenceLossOutput(loss_P.sum() / max(self.num_pairs, 1), chosen.detach(), rejected.detach())


@dataclass(frozen=True)
class JudgedLossOutput:
    """``loss`` with gradient, and the detached implicit reward ``[S]`` of each answer."""

    loss: Tensor
    rewards_S: Tensor


# With a reference ----------------------------------------------------------------------------------------


def dpo_loss(
    pairs: AnswerPairs, *, beta: float, label_smoothing: float = 0.0, margin_P: Tensor | None = None
) -> PreferenceLossOutput:
    """Computes direct preference optimisation (Rafailov et al., 2023, eq. 7).

    Per pair ``-(1 - ε) logsigmoid(x) - ε logsigmoid(-x)`` with ``x = β (chosen - rejected) - margin``. ε is the share
    of labels thought to be wrong (conservative DPO, Mitchell, 2023); the margin is the offset of Amini et al., 2024.

    Args:
        pairs: of log-ratios.
        beta: above 0.
        label_smoothing: in [0, 0.5].
        margin_P: ``[P]`` by how much a chosen answer's implicit reward should be higher, or None for 0.
    """
    chosen, rejected = pairs.rewards(beta)
    logits = chosen - rejected
    if margin_P is not None:
        logits = logits - margin_P.detach().to(logits.dtype)
    loss_P = -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)
    return pairs.output(loss_P, chosen, rejected)


def robust_dpo_loss(pairs: AnswerPairs, *, beta: float, label_smoothing: float) -> PreferenceLossOutput:
    """Computes DPO whose expectation is that of clean labels where a share ε of them is flipped (Chowdhury et al.,
    2024).

    Per pair ``(-(1 - ε) logsigmoid(x) + ε logsigmoid(-x)) / (1 - 2ε)``; arguments as for ``dpo_loss``, ε in [0, 0.5).
    It is not bounded below: a pair that is already certain keeps a gradient.
    """
    chosen, rejected = pairs.rewards(beta)
    logits = chosen - rejected
    loss_P = -(1 - label_smoothing) * logsigmoid(logits) + label_smoothing * logsigmoid(-logits)
    return pairs.output(loss_P / (1 - 2 * label_smoothing), chosen, rejected)


def ipo_loss(pairs: AnswerPairs, *, beta: float) -> PreferenceLossOutput:
    """Computes identity preference optimisation (Azar et al., 2023, eq. 17): ``(chosen - rejected - 1 / (2β))²``.

    The paper's τ is ``beta``. Arguments as for ``dpo_loss``; the log-ratios may be per token (divided by the answer's
    length), which makes the target independent of it.
    """
    chosen, rejected = pairs.rewards(beta)
    gap = to_reduction_dtype(pairs.chosen_P) - to_reduction_dtype(pairs.rejected_P) - 1 / (2 * beta)
    return pairs.output(gap.square(), chosen, rejected)


def hinge_loss(pairs: AnswerPairs, *, beta: float) -> PreferenceLossOutput:
    """Computes ``max(0, 1 - β (chosen - rejected))``: SLiC's rank loss on log-ratios (Zhao et al., 2023; Liu et al.,
    2024).

    Arguments as for ``dpo_loss``. A pair further apart than ``1 / β`` has no gradient.
    """
    chosen, rejected = pairs.rewards(beta)
    return pairs.output(relu(1 - (chosen - rejected)), chosen, rejected)


def exo_pair_loss(pairs: AnswerPairs, *, beta: float, label_smoothing: float) -> PreferenceLossOutput:
    """Computes EXO on pairs (Ji et al., 2024, arXiv 2402.00856, eq. 16): the reverse KL from labels smoothed by ε to
    σ(x).

    Per pair ``σ(x) (log σ(x) - log(1 - ε)) + σ(-x) (log σ(-x) - log ε)`` with ``x = β (chosen - rejected)``; arguments
    as for ``dpo_loss``, ε in (0, 0.5).
    """
    chosen, rejected = pairs.rewards(beta)
    x = chosen - rejected
    right = torch.sigmoid(x) * (logsigmoid(x) - math.log(1 - label_smoothing))
    wrong = torch.sigmoid(-x) * (logsigmoid(-x) - math.log(label_smoothing))
    return pairs.output(right + wrong, chosen, rejected)


def pointwise_pair_loss(
    kind: Literal["nca_pair", "sppo_hard", "apo_zero", "apo_down"], pairs: AnswerPairs, *, beta: float
) -> PreferenceLossOutput:
    """Computes losses of pairs in which each implicit reward, r_w and r_l, also counts by itself.

    ============= ================================================ ===================================================
    ``nca_pair``  ``-log σ(r_w) - (log σ(-r_w) + log σ(-r_l)) / 2`` Chen et al., 2024, arXiv 2402.05369, algorithm 2
    ``sppo_hard`` ``((r_w - ½)² + (r_l + ½)²) / β²``               Wu et al., 2024, arXiv 2405.00675, eq. 4.7; η = 1 / β
    ``apo_zero``  ``1 - σ(r_w) + σ(r_l)``                          D'Oosterlinck et al., 2024, arXiv 2408.06266, § 4
    ``apo_down``  ``σ(r_w) + 1 - σ(r_w - r_l)``                    the same; both shifted to be at least 0, as in TRL
    ============= ================================================ ===================================================

    Other arguments as for ``dpo_loss``.
    """
    chosen, rejected = pairs.rewards(beta)
    match kind:
        case "nca_pair":
            loss_P = -logsigmoid(chosen) - 0.5 * (logsigmoid(-chosen) + logsigmoid(-rejected))
        case "sppo_hard":
            loss_P = ((chosen - 0.5).square() + (rejected + 0.5).square()) / beta**2
        case "apo_zero":
            loss_P = torch.sigmoid(-chosen) + torch.sigmoid(rejected)
        case "apo_down":
            loss_P = torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)
    return pairs.output(loss_P, chosen, rejected)


def discopop_loss(pairs: AnswerPairs, *, beta: float, discopop_tau: float) -> PreferenceLossOutput:
    """Computes DiscoPOP's log-ratio modulated loss (Lu et al., 2024, arXiv 2406.08414, section 4).

    Per pair ``-(1 - m) log σ(x) + m exp(-x)`` with ``x = β (chosen - rejected)`` and ``m = σ(x / τ)``; arguments as for
    ``dpo_loss``. ``exp(-x)`` is weighed as ``exp(log m - x)``, which stays finite wherever the product does.
    """
    chosen, rejected = pairs.rewards(beta)
    x = chosen - rejected
    loss_P = -torch.sigmoid(-x / discopop_tau) * logsigmoid(x) + torch.exp(logsigmoid(x / discopop_tau) - x)
    return pairs.output(loss_P, chosen, rejected)


# With a reference, and the whole step --------------------------------------------------------------------


def bco_pair_loss(pairs: AnswerPairs, *, beta: float, anchors: tuple[Tensor, Tensor]) -> PreferenceLossOutput:
    """Computes BCO on pairs (Jung et al., 2024, arXiv 2404.04656, eq. 13): ``-log σ(r_w - δ) - log σ(δ - r_l)``.

    δ is the mean implicit reward of all answers of the step, a constant. The paper keeps a moving average of it, TRL
    the mean since the run began; the step's own has no state that a resumed run would miss. Arguments as for
    ``dpo_loss``.

    Args:
        anchors: ``[P]`` each, ``step_anchors`` of both sides.
    """
    chosen, rejected = pairs.rewards(beta)
    above, below = (beta * to_reduction_dtype(anchor_P.detach()) for anchor_P in anchors)
    return pairs.output(-logsigmoid(chosen - above) - logsigmoid(below - rejected), chosen, rejected)


def aot_unpaired_loss(
    pairs: AnswerPairs, *, beta: float, label_smoothing: float, anchors: tuple[Tensor, Tensor]
) -> PreferenceLossOutput:
    """Computes AOT without pairs (Melnyk et al., 2024, arXiv 2406.05882, section 3): DPO between the j-th smallest
    log-ratio of chosen answers and the j-th smallest of rejected ones. Arguments as for ``bco_pair_loss``.

    The two answers need not lie in one micro-batch: each meets the other's value as a constant, in a term of its own.
    Their sum has the gradient of the whole, and half of it is its value.
    """
    higher, lower = (to_reduction_dtype(anchor_P.detach()) for anchor_P in anchors)
    loss_of = partial(dpo_loss, beta=beta, label_smoothing=label_smoothing)
    own = loss_of(replace(pairs, rejected_P=higher)), loss_of(replace(pairs, chosen_P=lower))
    both = own[0].loss + own[1].loss
    return PreferenceLossOutput(both - both.detach() / 2, own[0].chosen_rewards_P, own[1].rejected_rewards_P)


@torch.no_grad()
def step_anchors(kind: Literal["bco_pair", "aot", "aot_unpaired"], policy_P2: Tensor, reference_P2: Tensor) -> Tensor:
    """Returns ``[P, 2]`` what each answer of a step is compared with, by the policy as the step begins.

    ==================== =====================================================================================
    ``bco_pair``         the mean log-ratio of all answers
    ``aot``              what ``chosen - rejected`` log-ratios must exceed, so that the pair's margin exceeds the
                         reference's of the same rank
    ``aot_unpaired``     the log-ratio of the other side's answer of the same rank
    ==================== =====================================================================================

    Args:
        policy_P2, reference_P2: ``[P, 2]`` log-probabilities of chosen and rejected answers, of the whole step.
    """
    ratios = to_reduction_dtype(policy_P2) - to_reduction_dtype(reference_P2)
    match kind:
        case "bco_pair":
            return ratios.mean().expand_as(ratios)
        case "aot":
            margins, of_reference = (
                to_reduction_dtype(x[:, 0]) - to_reduction_dtype(x[:, 1]) for x in (policy_P2, reference_P2)
            )
            return (_of_same_rank(margins, of_reference) - of_reference)[:, None].expand_as(ratios)
        case "aot_unpaired":
            chosen, rejected = ratios.unbind(1)
            return torch.stack([_of_same_rank(chosen, rejected), _of_same_rank(rejected, chosen)], 1)


def _of_same_rank(values_P: Tensor, others_P: Tensor) -> Tensor:
    """Returns ``[P]`` for each value the one of ``others`` that is as large among them."""
    ranks_P = values_P.argsort(stable=True).argsort()
    return others_P.sort().values[ranks_P]


def kto_reference_point(mismatched_S: Tensor) -> Tensor:
    """Computes KTO's ``z₀``: a scalar estimate of KL(policy ‖ reference), at least 0, a constant (Ethayarajh et al.,
    2024).

    Args:
        mismatched_S: ``[S]`` log-ratios of answers to *other* prompts, of the whole mini-batch.
    """
    return to_reduction_dtype(mismatched_S.detach()).mean().clamp(min=0.0)


def kto_loss(
    log_ratio_S: Tensor,
    desirable_S: Tensor,
    reference_point: Tensor,
    num_answers: int,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> JudgedLossOutput:
    """Computes Kahneman-Tversky optimisation (Ethayarajh et al., 2024), for answers judged one by one.

    Per answer ``w_d (1 - σ(β (r - z₀)))`` where it is desirable, ``w_u (1 - σ(β (z₀ - r)))`` where it is not.

    Args:
        log_ratio_S: ``[S]`` with gradient.
        desirable_S: ``[S]`` bool.
        reference_point: scalar or ``[S]``, ``kto_reference_point`` of the whole mini-batch; a constant.
        num_answers: answers of the whole mini-batch, the denominator.
        beta: above 0.
        desirable_weight, undesirable_weight: w_d, w_u, at least 0.
    """
    rewards = beta * to_reduction_dtype(log_ratio_S)
    above = rewards - beta * to_reduction_dtype(reference_point.detach())
    loss_S = torch.where(
        desirable_S, desirable_weight * torch.sigmoid(-above), undesirable_weight * torch.sigmoid(above)
    )
    return JudgedLossOutput(loss_S.sum() / max(num_answers, 1), rewards.detach())


# Without a reference -------------------------------------------------------------------------------------


def simpo_loss(pairs: AnswerPairs, *, beta: float, gamma: float) -> PreferenceLossOutput:
    """Computes SimPO (Meng et al., 2024, eq. 6): ``-logsigmoid(β (chosen - rejected) - γ)``.

    Args:
        pairs: of mean log-probabilities.
        beta: above 0.
        gamma: target margin between the implicit rewards, at least 0.
    """
    chosen, rejected = pairs.rewards(beta)
    return pairs.output(-logsigmoid(chosen - rejected - gamma), chosen, rejected)


def odds_ratio_loss(pairs: AnswerPairs) -> PreferenceLossOutput:
    """Computes ORPO's second term (Hong et al., 2024, eq. 7): ``-logsigmoid(log odds(chosen) - log odds(rejected))``.

    ``odds = p / (1 - p)`` of the answer's mean probability per token ``p = exp(mean log-probability)``. The first term,
    to which this is added times its weight, is ``answer_nll`` of the chosen answers. Arguments as for ``simpo_loss``.
    The implicit reward is the log of the odds.
    """
    chosen, rejected = _log_odds(pairs.chosen_P), _log_odds(pairs.rejected_P)
    return pairs.output(-logsigmoid(chosen - rejected), chosen, rejected)


def answer_nll(pairs: AnswerPairs) -> Tensor:
    """Returns the negative log-likelihood per token of the chosen answers, each answer counting alike:
    ``mean(-chosen)``. Arguments as for ``simpo_loss``.
    """
    return -to_reduction_dtype(pairs.chosen_P).sum() / max(pairs.num_pairs, 1)


# Choosing among responses ---------------------------------------------------------------------------------


def best_of_groups_mask(scores_N: Tensor, group_N: Tensor, keep: int) -> Tensor:
    """Returns ``[N]`` bool: the ``keep`` highest scores of each group; of equal ones the first.

    Groups of equal scores have none: there is nothing to tell their members apart.

    Args:
        scores_N: ``[N]`` finite.
        group_N: ``[N]`` int64 labels.
    """
    ranks_N, _, is_constant_N = _ranked(scores_N, group_N)
    return (ranks_N < keep) & ~is_constant_N


def best_and_worst(scores_N: Tensor, group_N: Tensor) -> Tensor:
    """Returns ``[N]`` int64: 1 for the highest score of each group, -1 for its lowest, 0 for the rest and where all are
    equal.

    Of equally good ones the first is taken, of equally bad ones the last.
    """
    ranks_N, sizes_N, is_constant_N = _ranked(scores_N, group_N)
    return torch.where(is_constant_N, 0, (ranks_N == 0).long() - (ranks_N == sizes_N - 1).long())


def _ranked(scores_N: Tensor, group_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``[N]`` each: a score's place within its group, from the highest, 0; the group's size; bool, whether all
    its scores are equal.
    """
    labels = torch.unique(group_N, return_inverse=True)[1]
    falling = scores_N.argsort(descending=True, stable=True)
    order = falling[labels[falling].argsort(stable=True)]
    sizes = torch.bincount(labels)
    starts = (sizes.cumsum(0) - sizes)[labels[order]]
    places = torch.arange(len(order), device=order.device) - starts
    is_constant = segment_is_constant(scores_N, labels, len(sizes))
    return torch.empty_like(places).index_copy(0, order, places), sizes[labels], is_constant[labels]


# Details -------------------------------------------------------------------------------------------------


def _log_odds(mean_logprob: Tensor) -> Tensor:
    """Returns ``log p - log(1 - p)`` from ``log p``, without loss of digits near p = 0 and p = 1.

    p stays one rounding step below 1, where the odds and their gradient would be infinite.
    """
    log_p = to_reduction_dtype(mean_logprob)
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)
    near_one = torch.log(-torch.expm1(log_p))
    small = torch.log1p(-torch.exp(log_p))
    return log_p - torch.where(log_p > -math.log(2), near_one, small)
