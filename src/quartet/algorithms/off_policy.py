"""Importance weights for tokens that another policy, or another implementation of it, sampled.

Shape suffixes: T stored tokens, N trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quartet.algorithms.kl import bounded_exp
from quartet.algorithms.segments import gather_owner, keep, masked_owner, segment_sum


@dataclass(frozen=True)
class ImportanceWeights:
    """``weights`` ``[T]``, 0 on masked tokens, and the number of unmasked tokens above the cap."""

    weights: Tensor
    num_capped: Tensor


@torch.no_grad()
def importance_weights(
    old_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    mask_T: Tensor,
    trajectory_T: Tensor,
    num_trajectories: int,
    *,
    level: Literal["token", "sequence"],
    mode: Literal["truncate", "mask"],
    cap: float,
) -> ImportanceWeights:
    """Weights ``old / rollout`` that correct a loss for the policy which really sampled; constants.

    Args:
        old_logprobs_T: ``[T]`` under the trainer's policy when the step began.
        rollout_logprobs_T: ``[T]`` under the engine that sampled.
        mask_T: ``[T]`` bool, tokens that need a weight.
        trajectory_T: ``[T]`` int64 owner index.
        num_trajectories: N.
        level: "token", or "sequence" for the product over the trajectory's masked tokens on each of them.
        mode: weights above ``cap`` become ``cap`` ("truncate") or 0 ("mask").
        cap: above 0.
    """
    owner_T = masked_owner(trajectory_T, mask_T)
    is_owned_T = owner_T >= 0
    log_weight_T = keep(old_logprobs_T, is_owned_T) - keep(rollout_logprobs_T, is_owned_T)
    if level == "sequence":
        log_weight_T = gather_owner(segment_sum(log_weight_T, owner_T, num_trajectories), owner_T)
    weight_T = bounded_exp(log_weight_T)
    is_capped_T = weight_T > cap
    weight_T = weight_T.clamp(max=cap) if mode == "truncate" else torch.where(is_capped_T, 0, weight_T)
    return ImportanceWeights(torch.where(is_owned_T, weight_T, 0), (is_capped_T & is_owned_T).sum())
