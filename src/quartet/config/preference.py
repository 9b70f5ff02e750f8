"""Preference training: its recipe, and one class per loss, each with only its own fields.

================ ==================================================== =============================================
needs            names                                                rows
================ ==================================================== =============================================
a reference      ``dpo``, ``robust_dpo``, ``ipo``, ``hinge``,         ``prompt``, ``chosen``, ``rejected``
                 ``exo_pair``, ``nca_pair``, ``sppo_hard``,
                 ``apo_zero``, ``apo_down``, ``discopop``
a reference, and ``bco_pair``, ``aot``, ``aot_unpaired``              the same
the whole step
a reference      ``kto``                                              the same, or ``prompt``, ``completion``, ``label``
the model alone  ``simpo``, ``orpo``                                  ``prompt``, ``chosen``, ``rejected``
================ ==================================================== =============================================
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from quartet.config.common import HubConfig, StrictModel
from quartet.config.run import SupervisedRecipe
from quartet.config.strict import Pairs

"""What happens to pairs with an empty answer, or whose chosen answer is the beginning of the rejected one. Pairs of two
equal answers teach nothing: they are left out, or with "error" stop the run."""


# Losses --------------------------------------------------------------------------------------------------


class _PairLoss(StrictModel):
    sft_coef: float = Field(
        0.0, ge=0, description="Weight of the chosen answers' negative log-likelihood per token, added to the loss."
    )


class DPOLoss(_PairLoss):
    """Rafailov et al. 2023."""

    name: Literal["dpo"] = "dpo"
    beta: float = Field(0.1, gt=0, description="Scale of the log-ratios; more holds closer to the reference.")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Share of labels thought to be wrong (conservative DPO)."
    )
    margin_coef: float = Field(
        0.0, ge=0, description="Weight of the data's column `margin`: how far apart the implicit rewards should be."
    )


class RobustDPOLoss(_PairLoss):
    """Chowdhury et al. 2024: unbiased where a share of the labels is flipped."""

    name: Literal["robust_dpo"] = "robust_dpo"
    beta: float = Field(0.1, gt=0, description="Scale of the log-ratios; more holds closer to the reference.")
    label_smoothing: float = Field(0.1, ge=0, lt=0.5, description="Share of labels that are flipped.")


class IPOLoss(_PairLoss):
    """Azar et al. 2023: a squared distance to a gap of 1 / (2 beta) (the paper's tau)."""

    name: Literal["ipo"] = "ipo"
    beta: float = Field(0.1, gt=0, description="The gap of log-ratios to reach is 1 / (2 beta).")
    per_token: bool = Field(True, description="Log-ratios are divided by the answers' lengths.")


class HingeLoss(_PairLoss):
    """SLiC's rank loss on log-ratios: pairs further apart than 1 / beta are left alone."""

    name: Literal["hinge"] = "hinge"
    beta: float = Field(0.1, gt=0, description="Scale of the log-ratios; more holds closer to the reference.")


class _ReferenceLoss(_PairLoss):
    beta: float = Field(0.1, gt=0, description="Scale of the log-ratios; more holds closer to the reference.")


class EXOPairLoss(_ReferenceLoss):
    """Ji et al. 2024: the reverse KL between the policy's preference and the labels'."""

    name: Literal["exo_pair"] = "exo_pair"
    label_smoothing: float = Field(
        1e-3, gt=0, lt=0.5, description="Share of labels thought to be wrong; without it the loss has no limit."
    )


class PointwisePairLoss(_ReferenceLoss):
    """Losses of pairs that also say where each answer should be by itself.

    ``nca_pair`` noise contrastive alignment (Chen et al. 2024); ``sppo_hard`` self-play preference optimisation with
    labels of 0 and 1 (Wu et al. 2024); ``apo_zero`` and ``apo_down`` anchored preference optimisation (D'Oosterlinck et
    al. 2024) for a model that is worse, or better, than the chosen answers.
    """

    name: Literal["nca_pair", "sppo_hard", "apo_zero", "apo_down"] = Field("nca_pair", description="Which of them.")


class DiscoPOPLoss(_ReferenceLoss):
    """Lu et al. 2024: a logistic and an exponential loss, blended by the log-ratio itself."""

    name: Literal["discopop"] = "discopop"
    discopop_tau: float = Field(0.05, gt=0, description="How gradually one loss passes into the other.")


class BCOPairLoss(_ReferenceLoss):
    """Jung et al. 2024: answers told apart by a classifier whose threshold is the step's mean implicit reward."""

    name: Literal["bco_pair"] = "bco_pair"


class AOTLoss(_ReferenceLoss):
    """Melnyk et al. 2024 (alignment via optimal transport): DPO between the step's sorted values.

    ``aot`` compares the margins of the policy with those of the reference, ``aot_unpaired`` the log-ratios of chosen
    answers with those of rejected ones.
    """

    name: Literal["aot", "aot_unpaired"] = Field("aot", description="With pairs, or without.")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="Share of labels thought to be wrong.")


