"""Algorithms of reinforcement learning: one class per method, each with only its own fields.

A method is an advantage estimator, a policy loss, and how KL, entropy and the difference between sampler and trainer
enter. A variant that changes a few defaults of its parent stands under it and has a name of its own, so that one line
of a recipe picks it. The choices are independent: ``{name: rloo, policy_loss: {name: gspo}}`` is a recipe, too; what
does not fit together is told apart in ``quartet.config.recipe``.

================================ ======================= =============================================
advantages                       policy loss             names
================================ ======================= =============================================
GAE with a critic                clipped, token          ``ppo``
relative to the group            clipped, token          ``grpo``, ``dr_grpo``, ``dapo``
relative to the group            other                   ``gspo``, ``cispo``, ``gpg``, ``sapo``, ``gmpo``
relative to the group, by reward clipped, token          ``gdpo``
best of k of the group           clipped, token          ``pass_at_k``
per position of the group        clipped, token          ``optimal_token_baseline``
leave one out                    clipped, sequence       ``rloo``
length-weighted group baseline   clipped, token          ``opo``
normalised over the batch        clipped, token          ``reinforce_pp``, ``reinforce_pp_baseline``
greedy baseline                  plain                   ``remax``
likelier for a teacher           plain                   ``distillation``
best of the group                log-likelihood          ``best_of_n``
best and worst of the group      pairs, as in DPO        ``online_dpo``
================================ ======================= =============================================
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from quartet.config.common import StrictModel
from quartet.config.preference import REFERENCE_FREE, DPOLoss, PairLossConfig
from quartet.config.strict import Nats, Responses, Tokens


class ClippedLoss(StrictModel):
    """Schulman et al. 2017: the ratio of each token is clipped."""

    name: Literal["clipped"] = "clipped"
    clip_eps_low: float = Field(0.2, gt=0, le=1, description="A token's ratio is clipped at 1 less this.")
    clip_eps_high: float = Field(0.2, gt=0, description="A token's ratio is clipped at 1 plus this.")
    dual_clip: float | None = Field(
        None, gt=1, description="Most that a token of negative advantage costs, over that advantage."
    )


class SequenceClippedLoss(StrictModel):
    """RLOO as published (Ahmadian et al. 2024): the completion is one action, its ratio the product over tokens."""

    name: Literal["sequence_clipped"] = "sequence_clipped"
    clip_eps_low: float = Field(0.2, gt=0, le=1, description="A response's ratio is clipped at 1 less this.")
    clip_eps_high: float = Field(0.2, gt=0, description="A response's ratio is clipped at 1 plus this.")


class GSPOLoss(StrictModel):
    """Zheng et al. 2025: the ratio of a sequence, normalised by its length, is clipped for all of its tokens."""

    name: Literal["gspo"] = "gspo"
    clip_eps_low: float = Field(3e-4, gt=0, le=1, description="A response's ratio is clipped at 1 less this.")
    clip_eps_high: float = Field(4e-4, gt=0, description="A response's ratio is clipped at 1 plus this.")


class CISPOLoss(StrictModel):
    """MiniMax 2025: the ratio is a clipped, constant weight of the log-probability, so no token loses its gradient."""

    name: Literal["cispo"] = "cispo"
    clip_eps_low: float | None = Field(
        None, gt=0, le=1, description="A token's weight is clipped at 1 less this; no lower bound when left out."
    )
    clip_eps_high: float = Field(0.28, gt=0, description="A token's weight is clipped at 1 plus this.")


class SAPOLoss(StrictModel):
    """Soft adaptive policy optimisation (arXiv 2511.20347): a smooth gate of the ratio in the place of the clip."""

    name: Literal["sapo"] = "sapo"
    tau_pos: float = Field(1.0, gt=0, description="Steepness of the gate where the advantage is above 0.")
    tau_neg: float = Field(1.05, gt=0, description="Steepness elsewhere: larger lets go of such tokens sooner.")


class GMPOLoss(StrictModel):
    """Geometric-mean policy optimisation (arXiv 2507.20673): log-ratios are clipped by token, then averaged."""

    name: Literal["gmpo"] = "gmpo"
    clip_eps_low: float = Field(0.4, gt=0, description="A token's log-ratio is held at minus this.")
    clip_eps_high: float = Field(0.4, gt=0, description="A token's log-ratio is held at this.")


class ClipCovLoss(StrictModel):
    """Cui et al. 2025: the clipped loss, without some of the tokens whose covariance would narrow the policy most."""

    name: Literal["clip_cov"] = "clip_cov"
    clip_eps_low: float = Field(0.2, gt=0, le=1, description="A token's ratio is clipped at 1 less this.")
    clip_eps_high: float = Field(0.2, gt=0, description="A token's ratio is clipped at 1 plus this.")
    clip_cov_ratio: float = Field(2e-4, gt=0, lt=1, description="Share of the step's tokens that learn nothing.")
    clip_cov_lb: float = Field(1.0, description="They are drawn from those with a covariance above this.")
    clip_cov_ub: float = Field(5.0, description="They are drawn from those with a covariance below this.")

    def _misfits(self) -> Iterator[str]:
        if self.clip_cov_lb >= self.clip_cov_ub:
            yield f"clip_cov_lb ({self.clip_cov_lb:g}) must be less than clip_cov_ub ({self.clip_cov_ub:g})"


class KLCovLoss(StrictModel):
    """Cui et al. 2025: no clip; the tokens of highest covariance are held by a penalty for leaving the old policy."""

    name: Literal["kl_cov"] = "kl_cov"
    kl_cov_ratio: float = Field(2e-4, gt=0, lt=1, description="Share of the step's tokens that are held.")
    ppo_kl_coef: float = Field(1.0, ge=0, description="Weight of the absolute log-ratio that holds them.")


class ReinforceLoss(StrictModel):
    """Williams 1992: advantage times log-probability, no ratio."""

    name: Literal["reinforce"] = "reinforce"


PolicyLossConfig = Annotated[
    ClippedLoss
    | SequenceClippedLoss
    | GSPOLoss
    | CISPOLoss
    | SAPOLoss
    | GMPOLoss
    | ClipCovLoss
    | KLCovLoss
    | ReinforceLoss,
    Field(discriminator="name"),
]
SEQUENCE_LOSSES = (SequenceClippedLoss, GSPOLoss, GMPOLoss)
"""Losses with a ratio of the sequence: they take importance weights of the sequence only."""
COVARIANCE_LOSSES = (ClipCovLoss, KLCovLoss)
"""Losses that treat tokens of high covariance otherwise: of log-probability and advantage, over the step's tokens."""
UNCLIPPED_LOSSES = (SAPOLoss, KLCovLoss, ReinforceLoss)
"""Losses in which no ratio is clipped."""


Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
]


