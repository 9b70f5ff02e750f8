"""Advantage estimators. Their results are constants: no gradient flows through them.

Shape suffixes: T stored tokens, A action tokens, N trajectories.

Per token: ``gae`` (PPO), ``discounted_returns`` (REINFORCE++ after whitening), ``less_baseline`` (ReMax),
``teacher_advantages`` (distillation). Per trajectory, then spread by ``broadcast_to_tokens``: ``group_relative``
(GRPO and its variants), ``leave_one_out`` (RLOO), ``length_weighted`` (OPO), and on top ``rescaled_by_variance`` (GPG)
or ``whitened_unless_equal`` (REINFORCE++-baseline).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quartet.algorithms.scan import reverse_linear_scan
from quartet.algorithms.segments import (
    STD_EPSILON,
    gather_owner,
    keep,
    masked_owner,
    masked_whiten,
    reduction_dtype,
    segment_count,
    segment_is_constant,
    segment_mean,
    segment_std,
    segment_sum,
    time_order,
    wide,
)


@torch.no_grad()
def gae(
    token_rewards_T: Tensor,
    values_T: Tensor,
    action_mask_T: Tensor,
    trajectory_T: Tensor,
    gamma: float,
    gae_lambda: float,
    *,
    bootstrap_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., 2016, eq. 16) over action tokens only.

    The action tokens of a trajectory follow one another whatever stands between them, also across its
    sequences: ``delta = reward + gamma * value of the next action token - value``, and
    ``advantage = delta + gamma * gae_lambda * advantage of the next``. After a trajectory's last action token
    the advantage is 0, and so is the value unless ``bootstrap_N`` says otherwise.

    Args:
        token_rewards_T: ``[T]``; ignored where no action.
        values_T: ``[T]`` ``V(state before token t)``; ignored where no action.
        action_mask_T: ``[T]`` bool, tokens the policy emitted.
        trajectory_T: ``[T]`` int64 owner index; tokens in time order.
        gamma: discount per action token, in [0, 1].
        gae_lambda: in [0, 1].
        bootstrap_N: ``[N]`` value of the state behind each trajectory's last action token, 0 where the trajectory
            ended there. Default: 0 for all, also where the episode was truncated.

    Returns:
        Advantages and returns (``advantages + values``), each ``[T]`` fp32 (fp64 if either input is), 0
        elsewhere.
    """
    dtype = torch.promote_types(reduction_dtype(token_rewards_T), reduction_dtype(values_T))
    order_A, continues_A = _action_order(trajectory_T, action_mask_T, dtype)
    rewards_A, values_A = token_rewards_T[order_A].to(dtype), values_T[order_A].to(dtype)
    next_values_A = torch.zeros_like(values_A)
    next_values_A[:-1] = values_A[1:]
    next_values_A = continues_A * next_values_A
    if bootstrap_N is not None:
        next_values_A += (1 - continues_A) * bootstrap_N.to(dtype)[trajectory_T[order_A]]
    deltas_A = rewards_A + gamma * next_values_A - values_A
    advantages_A = reverse_linear_scan(deltas_A, gamma * gae_lambda * continues_A)
    num_tokens = trajectory_T.shape[0]
    return _scattered(advantages_A, order_A, num_tokens), _scattered(advantages_A + values_A, order_A, num_tokens)


@torch.no_grad()
def discounted_returns(token_rewards_T: Tensor, action_mask_T: Tensor, trajectory_T: Tensor, gamma: float) -> Tensor:
    """``[T]`` discounted sum of the rewards from each action token on: ``return = reward + gamma * next return``.

    Over action tokens only, joined across the trajectory's sequences, as in ``gae``; 0 elsewhere. REINFORCE++ (Hu et
    al., 2025) whitens them over the whole rollout batch (``segments.masked_whiten``).

    Args:
        token_rewards_T: ``[T]``; ignored where no action.
        action_mask_T: ``[T]`` bool, tokens the policy emitted.
        trajectory_T: ``[T]`` int64 owner index; tokens in time order.
        gamma: discount per action token, in [0, 1].
    """
    dtype = reduction_dtype(token_rewards_T)
    order_A, continues_A = _action_order(trajectory_T, action_mask_T, dtype)
    returns_A = reverse_linear_scan(token_rewards_T[order_A].to(dtype), gamma * continues_A)
    return _scattered(returns_A, order_A, trajectory_T.shape[0])


