"""What each kind of training minimises: binds a batch's fields to the pure losses of ``quartet.algorithms``.

Shapes: T stored tokens, S sequences, N trajectories, P pairs.

======================= ======================================================================================
``SFTObjective``        negative log-likelihood of demonstrations (``loss_mask``)
``PolicyObjective``     policy loss, KL and entropy terms (``loss_mask``, ``advantages``, …)
``ValueObjective``      clipped value loss (``action_mask``, ``values``, ``returns``)
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
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quartet.algorithms.losses import (
    Aggregation,
    AggregationDenominators,
    ImportanceWeights,
    LossTokens,
    PolicyLossOutput,
    PolicyTokens,
    SampledTokens,
    aggregate_loss,
    aggregation_denominators,
    cispo_loss,
    gmpo_loss,
    gspo_loss,
    importance_weights,
    kl_cov_loss,
    kl_loss,
    mean_weight,
    pairwise_reward_loss,
    policy_loss,
    reinforce_loss,
    sapo_loss,
    sequence_policy_loss,
    sft_loss,
    value_loss,
)
from quartet.algorithms.preference import (
    AnswerPairs,
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
from quartet.algorithms.segments import masked_owner, segment_count, segment_sum, zero_unmasked
from quartet.batch.ragged import RaggedBatch
from quartet.config.algorithms import (
    PPO,
    UNCLIPPED_LOSSES,
    CISPOLoss,
    ClipCovLoss,
    ClippedLoss,
    GMPOLoss,
    GSPOLoss,
    KLCovLoss,
    OffPolicyConfig,
    PolicyGradient,
    ReinforceLoss,
    SAPOLoss,
    SequenceClippedLoss,
    keeps_trajectories_whole,
    kl_term,
)
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
from quartet.models.logprobs import SamplingLimits
from quartet.train.engine import Objective
from quartet.train.forward import ForwardNeeds, ForwardOutputs
from quartet.train.metrics import MetricSums

HIGH_ENTROPY, HIGH_COVARIANCE = "high_entropy", "high_covariance"
"""Boolean token columns of methods that treat such tokens otherwise than the rest of the step."""


def trajectory_index(batch: RaggedBatch) -> Tensor:
    """Returns ``[T]`` trajectory that owns each token, -1 for shared ancestors."""
    sequence_T = batch.sequence_index()
    trajectory_S = batch.sequence["trajectory"]
    return torch.where(sequence_T >= 0, trajectory_S[sequence_T.clamp(min=0)], -1)


def atoms_by_field(batch: RaggedBatch, name: str) -> list[list[int]]:
    """Groups sequences with an equal value of a sequence field, as atoms of a micro-batch."""
    atoms: dict[int, list[int]] = {}
    for s, owner in enumerate(batch.sequence[name].tolist()):
        atoms.setdefault(owner, []).append(s)
    return list(atoms.values())


def require_tensor(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"the forward pass was not asked for {name}")
    return tensor


def sampler_agreement(logprobs: Tensor, batch: RaggedBatch, sums: MetricSums) -> None:
    """Measures by how much trainer and sampler differ about the tokens that are trained on."""
    difference, mask = (logprobs - batch.token["rollout_logprobs"]).abs(), batch.token["loss_mask"]
    sums.mean("agreement/logprob_diff_mean", difference, mask)
    sums.maximum("agreement/logprob_diff_max", difference, mask)


# Supervised ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SFTObjective(Objective):
    """Mean negative log-likelihood over the batch's loss tokens, logged as ``metric``."""

    metric: str = "loss/sft"

    needs = ForwardNeeds(logprobs=True)

    def denominators(self, batch: RaggedBatch) -> AggregationDenominators:
        return aggregation_denominators(batch.token["loss_mask"], batch.sequence_index(), len(batch))

    def loss(
        self, outputs: ForwardOutputs, batch: RaggedBatch, denominators: AggregationDenominators, sums: MetricSums
    ) -> Tensor:
        logprobs = require_tensor(outputs.logprobs, "logprobs")
        loss = sft_loss(logprobs, LossTokens(batch.token["loss_mask"], batch.sequence_index(), denominators))
        sums.total(self.metric, loss)
        return loss