# Parts ---------------------------------------------------------------------------------------------------


class KLConfig(StrictModel):
    """Penalty for leaving the reference policy; coefficient 0 loads no reference model."""

    coef: float = Field(0.05, ge=0, description="Weight of the KL; 0 loads no reference model.")
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k1", description="KL of a token from r = log(policy / reference): r, r² / 2, or exp(-r) - 1 + r."
    )
    place: Literal["reward", "loss"] = Field(
        "reward", description="Subtracted from the tokens' rewards, or added to the loss."
    )
    target: Nats | None = Field(None, gt=0, description="Adaptive coefficient: KL per response to steer to.")
    horizon: Responses = Field(10_000, ge=1, description="Responses over which the adaptive coefficient moves.")


class RejectionConfig(StrictModel):
    """Responses whose ratio ``old / rollout`` is too far from 1 are not learned from."""

    statistic: Literal["geometric", "sequence"] = Field(
        "geometric", description="Geometric mean of the tokens' ratios, or their product."
    )
    upper: float = Field(gt=1, description="Responses above this are left out.")
    lower: float | None = Field(
        None, gt=0, lt=1, description="Responses below this are left out; 1 / upper when left out."
    )


class OffPolicyConfig(StrictModel):
    """Importance weights ``old / rollout``: of the trainer's policy over the engine's that sampled."""

    level: Literal["token", "sequence"] = Field("token", description="One weight per token, or one per response.")
    mode: Literal["truncate", "mask"] = Field("truncate", description="Weights above cap become cap, or 0.")
    cap: float = Field(2.0, gt=1, description="Largest weight.")
    floor: float | None = Field(
        None, gt=0, lt=1, description="Smallest weight: those below become floor, or 0 by mode mask; no limit: null."
    )
    batch_normalize: bool = Field(False, description="Divide the weights of a mini-batch by their mean.")
    rejection: RejectionConfig | None = Field(
        None, description="Leave out responses that sampler and trainer disagree about; none when left out."
    )


