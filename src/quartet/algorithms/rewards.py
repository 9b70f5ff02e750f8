"""From a score per trajectory to rewards of tokens and completions.

Shape suffixes: T stored tokens, N trajectories.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quartet.algorithms.segments import keep, last_token, reduction_dtype, segment_sum, wide


def penalise_missing_eos(scores_N: Tensor, ended_N: Tensor, penalty: float) -> Tensor:
    """``[N]`` scores less ``penalty`` where the trajectory did not end by itself.

    Args:
        scores_N: ``[N]``.
        ended_N: ``[N]`` bool, True where the policy emitted its end of text.
        penalty: how much a missing end costs, at least 0.
    """
    return wide(scores_N) - penalty * (~ended_N).to(reduction_dtype(scores_N))


def overlong_penalty(lengths_N: Tensor, limit: int, buffer: int, penalty: float) -> Tensor:
    """``[N]`` fp32: what a response costs that comes close to the longest allowed, to be subtracted from its score
    (DAPO's soft overlong punishment; Yu et al., 2025, eq. 13).

    Nothing up to ``limit - buffer`` tokens, then linearly more, ``penalty`` at ``limit`` and beyond.

    Args:
        lengths_N: ``[N]`` action tokens of each trajectory.
        limit: the longest response allowed, in tokens.
        buffer: tokens before the limit in which it costs something, in [1, limit].
        penalty: what a response of the longest length costs, at least 0.
    """
    return penalty * ((lengths_N.to(torch.float32) - (limit - buffer)) / buffer).clamp(0.0, 1.0)


def token_rewards(scores_N: Tensor, kl_T: Tensor | None, kl_coef: float, owner_T: Tensor) -> Tensor:
    """``[T]`` rewards: the score on the trajectory's last action token, less ``kl_coef * kl`` on each of
    them.

    Args:
        scores_N: ``[N]`` one score per trajectory. That of a trajectory without action tokens lands nowhere.
        kl_T: ``[T]`` KL estimate per token, or None for none.
        kl_coef: its coefficient.
        owner_T: ``[T]`` int64 trajectory of each action token, -1 for others; tokens in time order.

    Returns:
        ``[T]`` in the reduction's dtype of the scores, 0 where no action.
    """
    position_N = last_token(owner_T, scores_N.shape[0])
    scores = wide(scores_N)
    rewards_T = torch.zeros(owner_T.shape[0], dtype=scores.dtype, device=scores.device)
    if kl_T is not None:
        rewards_T = -kl_coef * keep(kl_T, owner_T >= 0).to(scores.dtype)
    has_action_N = position_N >= 0
    return rewards_T.index_add(0, position_N[has_action_N], scores[has_action_N])


def completion_rewards(scores_N: Tensor, kl_T: Tensor, kl_coef: float, owner_T: Tensor) -> Tensor:
    """``[N]`` scores less ``kl_coef`` times the KL summed over the trajectory's action tokens.

    The reward of RLOO as published (Ahmadian et al., 2024), where a whole completion is one action. Arguments
    as for ``token_rewards``; a trajectory without action tokens keeps its score.
    """
    kl_N = segment_sum(keep(kl_T, owner_T >= 0), owner_T, scores_N.shape[0])
    return wide(scores_N) - kl_coef * kl_N
