"""Which tokens of a step learn, and how, by what the trainer's policy says of all of them before the first update.

On scalar columns of the whole step, where advantages are computed: no mini-batch, micro-batch or rank changes a choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quartet.algorithms.off_policy import SampledTokens, is_accepted
from quartet.algorithms.segments import covariance, drawn_between, gather_owner, masked_owner, top_share
from quartet.batch.ragged import RaggedBatch
from quartet.config.algorithms import (
    ClipCovLoss,
    KLCovLoss,
    PolicyGradient,
    RejectionConfig,
)
from quartet.config.common import Strict
from quartet.train.objectives import HIGH_COVARIANCE, HIGH_ENTROPY, trajectory_index

ENTROPIES = "old_entropies"
"""Token column that ``top_entropy_quantile`` needs: entropies under the trainer's policy when the step began."""


def with_selected_tokens(
    config: Strict, batch: RaggedBatch, num_trajectories: int, draw: int
) -> tuple[RaggedBatch, dict[str, float]]:
    """The batch with ``loss_mask`` less the responses that were rejected, and the columns by which the loss tells
    tokens apart; and the step's figures about them.

    Args:
        batch: with ``old_logprobs`` where the recipe asks for a choice, ``advantages`` and the field ``trajectory``.
        draw: seed of what is drawn.
    """
    metrics: dict[str, float] = {}
    if not isinstance(config, PolicyGradient):
        return batch, metrics
    token, correction = batch.token, config.off_policy
    if correction is not None and correction.rejection is not None:
        owner_T = masked_owner(trajectory_index(batch), token["loss_mask"])
        kept_N = _kept(correction.rejection, batch, owner_T, num_trajectories)
        learned = torch.unique(owner_T[owner_T >= 0])
        metrics["correction/rejected_frac"] = float((~kept_N[learned]).float().mean()) if len(learned) else 0.0
        batch = batch.with_token(loss_mask=(owner_T >= 0) & gather_owner(kept_N, owner_T))
    mask_T, loss = batch.token["loss_mask"], config.policy_loss
    num_tokens = max(1, int(mask_T.sum()))
    if config.top_entropy_quantile < 1:
        chosen_T = top_share(token[ENTROPIES], mask_T, config.top_entropy_quantile)
        batch = batch.with_token(**{HIGH_ENTROPY: chosen_T})
        metrics["policy/high_entropy_frac"] = float(chosen_T.sum()) / num_tokens
    if isinstance(loss, ClipCovLoss | KLCovLoss):
        products_T = covariance(token["old_logprobs"], token["advantages"], mask_T)
        if isinstance(loss, KLCovLoss):
            chosen_T = top_share(products_T, mask_T, loss.kl_cov_ratio)
        else:
            keys_T = torch.rand(len(mask_T), generator=torch.Generator().manual_seed(draw), dtype=torch.float64)
            limits = (loss.clip_cov_lb, loss.clip_cov_ub)
            chosen_T = drawn_between(products_T, mask_T, *limits, loss.clip_cov_ratio, keys_T)
        batch = batch.with_token(**{HIGH_COVARIANCE: chosen_T})
        metrics["policy/high_covariance_frac"] = float(chosen_T.sum()) / num_tokens
    return batch, metrics


def _kept(config: RejectionConfig, batch: RaggedBatch, owner_T: Tensor, num_trajectories: int) -> Tensor:
    """``[N]`` bool."""
    logprobs = batch.token["old_logprobs"], batch.token["rollout_logprobs"]
    sampled = SampledTokens(*logprobs, owner_T >= 0, owner_T, num_trajectories)
    lower = config.lower if config.lower is not None else 1 / config.upper
    return is_accepted(sampled, statistic=config.statistic, lower=lower, upper=config.upper)
