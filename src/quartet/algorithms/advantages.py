"""Advantage estimators. Their results are constants: no gradient flows through them.

Shape suffixes: T stored tokens, A action tokens, N trajectories.

Per token: ``gae``. Per trajectory, then spread by ``broadcast_to_tokens``: ``group_relative`` (GRPO, Dr.
GRPO) and ``leave_one_out`` (RLOO).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quartet.algorithms.scan import reverse_linear_scan
from quartet.algorithms.segments import (
    STD_EPSILON,
    gather_owner,
    masked_owner,
    reduction_dtype,
    segment_count,
    segment_is_constant,
    segment_mean,
    segment_std,
    time_order,
)


@torch.no_grad()
def gae(
    token_rewards_T: Tensor,
    values_T: Tensor,
    action_mask_T: Tensor,
    trajectory_T: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., 2016, eq. 16) over action tokens only.

    The action tokens of a trajectory follow one another whatever stands between them, also across its
    sequences: ``delta = reward + gamma * value of the next action token - value``, and
    ``advantage = delta + gamma * gae_lambda * advantage of the next``. After a trajectory's last action token
    both are 0, also where the episode was truncated.

    Args:
        token_rewards_T: ``[T]``; ignored where no action.
        values_T: ``[T]`` ``V(state before token t)``; ignored where no action.
        action_mask_T: ``[T]`` bool, tokens the policy emitted.
        trajectory_T: ``[T]`` int64 owner index; tokens in time order.
        gamma: discount per action token, in [0, 1].
        gae_lambda: in [0, 1].

    Returns:
        Advantages and returns (``advantages + values``), each ``[T]`` fp32 (fp64 if either input is), 0
        elsewhere.
    """
    for name, factor in (("gamma", gamma), ("gae_lambda", gae_lambda)):
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"{name} must lie in [0, 1], found {factor}")
    dtype = torch.promote_types(reduction_dtype(token_rewards_T), reduction_dtype(values_T))
    owner_T = masked_owner(trajectory_T, action_mask_T)
    order_A = time_order(owner_T)
    owner_A = owner_T[order_A]
    rewards_A, values_A = token_rewards_T[order_A].to(dtype), values_T[order_A].to(dtype)

    continues_A = torch.zeros_like(values_A)
    continues_A[:-1] = (owner_A[1:] == owner_A[:-1]).to(dtype)
    next_values_A = torch.zeros_like(values_A)
    next_values_A[:-1] = values_A[1:]
    deltas_A = rewards_A + gamma * continues_A * next_values_A - values_A
    advantages_A = reverse_linear_scan(deltas_A, gamma * gae_lambda * continues_A)

    advantages_T = torch.zeros(owner_T.shape[0], dtype=dtype, device=owner_T.device)
    returns_T = torch.zeros_like(advantages_T)
    advantages_T[order_A] = advantages_A
    returns_T[order_A] = advantages_A + values_A
    return advantages_T, returns_T


@torch.no_grad()
def group_relative(
    scores_N: Tensor, group_N: Tensor, normalise_std: bool, *, raw_scores_N: Tensor | None = None
) -> Tensor:
    """``[N]`` score less the group's mean, over the group's standard deviation if asked for.

    With ``normalise_std`` GRPO (Shao et al., 2024, section 4.1.2), without Dr. GRPO (Liu et al., 2025). The
    standard deviation is unbiased, plus 1e-6. A group of equal scores gives exactly 0.

    Args:
        scores_N: ``[N]`` one score per trajectory.
        group_N: ``[N]`` int64, any label per group.
        normalise_std: divide by the standard deviation.
        raw_scores_N: ``[N]`` the scores before KL entered them; decides which groups are equal. Default: the
            scores.

    Raises:
        ValueError: a group has one member only, so it has no one to be relative to.
    """
    member_N, num_groups = _group_index(group_N)
    scores = scores_N.to(reduction_dtype(scores_N))
    relative_N = scores - gather_owner(segment_mean(scores, member_N, num_groups), member_N)
    if normalise_std:
        std_N = gather_owner(segment_std(scores, member_N, num_groups), member_N)
        relative_N = relative_N / (std_N + STD_EPSILON)
    return _zero_equal_groups(relative_N, scores_N if raw_scores_N is None else raw_scores_N, member_N, num_groups)


@torch.no_grad()
def leave_one_out(scores_N: Tensor, group_N: Tensor, *, raw_scores_N: Tensor | None = None) -> Tensor:
    """``[N]`` score less the mean of the *other* members' scores (RLOO; Kool et al., 2019; Ahmadian et al.,
    2024).

    Arguments and errors as for ``group_relative``; a group of equal scores gives exactly 0.
    """
    member_N, num_groups = _group_index(group_N)
    scores = scores_N.to(reduction_dtype(scores_N))
    size_N = segment_count(member_N, num_groups)[member_N].to(scores.dtype)
    mean_N = gather_owner(segment_mean(scores, member_N, num_groups), member_N)
    # Equal to score - (sum - score) / (size - 1), without the cancellation in sum - score.
    relative_N = (scores - mean_N) * size_N / (size_N - 1)
    return _zero_equal_groups(relative_N, scores_N if raw_scores_N is None else raw_scores_N, member_N, num_groups)


def broadcast_to_tokens(advantages_N: Tensor, trajectory_T: Tensor, action_mask_T: Tensor) -> Tensor:
    """``[T]`` each trajectory's advantage on all its action tokens, 0 elsewhere."""
    return gather_owner(advantages_N, masked_owner(trajectory_T, action_mask_T))


def _group_index(group_N: Tensor) -> tuple[Tensor, int]:
    labels, member_N, sizes = torch.unique(group_N, return_inverse=True, return_counts=True)
    alone = labels[sizes < 2]
    if alone.numel():
        raise ValueError(
            f"group-relative advantages need at least two responses per group; groups of one: {alone[:8].tolist()}"
        )
    return member_N, int(labels.shape[0])


def _zero_equal_groups(relative_N: Tensor, raw_scores_N: Tensor, member_N: Tensor, num_groups: int) -> Tensor:
    # The mean of equal floats need not be that float; over a tiny std the rounding would look like a signal.
    is_equal_N = segment_is_constant(raw_scores_N, member_N, num_groups)[member_N]
    return torch.where(is_equal_N, 0, relative_N)