# Reinforcement -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyObjective(Objective):
    """The actor's loss over trajectories numbered by the sequence field ``trajectory``.

    Args:
        config: the algorithm.
        num_trajectories: numbering of the step's trajectories (mini-batches keep it).
        temperature: that of sampling.
        kl_coef: coefficient of a KL term in the loss; 0 for none.
        is_first: the first mini-batch of a step. Its ``old`` is its own forward pass, so its ratio is exactly 1.
        max_new_tokens: norm of ``sequence_mean_token_sum_norm``.
        limits: of sampling, where log-probabilities are those of what they keep.
    """

    config: PolicyGradient
    num_trajectories: int
    temperature: float
    kl_coef: float
    is_first: bool
    max_new_tokens: int
    limits: SamplingLimits | None = None

    @property
    def needs(self) -> ForwardNeeds:
        return ForwardNeeds(
            logprobs=True,
            entropies=True,
            entropy_gradient=self.config.entropy_coef > 0,
            temperature=self.temperature,
            limits=self.limits,
        )

    def atoms(self, batch: RaggedBatch) -> Sequence[Sequence[int]]:
        return atoms_by_field(batch, "trajectory") if keeps_trajectories_whole(self.config) else super().atoms(batch)

    def denominators(self, batch: RaggedBatch) -> AggregationDenominators:
        mask, owner, correction = batch.token["loss_mask"], trajectory_index(batch), self.config.off_policy
        found = aggregation_denominators(mask, owner, self.num_trajectories, norm=float(self.max_new_tokens))
        if correction is None or not correction.batch_normalize:
            return found
        sampled = self._sampled(batch.token["old_logprobs"], batch)
        weights = _importance(correction, sampled).weights
        return replace(found, mean_weight=mean_weight(weights, sampled, level=correction.level))

    def loss(
        self, outputs: ForwardOutputs, batch: RaggedBatch, denominators: AggregationDenominators, sums: MetricSums
    ) -> Tensor:
        logprobs = require_tensor(outputs.logprobs, "logprobs")
        mask, config = batch.token["loss_mask"], self.config
        tokens = LossTokens(mask, trajectory_index(batch), denominators, config.aggregation)
        old = logprobs.detach() if self.is_first else batch.token["old_logprobs"]
        weights = self._weights(old, batch, denominators, sums)
        out = self._policy_loss(logprobs, old, weights, batch, tokens)
        total = out.loss
        sums.total("loss/policy", out.loss)
        self._clip_metrics(out, sums)
        entropies = require_tensor(outputs.entropies, "entropies")
        sums.mean("policy/entropy", entropies, mask)
        if config.entropy_coef > 0:
            bonus = aggregate_loss(entropies, tokens)
            sums.total("loss/entropy", bonus)
            total = total - config.entropy_coef * bonus
        kl = kl_term(config)
        if self.kl_coef > 0 and kl.place == "loss":
            penalty = kl_loss(logprobs, batch.token["ref_logprobs"], tokens, kl.estimator)
            sums.total("loss/kl", penalty)
            total = total + self.kl_coef * penalty
        if self.is_first:
            sampler_agreement(old, batch, sums)
        return total

    def _weights(
        self, old: Tensor, batch: RaggedBatch, denominators: AggregationDenominators, sums: MetricSums
    ) -> Tensor | None:
        """Returns ``[T]`` factors of the tokens' losses, where the recipe asks for any: importance weights, and 0 for
        tokens that the policy loss leaves out.
        """
        config, mask, weights = self.config, batch.token["loss_mask"], None
        if config.off_policy is not None:
            found = _importance(config.off_policy, self._sampled(old, batch))
            sums.mean("correction/weight_mean", found.weights, mask)
            sums.add("correction/limited_frac", found.num_capped, mask.sum())
            mean = denominators.mean_weight
            weights = found.weights if mean is None else found.weights / mean
        chosen = [batch.token[HIGH_ENTROPY]] if config.top_entropy_quantile < 1 else []
        chosen += [~batch.token[HIGH_COVARIANCE]] if isinstance(config.policy_loss, ClipCovLoss) else []
        for mask in chosen:
            weights = mask.to(old.dtype) if weights is None else weights * mask
        return weights

    def _sampled(self, old: Tensor, batch: RaggedBatch) -> SampledTokens:
        token = batch.token
        owner = trajectory_index(batch)
        return SampledTokens(old, token["rollout_logprobs"], token["loss_mask"], owner, self.num_trajectories)

    def _policy_loss(
        self, logprobs: Tensor, old: Tensor, weights: Tensor | None, batch: RaggedBatch, tokens: LossTokens
    ) -> PolicyLossOutput:
        advantages = batch.token["advantages"]
        given = PolicyTokens(logprobs, old, advantages, tokens, weights)
        match self.config.policy_loss:
            case ClippedLoss(clip_eps_low=low, clip_eps_high=high, dual_clip=dual):
                return policy_loss(given, clip_eps_low=low, clip_eps_high=high, dual_clip=dual)
            case ClipCovLoss(clip_eps_low=low, clip_eps_high=high):
                return policy_loss(given, clip_eps_low=low, clip_eps_high=high)
            case SequenceClippedLoss(clip_eps_low=low, clip_eps_high=high):
                # The advantage stands on every token of its trajectory; its mean over them is itself.
                spread = zero_unmasked(advantages if weights is None else advantages * weights, tokens.mask_T)
                sums_N = segment_sum(spread, tokens.owner_T, self.num_trajectories)
                advantages_N = sums_N / tokens.denominators.tokens_per_sequence.clamp(min=1)
                given = PolicyTokens(logprobs, old, advantages_N, tokens)
                return sequence_policy_loss(given, clip_eps_low=low, clip_eps_high=high)
            case GSPOLoss(clip_eps_low=low, clip_eps_high=high):
                return gspo_loss(given, clip_eps_low=low, clip_eps_high=high)
            case CISPOLoss(clip_eps_low=bound, clip_eps_high=high):
                return cispo_loss(given, clip_eps_low=bound, clip_eps_high=high)
            case SAPOLoss(tau_pos=positive, tau_neg=negative):
                return sapo_loss(given, tau_pos=positive, tau_neg=negative)
            case GMPOLoss(clip_eps_low=low, clip_eps_high=high):
                return gmpo_loss(given, clip_eps_low=low, clip_eps_high=high)
            case KLCovLoss(ppo_kl_coef=coef):
                return kl_cov_loss(given, held_T=batch.token[HIGH_COVARIANCE], ppo_kl_coef=coef)
            case ReinforceLoss():
                return reinforce_loss(given)

    def _clip_metrics(self, out: PolicyLossOutput, sums: MetricSums) -> None:
        if not isinstance(self.config.policy_loss, UNCLIPPED_LOSSES):
            sums.add("policy/clip_frac", out.num_clipped, out.num_units)
            kind = "numerical" if self.is_first else "drift"
            sums.add(f"policy/clip_frac_{kind}", out.num_clipped, out.num_units)
        if isinstance(self.config.policy_loss, ClippedLoss) and self.config.policy_loss.dual_clip is not None:
            sums.add("policy/dual_clip_frac", out.num_dual_clipped, out.num_units)
        sums.add("policy/ratio_mean", out.ratio_sum, out.num_units)
        sums.add("policy/approx_kl", out.approx_kl_sum, out.num_units)
        sums.maximum("policy/ratio_max", out.ratios, torch.ones_like(out.ratios, dtype=torch.bool))