class DynamicSamplingConfig(StrictModel):
    """Groups whose members all have the same score are dropped and new prompts sampled until the step is full."""

    max_prompts_factor: float = Field(
        4.0, ge=1, description="Most prompts sampled for one step, over prompts_per_step; then the run stops."
    )


class OverlongConfig(StrictModel):
    """Yu et al. 2025 (DAPO): the last ``buffer`` tokens before the limit cost up to ``penalty``, linearly."""

    buffer: Tokens = Field(ge=1, description="Tokens that cost something; less than rollout.sampling.max_new_tokens.")
    penalty: float = Field(1.0, gt=0, description="What a response at the limit loses of its score.")


# Methods -------------------------------------------------------------------------------------------------


class PolicyGradient(StrictModel):
    """What every method with a policy loss has."""

    policy_loss: PolicyLossConfig = Field(ClippedLoss(), description="How ratio and advantage make a token's loss.")
    aggregation: Aggregation = Field("token_mean", description="How tokens' losses make one: docs/algorithms.md.")
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the policy's entropy, which the loss then raises.")
    off_policy: OffPolicyConfig | None = Field(
        None, description="Correct for the difference between sampler and trainer; no correction when left out."
    )
    top_entropy_quantile: float = Field(
        1.0, gt=0, le=1, description="Share of the step's tokens, those of highest entropy, that the policy loss has."
    )


class ScoredAlgorithm(StrictModel):
    """Methods that learn from scores."""

    default_responses: ClassVar[int] = 1
    """``responses_per_prompt`` where the recipe leaves it out."""

    missing_eos_penalty: float = Field(0.0, ge=0, description="What a response loses that was cut off at its limit.")
    overlong: OverlongConfig | None = Field(None, description="Soft penalty of long responses; none when left out.")
    reward_clip_range: tuple[float, float] | None = Field(
        None, description="Scores are held between these two before penalties; no limits when left out."
    )

    def _misfits(self) -> Iterator[str]:
        found = self.reward_clip_range
        if found is not None and not found[0] < found[1]:
            yield f"reward_clip_range needs a lower limit and a higher one; found {list(found)}"


class RewardedAlgorithm(PolicyGradient, ScoredAlgorithm):
    """Methods that turn scores, less a KL penalty, into advantages."""

    kl: KLConfig = KLConfig()
    whiten_advantages: bool | Literal["mean"] = Field(
        False, description="Advantages of a step to mean 0 and deviation 1; mean: to mean 0 alone."
    )


class PPO(RewardedAlgorithm):
    """Schulman et al. 2017 with a critic and generalised advantages."""

    name: Literal["ppo"] = "ppo"
    gamma: float = Field(1.0, gt=0, le=1, description="Discount per token.")
    gae_lambda: float = Field(
        0.95, ge=0, le=1, description="Generalised advantages: 0 is one step and the critic, 1 the whole return."
    )
    value_clip: float | None = Field(
        0.2, gt=0, description="Most that a value may move from the one before the update; null: no limit."
    )
    whiten_advantages: bool | Literal["mean"] = True
    bootstrap_truncated: bool = Field(
        False, description="Bootstrap truncated responses: add the value of the state after the last token."
    )


class GroupAlgorithm(RewardedAlgorithm):
    """Advantages that compare the responses of a group, one per response."""

    default_responses: ClassVar[int] = 8

    dynamic_sampling: DynamicSamplingConfig | None = Field(
        None, description="Sample again for groups of equal scores; they are kept when left out."
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        "sum_then_normalize",
        description="Rewards of several sources are added up, or first each normalised within its group.",
    )


class GroupRelativeAlgorithm(GroupAlgorithm):
    """The score less the group's mean, over its standard deviation if asked for."""

    kl: KLConfig = KLConfig(coef=0.0, estimator="k3", place="loss")
    normalise_std: bool | Literal["batch"] = Field(
        True, description="Divide by the standard deviation of the group; batch: by that of all responses of the step."
    )


class GRPO(GroupRelativeAlgorithm):
    """Shao et al. 2024: advantages relative to the group; every response weighs the same, however long."""

    name: Literal["grpo"] = "grpo"
    aggregation: Aggregation = "sequence_mean_token_mean"


class DrGRPO(GroupRelativeAlgorithm):
    """Liu et al. 2025: GRPO without its two biases, the division by the deviation and that by the length."""

    name: Literal["dr_grpo"] = "dr_grpo"
    normalise_std: bool | Literal["batch"] = False
    aggregation: Aggregation = "sequence_mean_token_sum_norm"