@torch.no_grad()
def less_baseline(returns_T: Tensor, baseline_N: Tensor, action_mask_T: Tensor, trajectory_T: Tensor) -> Tensor:
    """``[T]`` returns less one baseline per trajectory; 0 where no action.

    ReMax (Li et al., 2024), where the baseline is the score of the greedy response to the same prompt.
    """
    owner_T = masked_owner(trajectory_T, action_mask_T)
    acts_T = owner_T >= 0
    return torch.where(acts_T, keep(returns_T, acts_T) - gather_owner(baseline_N, owner_T), 0)


@torch.no_grad()
def teacher_advantages(teacher_logprobs_T: Tensor, policy_logprobs_T: Tensor, action_mask_T: Tensor) -> Tensor:
    """``[T]`` how much likelier a teacher finds each action token, ``teacher - policy`` in nats; 0 where no action.

    On-policy distillation with the reverse KL (Agarwal et al., 2024): under the plain policy gradient its expectation
    is the gradient of -KL(policy ‖ teacher) at each token.
    """
    return keep(teacher_logprobs_T, action_mask_T) - keep(policy_logprobs_T, action_mask_T)


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
        ValueError: a group has one member only, so there is nothing to be relative to.
    """
    relative_N, member_N, num_groups = _centred(scores_N, group_N)
    if normalise_std:
        std_N = gather_owner(segment_std(wide(scores_N), member_N, num_groups), member_N)
        relative_N = relative_N / (std_N + STD_EPSILON)
    return _zero_equal_groups(relative_N, scores_N if raw_scores_N is None else raw_scores_N, member_N, num_groups)


@torch.no_grad()
def rescaled_by_variance(advantages_N: Tensor, group_N: Tensor, scores_N: Tensor) -> Tensor:
    """``[N]`` advantages times ``N / trajectories in groups whose scores differ`` (GPG's alpha; Chu et al., 2025).

    Groups of equal scores have no gradient, yet they count in the denominator of a mean: this takes them out of it.
    Where all groups are such, the advantages stay as they are.

    Args:
        scores_N: ``[N]`` the scores that decide which groups are equal.
    """
    member_N, num_groups = _group_index(group_N)
    varies_N = ~segment_is_constant(scores_N, member_N, num_groups)[member_N]
    num_varying = varies_N.sum()
    rescaled_N = advantages_N * len(advantages_N) / num_varying.clamp(min=1)
    return torch.where(num_varying > 0, rescaled_N, advantages_N)


@torch.no_grad()
def leave_one_out(scores_N: Tensor, group_N: Tensor, *, raw_scores_N: Tensor | None = None) -> Tensor:
    """``[N]`` score less the mean of the *other* members' scores (RLOO; Kool et al., 2019; Ahmadian et al.,
    2024).

    Arguments and errors as for ``group_relative``; a group of equal scores gives exactly 0.
    """
    centred_N, member_N, num_groups = _centred(scores_N, group_N)
    size_N = segment_count(member_N, num_groups)[member_N].to(centred_N.dtype)
    # Equal to score - (sum - score) / (size - 1), without the cancellation in sum - score.
    relative_N = centred_N * size_N / (size_N - 1)
    return _zero_equal_groups(relative_N, scores_N if raw_scores_N is None else raw_scores_N, member_N, num_groups)


@torch.no_grad()
def length_weighted(
    scores_N: Tensor, lengths_N: Tensor, group_N: Tensor, *, raw_scores_N: Tensor | None = None
) -> Tensor:
    """``[N]`` score less the group's mean weighted by length, ``sum(length * score) / sum(length)`` (OPO; Hao et al.,
    2025).

    Args:
        lengths_N: ``[N]`` action tokens of each trajectory, at least 1.

    Other arguments and errors as for ``group_relative``; a group of equal scores gives exactly 0.
    """
    # Around the plain mean, so that scores of any size keep their digits.
    centred_N, member_N, num_groups = _centred(scores_N, group_N)
    length_N = lengths_N.to(centred_N.dtype)
    baseline_G = segment_sum(length_N * centred_N, member_N, num_groups) / segment_sum(length_N, member_N, num_groups)
    relative_N = centred_N - gather_owner(baseline_G, member_N)
    return _zero_equal_groups(relative_N, scores_N if raw_scores_N is None else raw_scores_N, member_N, num_groups)


@torch.no_grad()
def whitened_unless_equal(
    advantages_N: Tensor, is_equal_N: Tensor, action_mask_T: Tensor, trajectory_T: Tensor
) -> Tensor:
    """``[T]`` advantages on their action tokens, whitened over all of them (REINFORCE++-baseline; Hu et al., 2025).

    Whitening moves every value by the batch's mean, also those of groups with equal scores, which have nothing to say:
    these count in mean and deviation, and are exactly 0 afterwards.

    Args:
        advantages_N: ``[N]`` scores less the mean of their group.
        is_equal_N: ``[N]`` bool, True for members of a group of equal scores.
    """
    whitened_T = masked_whiten(broadcast_to_tokens(advantages_N, trajectory_T, action_mask_T), action_mask_T)
    return torch.where(gather_owner(is_equal_N, masked_owner(trajectory_T, action_mask_T)), 0, whitened_T)


def broadcast_to_tokens(advantages_N: Tensor, trajectory_T: Tensor, action_mask_T: Tensor) -> Tensor:
    """``[T]`` each trajectory's advantage on all its action tokens, 0 elsewhere."""
    return gather_owner(advantages_N, masked_owner(trajectory_T, action_mask_T))