def _importance(config: OffPolicyConfig, sampled: SampledTokens) -> ImportanceWeights:
    return importance_weights(sampled, level=config.level, mode=config.mode, cap=config.cap, floor=config.floor)


@dataclass(frozen=True)
class ValueObjective(Objective):
    """The critic's loss over action tokens; ``values`` in the batch are those when the step began."""

    config: PPO
    num_trajectories: int

    needs = ForwardNeeds(values=True, mask="action_mask")

    def denominators(self, batch: RaggedBatch) -> AggregationDenominators:
        return aggregation_denominators(batch.token["action_mask"], trajectory_index(batch), self.num_trajectories)

    def loss(
        self, outputs: ForwardOutputs, batch: RaggedBatch, denominators: AggregationDenominators, sums: MetricSums
    ) -> Tensor:
        values, mask = require_tensor(outputs.values, "values"), batch.token["action_mask"]
        tokens = LossTokens(mask, trajectory_index(batch), denominators)
        out = value_loss(values, batch.token["values"], batch.token["returns"], tokens, clip_eps=self.config.value_clip)
        sums.total("loss/value", out.loss)
        sums.add("critic/clip_frac", out.num_clipped, out.num_tokens)
        sums.mean("critic/value_mean", values, mask)
        return out.loss


def pair_sides(batch: RaggedBatch) -> tuple[Tensor, Tensor]:
    """Returns the sequences of the chosen and of the rejected sides, each ``[P]``, in the order of the pairs' numbers.

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
    """Sums up the log-probabilities of each answer's tokens ``[S]``, and counts its loss tokens ``[S]``."""
    owner = masked_owner(batch.sequence_index(), batch.token["loss_mask"])
    return segment_sum(logprobs_T, owner, len(batch)), segment_count(owner, len(batch))


