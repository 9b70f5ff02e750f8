"""What training on preferences minimises: binds a batch's fields to ``quartet.algorithms.preference``.

Shapes: T stored tokens, S sequences, P pairs.

======================= ======================================================================================
``PairwiseObjective``   Bradley-Terry loss of a reward model (``pair``, ``chosen``, ``margin``)
``PreferenceObjective`` DPO and its relatives (``pair``, ``chosen``, ``loss_mask``, ``ref_logprobs``; ``anchor`` where
                        the loss depends on the whole step)
``KTOObjective``        answers judged one by one (``chosen``, ``loss_mask``, ``ref_logprobs``, ``kl``)
``BestOfNObjective``    likelihood of responses of the policy itself (``loss_mask``, ``trajectory``)
======================= ======================================================================================

A pair is two sequences with the same ``pair``; ``chosen [S]`` bool says which is which. ``ref_logprobs [S]`` is the
reference's log-probability of the whole answer, a sum over its loss tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quartet.algorithms.losses import (
    Aggregation,
    AggregationDenominators,
    LossTokens,
    aggregation_denominators,
    pairwise_reward_loss,
    sft_loss,
)
from quartet.algorithms.preference import (
    Pairs,
    PreferenceLossOutput,
    answer_nll,
    aot_unpaired_loss,
    bco_pair_loss,
    discopop_loss,
    dpo_loss,
    exo_pair_loss,
    hinge_loss,
    ipo_loss,
    kto_loss,
    odds_ratio_loss,
    pointwise_pair_loss,
    robust_dpo_loss,
    simpo_loss,
)
from quartet.algorithms.segments import masked_owner, segment_count, segment_sum
from quartet.batch.ragged import RaggedBatch
from quartet.config.preference import (
    REFERENCE_FREE,
    BCOPairLoss,
    DiscoPOPLoss,
    DPOLoss,
    EXOPairLoss,
    HingeLoss,
    IPOLoss,
    KTOLoss,
    ORPOLoss,
    PairLossConfig,
    PointwisePairLoss,
    RobustDPOLoss,
    SimPOLoss,
    StepLossConfig,
)
from quartet.train.engine import Objective
from quartet.train.forward import Needs, Outputs
from quartet.train.metrics import MetricSums
from quartet.train.objectives import by_field, required, sampler_agreement, trajectory_index


def pair_sides(batch: RaggedBatch) -> tuple[Tensor, Tensor]:
    """Sequences of the chosen and of the rejected sides, each ``[P]``, in the order of the pairs' numbers.

    Raises:
        ValueError: a pair is not one chosen and one rejected sequence.
    """
    chosen, pair = batch.sequence["chosen"], batch.sequence["pair"]
    first = torch.nonzero(chosen).squeeze(1)
    second = torch.nonzero(~chosen).squeeze(1)
    first, second = first[pair[first].argsort()], second[pair[second].argsort()]
    if not torch.equal(pair[first], pair[second]):
        raise ValueError("a pair needs exactly one chosen and one rejected sequence")
    return first, second


def answer_logprobs(logprobs_T: Tensor, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
    """Of each answer the sum of its tokens' log-probabilities ``[S]``, and the number of its loss tokens ``[S]``."""
    owner = masked_owner(batch.sequence_index(), batch.token["loss_mask"])
    return segment_sum(logprobs_T, owner, len(batch)), segment_count(owner, len(batch))


# Reward models -------------------------------------------------------------------------------------------


class _OverPairs(Objective):
    """A mean over pairs, of which each stays in one micro-batch."""

    def atoms(self, batch: RaggedBatch) -> Sequence[Sequence[int]]:
        return by_field(batch, "pair")

    def denominators(self, batch: RaggedBatch) -> int:
        return len(batch) // 2


@dataclass(frozen=True)
class PairwiseObjective(_OverPairs):
    """Bradley-Terry loss; ``margin_scale`` multiplies the pairs' margins."""

    centring: float = 0.0
    margin_scale: float = 1.0

    needs = Needs(scores=True)

    def loss(self, outputs: Outputs, batch: RaggedBatch, denominators: int, sums: MetricSums) -> Tensor:
        scores = required(outputs.scores, "scores")
        first, second = pair_sides(batch)
        margin = self.margin_scale * batch.sequence["margin"][first] if "margin" in batch.sequence else None
        out = pairwise_reward_loss(scores[first], scores[second], denominators, margin_P=margin, centring=self.centring)
        count = torch.tensor(float(len(first)))
        sums.total("loss/reward_model", out.loss)
        sums.add("reward_model/accuracy", out.num_correct, count)
        sums.add("reward_model/margin", out.margin_sum, count)
        return out.loss


