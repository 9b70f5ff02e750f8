"""Estimators of the Kullback-Leibler divergence from one sample per token, and the coefficient that follows it.

Shape suffixes: T stored tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from quartet.algorithms.segments import reduction_dtype

KLKind = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before ``exp``, so that no ratio overflows."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """``exp`` of a log-ratio clamped to ±20; no gradient beyond."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_estimate(logprobs_T: Tensor, ref_logprobs_T: Tensor, kind: KLKind, *, mask_T: Tensor | None = None) -> Tensor:
    """``[T]`` an estimate of KL(policy ‖ reference) per token, for tokens sampled from the policy.

    With ``d = logprobs - ref_logprobs`` (Schulman, "Approximating KL divergence", 2020):
    k1 ``d`` (unbiased, any sign), k2 ``d² / 2`` (biased, low variance),
    k3 ``exp(-d) - 1 + d`` (unbiased, never negative; only the exponent is clamped to ±20).

    Args:
        logprobs_T: ``[T]`` log-probabilities of the tokens under the policy they were sampled from.
        ref_logprobs_T: ``[T]`` under the reference.
        kind: the estimator.
        mask_T: ``[T]`` bool; elsewhere the result is 0, whatever the inputs hold there. Default: all tokens.

    Returns:
        ``[T]`` fp32 (fp64 for fp64 input), differentiable in both arguments.
    """
    dtype = torch.promote_types(reduction_dtype(logprobs_T), reduction_dtype(ref_logprobs_T))
    policy_T, ref_T = logprobs_T.to(dtype), ref_logprobs_T.to(dtype)
    if mask_T is not None:
        policy_T, ref_T = torch.where(mask_T, policy_T, 0), torch.where(mask_T, ref_T, 0)
    log_ratio_T = policy_T - ref_T
    match kind:
        case "k1":
            return log_ratio_T
        case "k2":
            return 0.5 * log_ratio_T.square()
        case "k3":
            # expm1 keeps the digits that exp(x) - 1 loses where the two policies nearly agree.
            return (-log_ratio_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1() + log_ratio_T


MAX_ERROR = 0.2
"""The relative error of the observed KL counts at most this much per update."""


def adaptive_kl_coef(coef: float, observed: float, target: float, horizon: float, num_samples: int) -> float:
    """The KL coefficient after a step (Ziegler et al., 2019, section 2.2).

    ``coef * (1 + clip(observed / target - 1, ±0.2) * num_samples / horizon)``: proportional control in log
    space.

    Args:
        coef: the coefficient of the step.
        observed: the step's mean KL per trajectory, in nats, in the unit of ``target``.
        target: the KL to hold, above 0.
        horizon: number of samples over which the full error is applied, above 0.
        num_samples: trajectories of the step.
    """
    error = min(max(observed / target - 1.0, -MAX_ERROR), MAX_ERROR)
    return coef * (1.0 + error * num_samples / horizon)
