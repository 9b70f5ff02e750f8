"""Coefficients that follow what was observed: pure functions from the old value to the new."""

from __future__ import annotations

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
    if target <= 0 or horizon <= 0:
        raise ValueError(f"target and horizon must be above 0, found {target} and {horizon}")
    error = min(max(observed / target - 1.0, -MAX_ERROR), MAX_ERROR)
    return coef * (1.0 + error * num_samples / horizon)
