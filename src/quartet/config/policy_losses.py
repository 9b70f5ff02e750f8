"""Policy losses of reinforcement learning: how a token's ratio and advantage make its loss, one class per loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from quartet.config.common import Strict


class ClippedLoss(Strict):
    """Schulman et al. 2017: the ratio of each token is clipped."""

    name: Literal["clipped"] = "clipped"
    clip_eps_low: float = Field(0.2, gt=0, le=1, description="A token's ratio is clipped at 1 less this.")
    clip_eps_high: float = Field(0.2, gt=0, description="A token's ratio is clipped at 1 plus this.")
    dual_clip: float | None = Field(
        None, gt=1, description="Most that a token of negative advantage costs, over that advantage."
    )


class SequenceClippedLoss(Strict):
    """RLOO as published (Ahmadian et al. 2024): the completion is one action, its ratio the product over tokens."""

    name: Literal["sequence_clipped"] = "sequence_clipped"
    clip_eps_low: float = Field(0.2, gt=0, le=1, description="A response's ratio is clipped at 1 less this.")
    clip_eps_high: float = Field(0.2, gt=0, description="A response's ratio is clipped at 1 plus this.")


class GSPOLoss(Strict):
    """Zheng et al. 2025: the ratio of a sequence, normalised by its length, is clipped for all of its tokens."""

    name: Literal["gspo"] = "gspo"
    clip_eps_low: float = Field(3e-4, gt=0, le=1, description="A response's ratio is clipped at 1 less this.")
    clip_eps_high: float = Field(4e-4, gt=0, description="A response's ratio is clipped at 1 plus this.")


class CISPOLoss(Strict):
    """MiniMax 2025: the ratio is a clipped, constant weight of the log-probability, so no token loses its gradient."""

    name: Literal["cispo"] = "cispo"
    clip_eps_low: float | None = Field(
        None, gt=0, le=1, description="A token's weight is clipped at 1 less this; no lower bound when left out."
    )
    clip_eps_high: float = Field(0.28, gt=0, description="A token's weight is clipped at 1 plus this.")


class SAPOLoss(Strict):
    """Soft adaptive policy optimisation (arXiv 2511.20347): a smooth gate of the ratio in the place of the clip."""

    name: Literal["sapo"] = "sapo"
    tau_pos: float = Field(1.0, gt=0, description="Steepness of the gate where the advantage is above 0.")
    tau_neg: float = Field(1.05, gt=0, description="Steepness elsewhere: larger lets go of such tokens sooner.")


class GMPOLoss(Strict):
    """Geometric-mean policy optimisation (arXiv 2507.20673): log-ratios are clipped by token, then averaged."""

    name: Literal["gmpo"] = "gmpo"
    clip_eps_low: float = Field(0.4, gt=0, description="A token's log-ratio is held at minus this.")
    clip_eps_high: float = Field(0.4, gt=0, description="A token's log-ratio is held at this.")


class ClipCovLoss(Strict):
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


class KLCovLoss(Strict):
    """Cui et al. 2025: no clip; the tokens of highest covariance are held by a penalty for leaving the old policy."""

    name: Literal["kl_cov"] = "kl_cov"
    kl_cov_ratio: float = Field(2e-4, gt=0, lt=1, description="Share of the step's tokens that are held.")
    ppo_kl_coef: float = Field(1.0, ge=0, description="Weight of the absolute log-ratio that holds them.")


class ReinforceLoss(Strict):
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