# Policies ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Answers:
    """Log-probabilities of a micro-batch's answers, their reference's and their numbers of tokens, each ``[S]``;
    ``sides``, the chosen and the rejected ones ``[P]``; and the number of pairs in the mini-batch."""

    logprobs: Tensor
    reference: Tensor
    lengths: Tensor
    sides: tuple[Tensor, Tensor]
    num_pairs: int

    def of_sides(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return values[self.sides[0]], values[self.sides[1]]

    def log_ratios(self, *, per_token: bool = False) -> Pairs:
        ratios = self.logprobs - self.reference
        return Pairs(*self.of_sides(ratios / self.lengths.clamp(min=1) if per_token else ratios), self.num_pairs)

    def means(self) -> Pairs:
        """Log-probabilities per token."""
        return Pairs(*self.of_sides(self.logprobs / self.lengths.clamp(min=1)), self.num_pairs)


@dataclass(frozen=True)
class PreferenceObjective(_OverPairs):
    """A loss over pairs of answers.

    Args:
        config: the loss.
        temperature: that of the log-probabilities; 1 where answers were not sampled by us.
        compare_sampler: the answers were sampled by the policy as it is now, which has their ``rollout_logprobs``.
    """

    config: PairLossConfig | StepLossConfig
    temperature: float = 1.0
    compare_sampler: bool = False

    @property
    def needs(self) -> Needs:
        return Needs(logprobs=True, temperature=self.temperature)

    def loss(self, outputs: Outputs, batch: RaggedBatch, denominators: int, sums: MetricSums) -> Tensor:
        logprobs = required(outputs.logprobs, "logprobs")
        if self.compare_sampler:
            sampler_agreement(logprobs, batch, sums)
        totals, lengths = answer_logprobs(logprobs, batch)
        has_reference = not isinstance(self.config, REFERENCE_FREE)
        reference = batch.sequence["ref_logprobs"] if has_reference else torch.zeros_like(totals)
        answers = _Answers(totals, reference.to(totals.dtype), lengths, pair_sides(batch), denominators)
        margin = batch.sequence["margin"][answers.sides[0]] if "margin" in batch.sequence else None
        if isinstance(self.config, StepLossConfig):
            out = self._step_loss(self.config, answers, answers.of_sides(batch.sequence["anchor"]))
        else:
            out = self._pair_loss(self.config, answers, margin)
        total = out.loss
        sft_coef = 1.0 if isinstance(self.config, ORPOLoss) else self.config.sft_coef
        if sft_coef > 0:
            likelihood = answer_nll(answers.means())
            sums.total("loss/sft", likelihood)
            total = total + sft_coef * likelihood
        sums.total("loss/preference", total)
        _pair_metrics(out, answers, sums)
        return total

    def _step_loss(
        self, config: StepLossConfig, answers: _Answers, anchors: tuple[Tensor, Tensor]
    ) -> PreferenceLossOutput:
        pairs, beta = answers.log_ratios(), config.beta
        if isinstance(config, BCOPairLoss):
            return bco_pair_loss(pairs, beta=beta, anchors=anchors)
        smoothing = config.label_smoothing
        if config.name == "aot":
            return dpo_loss(pairs, beta=beta, label_smoothing=smoothing, margin_P=beta * anchors[0])
        return aot_unpaired_loss(pairs, beta=beta, label_smoothing=smoothing, anchors=anchors)

    def _pair_loss(self, config: PairLossConfig, answers: _Answers, margin: Tensor | None) -> PreferenceLossOutput:
        match config:
            case DPOLoss(beta=beta, label_smoothing=smoothing):
                offset = None if margin is None or config.margin_coef == 0 else config.margin_coef * margin
                return dpo_loss(answers.log_ratios(), beta=beta, label_smoothing=smoothing, margin_P=offset)
            case RobustDPOLoss(beta=beta, label_smoothing=smoothing):
                return robust_dpo_loss(answers.log_ratios(), beta=beta, label_smoothing=smoothing)
            case IPOLoss():
                return ipo_loss(answers.log_ratios(per_token=config.per_token), beta=config.beta)
            case HingeLoss():
                return hinge_loss(answers.log_ratios(), beta=config.beta)
            case EXOPairLoss(beta=beta, label_smoothing=smoothing):
                return exo_pair_loss(answers.log_ratios(), beta=beta, label_smoothing=smoothing)
            case PointwisePairLoss(name=kind, beta=beta):
                return pointwise_pair_loss(kind, answers.log_ratios(), beta=beta)
            case DiscoPOPLoss(beta=beta, discopop_tau=tau):
                return discopop_loss(answers.log_ratios(), beta=beta, discopop_tau=tau)
            case SimPOLoss():
                return simpo_loss(answers.means(), beta=config.beta, gamma=config.gamma)
            case ORPOLoss():
                out = odds_ratio_loss(answers.means())
                return PreferenceLossOutput(config.odds_coef * out.loss, out.chosen_rewards_P, out.rejected_rewards_P)


def _pair_metrics(out: PreferenceLossOutput, answers: _Answers, sums: MetricSums) -> None:
    chosen, rejected = out.chosen_rewards_P, out.rejected_rewards_P
    sums.mean("preference/reward_chosen", chosen)
    sums.mean("preference/reward_rejected", rejected)
    sums.mean("preference/margin", chosen - rejected)
    sums.mean("preference/accuracy", chosen > rejected)
    means = answers.means()
    sums.mean("preference/logprob_chosen", means.chosen_P)
    sums.mean("preference/logprob_rejected", means.rejected_P)


@dataclass(frozen=True)
class KTOObjective(Objective):
    """A loss over answers judged one by one; ``chosen`` says which are desirable.

    ``kl [S]`` holds, for every answer alike, the reference point of the whole mini-batch (``kto_reference_point``).
    """

    config: KTOLoss

    needs = Needs(logprobs=True)

    def atoms(self, batch: RaggedBatch) -> Sequence[Sequence[int]]:
        # Together, so that accuracy can be seen where answers come in pairs.
        return by_field(batch, "pair")

    def denominators(self, batch: RaggedBatch) -> int:
        return len(batch)

    def loss(self, outputs: Outputs, batch: RaggedBatch, denominators: int, sums: MetricSums) -> Tensor:
        totals, lengths = answer_logprobs(required(outputs.logprobs, "logprobs"), batch)
        desirable = batch.sequence["chosen"]
        out = kto_loss(
            totals - batch.sequence["ref_logprobs"].to(totals.dtype),
            desirable,
            batch.sequence["kl"],
            denominators,
            beta=self.config.beta,
            desirable_weight=self.config.desirable_weight,
            undesirable_weight=self.config.undesirable_weight,
        )
        sums.total("loss/preference", out.loss)
        means = totals / lengths.clamp(min=1)
        for side, mask in (("chosen", desirable), ("rejected", ~desirable)):
            sums.mean(f"preference/reward_{side}", out.rewards_S, mask)
            sums.mean(f"preference/logprob_{side}", means, mask)
        sums.mean("preference/kl", batch.sequence["kl"])
        if int(desirable.sum()) * 2 == len(batch) == 2 * len(set(batch.sequence["pair"].tolist())):
            first, second = pair_sides(batch)
            sums.mean("preference/margin", out.rewards_S[first] - out.rewards_S[second])
            sums.mean("preference/accuracy", out.rewards_S[first] > out.rewards_S[second])
        return out.loss


# Responses of the policy itself --------------------------------------------------------------------------


@dataclass(frozen=True)
class BestOfNObjective(Objective):
    """Negative log-likelihood of selected responses; arguments as for ``PolicyObjective``."""

    aggregation: Aggregation
    num_trajectories: int
    temperature: float
    max_new_tokens: int
    is_first: bool

    @property
    def needs(self) -> Needs:
        return Needs(logprobs=True, temperature=self.temperature)

    def denominators(self, batch: RaggedBatch) -> AggregationDenominators:
        return aggregation_denominators(
            batch.token["loss_mask"], trajectory_index(batch), self.num_trajectories, norm=float(self.max_new_tokens)
        )

    def loss(
        self, outputs: Outputs, batch: RaggedBatch, denominators: AggregationDenominators, sums: MetricSums
    ) -> Tensor:
        logprobs = required(outputs.logprobs, "logprobs")
        if self.is_first:
            sampler_agreement(logprobs, batch, sums)
        tokens = LossTokens(batch.token["loss_mask"], trajectory_index(batch), denominators, self.aggregation)
        loss = sft_loss(logprobs, tokens)
        sums.total("loss/sft", loss)
        return loss
