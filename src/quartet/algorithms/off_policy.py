"""Importance weights for tokens that another policy, or another implementation of it, sampled.

Shape suffixes: T stored tokens, N trajectories.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from quartet.algorithms.kl import bounded_exp
from quartet.algorithms.segments import (
    gather_owner,
    keep,
    masked_mean,
    masked_owner,
    segment_count,
    segment_mean,
    segment_sum,
)

Level = Literal["token", "sequence"]


@dataclass(frozen=True)
class SampledTokens:
    """Tokens that were sampled under other log-probabilities than those when the step began.

    Attributes:
        old_logprobs_T: ``[T]`` under the trainer's policy when the step began.
        rollout_logprobs_T: ``[T]`` under the engine that sampled.
        mask_T: ``[T]`` bool, tokens that count.
        trajectory_T: ``[T]`` int64 owner index.
        num_trajectories: N.
    """

    old_logprobs_T: Tensor
    rollout_logprobs_T: Tensor
    mask_T: Tensor
    trajectory_T: Tensor
    num_trajectories: int

    @cached_property
    def owner_T(self) -> Tensor:
        """``[T]`` the owner of each token that counts, -1 for others."""
        return masked_owner(self.trajectory_T, self.mask_T)

    @property
    def log_ratio_T(self) -> Tensor:
        """``[T]`` ``old - rollout``, 0 where it does not count."""
        is_owned_T = self.owner_T >= 0
        return keep(self.old_logprobs_T, is_owned_T) - keep(self.rollout_logprobs_T, is_owned_T)


@dataclass(frozen=True)
class ImportanceWeights:
    """``weights`` ``[T]``, 0 on masked tokens, and the number of unmasked tokens above the cap or below the floor."""

    weights: Tensor
    num_capped: Tensor


@torch.no_grad()
def importance_weights(
    given: SampledTokens, *, level: Level, mode: Literal["truncate", "mask"], cap: float, floor: float | None = None
) -> ImportanceWeights:
    """Weights ``old / rollout`` that correct a loss for the policy which really sampled; constants.

    Args:
        level: "token", or "sequence" for the product over the trajectory's masked tokens on each of them.
        mode: weights above ``cap`` become ``cap`` ("truncate") or 0 ("mask").
        cap: above 0.
        floor: weights below it become ``floor`` or 0, as those above the cap; None for no limit.
    """
    owner_T, log_weight_T = given.owner_T, given.log_ratio_T
    if level == "sequence":
        log_weight_T = gather_owner(segment_sum(log_weight_T, owner_T, given.num_trajectories), owner_T)
    weight_T = bounded_exp(log_weight_T)
    is_capped_T = weight_T > cap
    if floor is not None:
        is_capped_T = is_capped_T | (weight_T < floor)
    weight_T = weight_T.clamp(floor, cap) if mode == "truncate" else torch.where(is_capped_T, 0, weight_T)
    return ImportanceWeights(torch.where(owner_T >= 0, weight_T, 0), (is_capped_T & (owner_T >= 0)).sum())


@torch.no_grad()
def mean_weight(weights_T: Tensor, given: SampledTokens, *, level: Level) -> Tensor:
    """Scalar mean of ``importance_weights`` over their tokens, or over the trajectories that have any; 1 without any
    token, or where all weights are 0. Weights divided by it have mean 1: self-normalised importance sampling.

    ``given`` is the whole mini-batch.
    """
    owner_T, num_trajectories = given.owner_T, given.num_trajectories
    if level == "token":
        mean = masked_mean(weights_T, owner_T >= 0)
    else:
        has_any_N = segment_count(owner_T, num_trajectories) > 0
        mean = masked_mean(segment_mean(keep(weights_T, owner_T >= 0), owner_T, num_trajectories), has_any_N)
    return torch.where(mean > 0, mean, 1)


@torch.no_grad()
def is_accepted(
    given: SampledTokens, *, statistic: Literal["geometric", "sequence"], lower: float, upper: float
) -> Tensor:
    """``[N]`` bool: trajectories whose ratio ``old / rollout`` lies within both limits; True for those without tokens.

    The ratio is the product over the trajectory's masked tokens ("sequence"), or their geometric mean, which does not
    grow with the length ("geometric"; verl's rollout correction, "Rejection Sampling").

    Args:
        lower, upper: limits of the ratio, above 0.
    """
    of_trajectory = segment_mean if statistic == "geometric" else segment_sum
    log_ratio_N = of_trajectory(given.log_ratio_T, given.owner_T, given.num_trajectories)
    return (log_ratio_N >= math.log(lower)) & (log_ratio_N <= math.log(upper))