def _action_order(trajectory_T: Tensor, action_mask_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``[A]`` positions of the action tokens, trajectory after trajectory in time order, and ``[A]`` 1 where the next
    of them belongs to the same trajectory, 0 where it does not.
    """
    owner_T = masked_owner(trajectory_T, action_mask_T)
    order_A = time_order(owner_T)
    owner_A = owner_T[order_A]
    continues_A = torch.zeros(owner_A.shape[0], dtype=dtype, device=owner_A.device)
    continues_A[:-1] = (owner_A[1:] == owner_A[:-1]).to(dtype)
    return order_A, continues_A


def _scattered(values_A: Tensor, order_A: Tensor, num_tokens: int) -> Tensor:
    values_T = torch.zeros(num_tokens, dtype=values_A.dtype, device=values_A.device)
    values_T[order_A] = values_A
    return values_T


def _group_index(group_N: Tensor) -> tuple[Tensor, int]:
    labels, member_N, sizes = torch.unique(group_N, return_inverse=True, return_counts=True)
    alone = labels[sizes < 2]
    if alone.numel():
        raise ValueError(
            f"group-relative advantages need at least two responses per group; groups of one: {alone[:8].tolist()}"
        )
    return member_N, int(labels.shape[0])


def _centred(scores_N: Tensor, group_N: Tensor) -> tuple[Tensor, Tensor, int]:
    """``[N]`` score less the mean of its group, the group's index ``[N]``, and the number of groups."""
    member_N, num_groups = _group_index(group_N)
    scores = wide(scores_N)
    return scores - gather_owner(segment_mean(scores, member_N, num_groups), member_N), member_N, num_groups


def _zero_equal_groups(relative_N: Tensor, raw_scores_N: Tensor, member_N: Tensor, num_groups: int) -> Tensor:
    # The mean of equal floats need not be that float; over a tiny std the rounding would look like a signal.
    is_equal_N = segment_is_constant(raw_scores_N, member_N, num_groups)[member_N]
    return torch.where(is_equal_N, 0, relative_N)