class SimPOLoss(_PairLoss):
    """Meng et al. 2024: mean log-probabilities, a target margin, no reference."""

    name: Literal["simpo"] = "simpo"
    beta: float = Field(2.0, gt=0, description="Scale of the mean log-probabilities.")
    gamma: float = Field(1.0, ge=0, description="Margin between the implicit rewards.")


class ORPOLoss(StrictModel):
    """Hong et al. 2024: negative log-likelihood of the chosen answer plus a log odds ratio, no reference."""

    name: Literal["orpo"] = "orpo"
    odds_coef: float = Field(0.1, gt=0, description="Weight of the odds ratio (the paper's lambda).")


class KTOLoss(StrictModel):
    """Ethayarajh et al. 2024: answers judged one by one; a pair counts as one good and one bad answer."""

    name: Literal["kto"] = "kto"
    beta: float = Field(0.1, gt=0, description="Scale of the log-ratios; more holds closer to the reference.")
    desirable_weight: float = Field(1.0, ge=0, description="Weight of good answers.")
    undesirable_weight: float = Field(1.0, ge=0, description="Weight of bad answers.")


PairLossConfig = (
    DPOLoss
    | RobustDPOLoss
    | IPOLoss
    | HingeLoss
    | EXOPairLoss
    | PointwisePairLoss
    | DiscoPOPLoss
    | SimPOLoss
    | ORPOLoss
)
"""Losses of single pairs."""
StepLossConfig = BCOPairLoss | AOTLoss
"""Losses of pairs that depend on the policy's view of the whole step, for which a pass goes before each update."""
PreferenceLossConfig = Annotated[PairLossConfig | StepLossConfig | KTOLoss, Field(discriminator="name")]
REFERENCE_FREE = (SimPOLoss, ORPOLoss)
"""Losses that look at the policy alone."""


# The job -------------------------------------------------------------------------------------------------


class CachedReferenceConfig(HubConfig):
    """The policy that log-ratios are taken against. Its log-probabilities are computed once, before training."""

    path: str | None = Field(None, description="Model directory or hub name; the model as it starts when left out.")


class PreferenceRecipe(SupervisedRecipe):
    """Preference training of a causal LM on pairs (or judged answers), without sampling."""

    job: Literal["preference"] = "preference"
    loss: PreferenceLossConfig = Field(DPOLoss(), description="The method, with its own keys.")
    reference: CachedReferenceConfig = CachedReferenceConfig()
    pairs_per_step: Pairs = Field(32, ge=1, description="Pairs, or judged answers, in each update.")

    def _misfits(self) -> Iterator[str]:
        yield from super()._misfits()
        if isinstance(self.loss, REFERENCE_FREE) and self.reference.path is not None:
            yield f"loss {self.loss.name} has no reference: leave out reference.path"
        if isinstance(self.loss, KTOLoss) and self.pairs_per_step < 2:
            yield "loss kto estimates a KL over the step's answers: set pairs_per_step to 2 or more"
        if isinstance(self.loss, StepLossConfig) and self.pairs_per_step < 2:
            yield f"loss {self.loss.name} compares the step's pairs: set pairs_per_step to 2 or more"