class DAPO(GroupRelativeAlgorithm):
    """Yu et al. 2025: clip-higher, dynamic sampling, token mean; ``overlong`` adds the soft length penalty."""

    name: Literal["dapo"] = "dapo"
    policy_loss: PolicyLossConfig = ClippedLoss(clip_eps_high=0.28)
    dynamic_sampling: DynamicSamplingConfig | None = DynamicSamplingConfig()


class GSPO(GroupRelativeAlgorithm):
    """Zheng et al. 2025: GRPO's advantages under the length-normalised ratio of the sequence."""

    name: Literal["gspo"] = "gspo"
    policy_loss: PolicyLossConfig = GSPOLoss()
    aggregation: Aggregation = "sequence_mean_token_mean"


class CISPO(GroupRelativeAlgorithm):
    """MiniMax 2025: GRPO's advantages under clipped importance weights."""

    name: Literal["cispo"] = "cispo"
    policy_loss: PolicyLossConfig = CISPOLoss()


class GPG(GroupRelativeAlgorithm):
    """Chu et al. 2025: group policy gradient, GRPO's centred rewards under the plain policy gradient."""

    name: Literal["gpg"] = "gpg"
    policy_loss: PolicyLossConfig = ReinforceLoss()
    normalise_std: bool | Literal["batch"] = False
    rescale: bool = Field(
        True, description="Advantages grow by the step's responses over those in groups with variance (their alpha)."
    )


class SAPO(GroupRelativeAlgorithm):
    """Soft adaptive policy optimisation (arXiv 2511.20347): GRPO's advantages under a smooth gate of the ratio."""

    name: Literal["sapo"] = "sapo"
    policy_loss: PolicyLossConfig = SAPOLoss()
    aggregation: Aggregation = "sequence_mean_token_mean"


class GMPO(GroupRelativeAlgorithm):
    """Geometric-mean policy optimisation (arXiv 2507.20673): GRPO's advantages under a mean of clipped log-ratios."""

    name: Literal["gmpo"] = "gmpo"
    policy_loss: PolicyLossConfig = GMPOLoss()
    aggregation: Aggregation = "sequence_mean_token_mean"


class GDPO(GroupRelativeAlgorithm):
    """Liu et al. 2026: each reward normalised within its group, then added up, then whitened over the step."""

    name: Literal["gdpo"] = "gdpo"
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "normalize_then_sum"
    normalise_std: bool | Literal["batch"] = False
    whiten_advantages: bool | Literal["mean"] = True


class PassAtK(GroupRelativeAlgorithm):
    """Chen et al. 2025: what is rewarded is the best of ``k`` responses, over all ways to choose them from a group."""

    name: Literal["pass_at_k"] = "pass_at_k"
    k: Responses = Field(2, ge=1, description="Responses of which the best one counts; fewer than a group has.")
    normalise_std: bool = Field(
        True, description="Divide by the standard deviation of the best of k over all ways to choose them."
    )


class OptimalTokenBaseline(GroupAlgorithm):
    """Per position of the group's responses the baseline of least variance (arXiv 2602.07078; verl's estimator)."""

    name: Literal["optimal_token_baseline"] = "optimal_token_baseline"
    kl: KLConfig = KLConfig(coef=0.0)


class RLOO(GroupAlgorithm):
    """Ahmadian et al. 2024: leave-one-out baseline, the completion as one action.

    ``policy_loss: {name: clipped}`` is the variant on tokens.
    """

    default_responses: ClassVar[int] = 4
    name: Literal["rloo"] = "rloo"
    policy_loss: PolicyLossConfig = SequenceClippedLoss()


class OPO(GroupAlgorithm):
    """Hao et al. 2025: the baseline weighs rewards by length, which minimises the variance of the gradient."""

    name: Literal["opo"] = "opo"
    kl: KLConfig = KLConfig(coef=0.0)