# Reward models -------------------------------------------------------------------------------------------


class _OverPairs(Objective):
    """A mean over pairs, of which each stays in one micro-batch."""

    def atoms(self, batch: RaggedBatch) -> Sequence[Sequence[int]]:
        return atoms_by_field(batch, "pair")

    def denominators(self, batch: RaggedBatch) -> int:
        return len(batch) // 2


@dataclass(frozen=True)
class PairwiseObjective(_OverPairs):
    """Bradley-Terry loss; ``margin_scale`` multiplies the pairs' margins."""

    centring: float = 0.0
    margin_scale: float = 1.0

    needs = ForwardNeeds(scores=True)

    def loss(self, outputs: ForwardOutputs, batch: RaggedBatch, denominators: int, sums: MetricSums) -> Tensor:
        scores = require_tensor(outputs.scores, "scores")
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

    def log_ratios(self, *, per_token: bool = False) -> AnswerPairs:
        ratios = self.logprobs - self.reference
        return AnswerPairs(*self.of_sides(ratios / self.lengths.clamp(min=1) if per_token else ratios), self.num_pairs)

    def means(self) -> AnswerPairs:
        """Returns the log-probabilities per token."""
        return AnswerPairs(*self.of_sides(self.logprobs / self.lengths.clamp(min=1)), self.num_pairs)


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
    def needs(self) -> ForwardNeeds:
        return ForwardNeeds(logprobs=True, temperature=self.temperature)

    def loss(self, outputs: ForwardOutputs, batch: RaggedBatch, denominators: int, sums: MetricSums) -> Tensor:
        logprobs = require_tensor(outputs.logprobs, "logprobs")
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

    needs = ForwardNeeds(logprobs=True)

    def atoms(self, batch: RaggedBatch) -> Sequence[Sequence[int]]:
        # Together, so that accuracy can be seen where answers come in pairs.
        return atoms_by_field(batch, "pair")

    def denominators(self, batch: RaggedBatch) -> int:
        return len(batch)

    def loss(self, outputs: ForwardOutputs, batch: RaggedBatch, denominators: int, sums: MetricSums) -> Tensor:
        totals, lengths = answer_logprobs(require_tensor(outputs.logprobs, "logprobs"), batch)
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
    def needs(self) -> ForwardNeeds:
        return ForwardNeeds(logprobs=True, temperature=self.temperature)

    def denominators(self, batch: RaggedBatch) -> AggregationDenominators:
        return aggregation_denominators(
            batch.token["loss_mask"], trajectory_index(batch), self.num_trajectories, norm=float(self.max_new_tokens)
        )

    def loss(
        self, outputs: ForwardOutputs, batch: RaggedBatch, denominators: AggregationDenominators, sums: MetricSums
    ) -> Tensor:
        logprobs = require_tensor(outputs.logprobs, "logprobs")
        if self.is_first:
            sampler_agreement(logprobs, batch, sums)
        tokens = LossTokens(batch.token["loss_mask"], trajectory_index(batch), denominators, self.aggregation)
        loss = sft_loss(logprobs, tokens)
        sums.total("loss/sft", loss)
        return loss