class ReinforcePlusPlus(RewardedAlgorithm):
    """Hu et al. 2025: discounted returns of token rewards, normalised over the whole rollout batch; no critic."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    kl: KLConfig = KLConfig(coef=0.01)
    whiten_advantages: bool | Literal["mean"] = True
    gamma: float = Field(1.0, gt=0, le=1, description="Discount per token.")


class ReinforcePlusPlusBaseline(GroupAlgorithm):
    """Hu et al. 2025: rewards less the mean of their group, then normalised over the whole rollout batch."""

    default_responses: ClassVar[int] = 4
    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    kl: KLConfig = KLConfig(coef=0.01, estimator="k2", place="loss")
    whiten_advantages: bool | Literal["mean"] = True


class ReMax(RewardedAlgorithm):
    """Li et al. 2024: the reward of the greedy response is the baseline; it is generated too, and not trained on."""

    name: Literal["remax"] = "remax"
    policy_loss: PolicyLossConfig = ReinforceLoss()
    gamma: float = Field(1.0, gt=0, le=1, description="Discount per token.")


class SelectionAlgorithm(ScoredAlgorithm):
    """Methods that learn from the best responses of a group (and the worst). Groups of equal scores teach nothing."""


class BestOfN(SelectionAlgorithm):
    """Rejection-sampling fine-tuning: the best ``keep`` responses of each group become demonstrations."""

    default_responses: ClassVar[int] = 8
    name: Literal["best_of_n"] = "best_of_n"
    keep: Responses = Field(1, ge=1, description="Best responses of each group to learn from.")
    min_score: float | None = Field(None, description="Responses that score less are never learned from.")
    aggregation: Aggregation = Field("token_mean", description="How tokens' losses make one: docs/algorithms.md.")


class OnlineDPO(SelectionAlgorithm):
    """Guo et al. 2024: the best and the worst response of each group are a preference pair.

    The pair's ``margin`` is the difference of their scores.
    """

    default_responses: ClassVar[int] = 4
    name: Literal["online_dpo"] = "online_dpo"
    loss: Annotated[PairLossConfig, Field(discriminator="name")] = Field(
        DPOLoss(), description="Loss of a pair, as in the job preference."
    )
    refresh_steps: int | None = Field(
        None, ge=1, description="Iterative DPO: every so many steps the reference becomes the actor as it is."
    )


class Distillation(PolicyGradient):
    """On-policy distillation (Agarwal et al. 2024): ``reference`` is the teacher; each token's advantage is how much
    likelier the teacher finds it than the actor did. Rewards, where there are any, are only logged."""

    name: Literal["distillation"] = "distillation"
    policy_loss: PolicyLossConfig = ReinforceLoss()


PolicyGradientConfig = (
    PPO
    | GRPO
    | DrGRPO
    | DAPO
    | GSPO
    | CISPO
    | GPG
    | SAPO
    | GMPO
    | GDPO
    | PassAtK
    | OptimalTokenBaseline
    | RLOO
    | OPO
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | ReMax
    | Distillation
)
"""Methods with a policy loss."""
SelectionConfig = BestOfN | OnlineDPO
AlgorithmConfig = Annotated[PolicyGradientConfig | SelectionConfig, Field(discriminator="name")]
_NO_KL = KLConfig(coef=0.0)


def kl_term(algorithm: StrictModel) -> KLConfig:
    """Returns the KL term of a method; coefficient 0 where it has none."""
    return algorithm.kl if isinstance(algorithm, RewardedAlgorithm) else _NO_KL


def keeps_trajectories_whole(algorithm: StrictModel) -> bool:
    """Tells whether the loss has a ratio or a weight of the trajectory, which needs all of its sequences at once."""
    if not isinstance(algorithm, PolicyGradient):
        return False
    correction = algorithm.off_policy
    is_weighted = correction is not None and correction.level == "sequence"
    return is_weighted or isinstance(algorithm.policy_loss, SEQUENCE_LOSSES)


def reads_old_logprobs(algorithm: StrictModel) -> bool:
    """Tells whether ``old_logprobs`` are needed beside the ratio: for what depends on all tokens of a step or a
    mini-batch (which are left out or held, a mean of weights, a baseline), and so must be known before the first
    update.
    """
    if not isinstance(algorithm, PolicyGradient):
        return False
    correction = algorithm.off_policy
    is_corrected = correction is not None and (correction.batch_normalize or correction.rejection is not None)
    is_chosen = algorithm.top_entropy_quantile < 1 or isinstance(algorithm.policy_loss, COVARIANCE_LOSSES)
    return is_corrected or is_chosen or isinstance(algorithm, OptimalTokenBaseline)


def reads_reference(algorithm: StrictModel) -> bool:
    """Tells whether ``ref_logprobs`` are needed: by a KL term, by a loss on pairs, or as those of the teacher."""
    if isinstance(algorithm, OnlineDPO):
        return not isinstance(algorithm.loss, REFERENCE_FREE)
    return kl_term(algorithm).coef > 0 or isinstance(algorithm, Distillation)
