"""Advantage estimators. Their results are constants: no gradient flows through them.

Shape suffixes: T stored tokens, A action tokens, N trajectories. ``owner_T`` is ``[T]`` int64: the trajectory of each
action token (one the policy emitted), -1 for other tokens (``segments.masked_owner``). Tokens stand in time order.

Per token: ``gae`` (PPO), ``discounted_returns`` (REINFORCE++ after whitening), ``subtract_baseline`` (ReMax),
``teacher_advantages`` (distillation). Per trajectory, then spread by ``segments.gather_owner``:
``group_relative_advantages`` (GRPO and its variants), ``pass_at_k_advantages`` (pass@k), ``leave_one_out_advantages``
(RLOO), ``length_weighted_advantages`` (OPO), and on top ``rescale_by_informative_groups`` (GPG) or
``whiten_unless_equal`` (REINFORCE++-baseline). Per token, with a baseline per position in the group:
``optimal_token_baseline``. Per source, before rewards are added up: ``normalise_in_groups`` (GDPO).

From a score per trajectory to rewards of tokens and completions.

Shape suffixes: T stored tokens, N trajectories.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from quartet.algorithms.segments import (
    STD_EPSILON,
    gather_owner,
    last_token_positions,
    masked_whiten,
    owned_positions,
    reduction_dtype,
    segment_count,
    segment_is_constant,
    segment_mean,
    segment_std,
    segment_sum,
    to_reduction_dtype,
    zero_unmasked,
)


@torch.no_grad()
def gae(
    token_rewards_T: Tensor,
    values_T: Tensor,
    owner_T: Tensor,
    gamma: float,
    gae_lambda: float,
    *,
    bootstrap_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes generalised advantage estimation (Schulman et al., 2016, eq. 16) over action tokens only.

    The action tokens of a trajectory follow one another whatever stands between them, also across its
    sequences: ``delta = reward + gamma * value of the next action token - value``, and
    ``advantage = delta + gamma * gae_lambda * advantage of the next``. After a trajectory's last action token
    the advantage is 0, and so is the value unless ``bootstrap_N`` says otherwise.

    Args:
        token_rewards_T: ``[T]``; ignored where no action.
        values_T: ``[T]`` ``V(state before token t)``; ignored where no action.
        owner_T: ``[T]`` trajectory of each action token, -1 for others.
        gamma: discount per action token, in [0, 1].
        gae_lambda: in [0, 1].
        bootstrap_N: ``[N]`` value of the state behind each trajectory's last action token, 0 where the trajectory
            ended there. Default: 0 for all, also where the episode was truncated.

    Returns:
        Advantages and returns (``advantages + values``), each ``[T]`` fp32 (fp64 if either input is), 0
        elsewhere.
    """
    dtype = torch.promote_types(reduction_dtype(token_rewards_T), reduction_dtype(values_T))
    order_A, continues_A = _action_order(owner_T, dtype)
    rewards_A, values_A = token_rewards_T[order_A].to(dtype), values_T[order_A].to(dtype)
    next_values_A = torch.zeros_like(values_A)
    next_values_A[:-1] = values_A[1:]
    next_values_A = continues_A * next_values_A
    if bootstrap_N is not None:
        next_values_A += (1 - continues_A) * bootstrap_N.to(dtype)[owner_T[order_A]]
    deltas_A = rewards_A + gamma * next_values_A - values_A
    advantages_A = reverse_linear_scan(deltas_A, gamma * gae_lambda * continues_A)
    num_tokens = owner_T.shape[0]
    return _scattered(advantages_A, order_A, num_tokens), _scattered(advantages_A + values_A, order_A, num_tokens)


@torch.no_grad()
def discounted_returns(token_rewards_T: Tensor, owner_T: Tensor, gamma: float) -> Tensor:
    """Returns ``[T]`` discounted sum of the rewards from each action token on:
    ``return = reward + gamma * next return``.

    Over action tokens only, joined across the trajectory's sequences, as in ``gae``; 0 elsewhere. REINFORCE++ (Hu et
    al., 2025) whitens them over the whole rollout batch (``segments.masked_whiten``).

    Args:
        token_rewards_T: ``[T]``; ignored where no action.
        owner_T: ``[T]`` trajectory of each action token, -1 for others.
        gamma: discount per action token, in [0, 1].
    """
    dtype = reduction_dtype(token_rewards_T)
    order_A, continues_A = _action_order(owner_T, dtype)
    returns_A = reverse_linear_scan(token_rewards_T[order_A].to(dtype), gamma * continues_A)
    return _scattered(returns_A, order_A, owner_T.shape[0])


@torch.no_grad()
def subtract_baseline(returns_T: Tensor, baseline_N: Tensor, owner_T: Tensor) -> Tensor:
    """Returns ``[T]`` returns less one baseline per trajectory; 0 where no action.

    ReMax (Li et al., 2024), where the baseline is the score of the greedy response to the same prompt.
    """
    acts_T = owner_T >= 0
    return torch.where(acts_T, zero_unmasked(returns_T, acts_T) - gather_owner(baseline_N, owner_T), 0)


@torch.no_grad()
def teacher_advantages(teacher_logprobs_T: Tensor, policy_logprobs_T: Tensor, action_mask_T: Tensor) -> Tensor:
    """Returns ``[T]`` how much likelier a teacher finds each action token, ``teacher - policy`` in nats; 0 where no
    action.

    On-policy distillation with the reverse KL (Agarwal et al., 2024): under the plain policy gradient its expectation
    is the gradient of -KL(policy ‖ teacher) at each token.
    """
    return zero_unmasked(teacher_logprobs_T, action_mask_T) - zero_unmasked(policy_logprobs_T, action_mask_T)


@torch.no_grad()
def group_relative_advantages(
    scores_N: Tensor, group_N: Tensor, normalise_std: bool | Literal["batch"], *, raw_scores_N: Tensor | None = None
) -> Tensor:
    """Returns ``[N]`` score less the group's mean, over the group's standard deviation if asked for.

    With ``normalise_std`` GRPO (Shao et al., 2024, section 4.1.2), without Dr. GRPO (Liu et al., 2025); with "batch"
    over the standard deviation of all scores (Liu et al., 2025, arXiv 2508.08221, section 4.1; TRL's ``scale_rewards:
    batch``). The standard deviation is unbiased, plus 1e-6. A group of equal scores gives exactly 0.

    Args:
        scores_N: ``[N]`` one score per trajectory.
        group_N: ``[N]`` int64, any label per group.
        normalise_std: divide by the standard deviation of the group, or of the batch.
        raw_scores_N: ``[N]`` the scores before KL entered them; decides which groups are equal. Default: the
            scores.

    Raises:
        ValueError: a group has one member only, so there is nothing to be relative to.
    """
    relative_N, member_N, num_groups = _centred(scores_N, group_N)
    if normalise_std:
        label_N, num_labels = (member_N, num_groups) if normalise_std is True else (torch.zeros_like(member_N), 1)
        std_N = gather_owner(segment_std(to_reduction_dtype(scores_N), label_N, num_labels), label_N)
        relative_N = relative_N / (std_N + STD_EPSILON)
    return _zero_equal_groups(relative_N, scores_N if raw_scores_N is None else raw_scores_N, member_N, num_groups)


@torch.no_grad()
def normalise_in_groups(scores_N: Tensor, group_N: Tensor) -> Tensor:
    """Returns ``[N]`` one source's scores less their mean in the group, over their standard deviation (unbiased, plus
    1e-6).

    GDPO (Liu et al., 2026, arXiv 2601.05242, eq. 4) adds them up over the sources afterwards. NaN, where the source
    does not apply, stays and takes no part; scores that are equal or alone in their group give exactly 0.
    """
    labels_N = torch.unique(group_N, return_inverse=True)[1]
    member_N, num_groups = torch.where(scores_N.isnan(), -1, labels_N), int(labels_N.max()) + 1
    kept_N = zero_unmasked(scores_N, member_N >= 0)
    relative_N = kept_N - gather_owner(segment_mean(kept_N, member_N, num_groups), member_N)
    relative_N = relative_N / (gather_owner(segment_std(kept_N, member_N, num_groups), member_N) + STD_EPSILON)
    is_equal_N = gather_owner(segment_is_constant(kept_N, member_N, num_groups), member_N)
    return torch.where(member_N < 0, torch.nan, torch.where(is_equal_N, 0, relative_N))


@torch.no_grad()
def pass_at_k_advantages(
    scores_N: Tensor, group_N: Tensor, k: int, normalise_std: bool, *, raw_scores_N: Tensor | None = None
) -> Tensor:
    """Returns ``[N]`` pass@k advantages (Chen et al., 2025, arXiv 2508.10751, eq. 14 and 15): how much better than the
    average is the best of ``k`` responses if this one is among them.

    Over all ways to choose k responses of the group: the mean of the best score of those that have this response, less
    the mean of all, over the standard deviation of all (plus 1e-6) if asked for. Scores of 0 and 1 give the paper's
    formula; other scores enter by their best, as in Walder and Karkhanis (2025, arXiv 2505.15201).

    Args:
        k: at least 1; in a group of k or fewer one less than its responses.

    Other arguments and errors as for ``group_relative_advantages``; a group of equal scores gives exactly 0.
    """
    centred_N, member_N, num_groups = _centred(scores_N, group_N)
    size_G = segment_count(member_N, num_groups)
    order_N = centred_N.argsort(stable=True)
    order_N = order_N[member_N[order_N].argsort(stable=True)]
    member, score = member_N[order_N], centred_N[order_N].double()
    size = size_G[member]
    worse = torch.arange(len(order_N), device=order_N.device) - (size_G.cumsum(0) - size_G)[member]
    choose = (size - 1).clamp(max=k)
    # Of all choices the share whose best one is this; its own mean when it is chosen, from itself and the better ones.
    is_best = _ratio_of_choices(worse, choose - 1, size, choose)
    mean_G = segment_sum(is_best * score, member, num_groups)
    gap = score - mean_G[member]
    continues = torch.ones_like(score)
    continues[:-1] = (member[1:] == member[:-1]).double()
    continues[-1] = 0
    above = reverse_linear_scan(_ratio_of_choices(worse - 1, choose - 2, size - 1, choose - 1) * gap, continues)
    own = _ratio_of_choices(worse, choose - 1, size - 1, choose - 1) * gap
    relative = own.clone()
    relative[:-1] += continues[:-1] * above[1:]
    if normalise_std:
        relative = relative / (segment_sum(is_best * gap.square(), member, num_groups).sqrt()[member] + STD_EPSILON)
    relative_N = torch.empty_like(centred_N)
    relative_N[order_N] = relative.to(centred_N.dtype)
    return _zero_equal_groups(relative_N, scores_N if raw_scores_N is None else raw_scores_N, member_N, num_groups)


def _ratio_of_choices(n: Tensor, k: Tensor, of_n: Tensor, of_k: Tensor) -> Tensor:
    """Returns ``C(n, k) / C(of_n, of_k)`` fp64, 0 where k is not in [0, n]."""
    log = _log_factorial(n) - _log_factorial(k) - _log_factorial(n - k)
    log = log - (_log_factorial(of_n) - _log_factorial(of_k) - _log_factorial(of_n - of_k))
    return torch.where((k >= 0) & (k <= n), log.exp(), 0.0)


def _log_factorial(n: Tensor) -> Tensor:
    return torch.lgamma(n.clamp(min=0).double() + 1)


@torch.no_grad()
def rescale_by_informative_groups(advantages_N: Tensor, group_N: Tensor, scores_N: Tensor) -> Tensor:
    """Returns ``[N]`` advantages times ``N / trajectories in groups whose scores differ`` (GPG's alpha; Chu et al.,
    2025).

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
def leave_one_out_advantages(scores_N: Tensor, group_N: Tensor, *, raw_scores_N: Tensor | None = None) -> Tensor:
    """Returns ``[N]`` score less the mean of the *other* members' scores (RLOO; Kool et al., 2019; Ahmadian et al.,
    2024).

    Arguments and errors as for ``group_relative_advantages``; a group of equal scores gives exactly 0.
    """
    centred_N, member_N, num_groups = _centred(scores_N, group_N)
    size_N = segment_count(member_N, num_groups)[member_N].to(centred_N.dtype)
    # Equal to score - (sum - score) / (size - 1), without the cancellation in sum - score.
    relative_N = centred_N * size_N / (size_N - 1)
    return _zero_equal_groups(relative_N, scores_N if raw_scores_N is None else raw_scores_N, member_N, num_groups)


@torch.no_grad()
def length_weighted_advantages(
    scores_N: Tensor, lengths_N: Tensor, group_N: Tensor, *, raw_scores_N: Tensor | None = None
) -> Tensor:
    """Returns ``[N]`` score less the group's mean weighted by length, ``sum(length * score) / sum(length)`` (OPO; Hao
    et al., 2025).

    Args:
        lengths_N: ``[N]`` action tokens of each trajectory, at least 1.

    Other arguments and errors as for ``group_relative_advantages``; a group of equal scores gives exactly 0.
    """
    # Around the plain mean, so that scores of any size keep their digits.
    centred_N, member_N, num_groups = _centred(scores_N, group_N)
    length_N = lengths_N.to(centred_N.dtype)
    baseline_G = segment_sum(length_N * centred_N, member_N, num_groups) / segment_sum(length_N, member_N, num_groups)
    relative_N = centred_N - gather_owner(baseline_G, member_N)
    return _zero_equal_groups(relative_N, scores_N if raw_scores_N is None else raw_scores_N, member_N, num_groups)


@torch.no_grad()
def whiten_unless_equal(advantages_N: Tensor, is_equal_N: Tensor, owner_T: Tensor, *, scale: bool = True) -> Tensor:
    """Returns ``[T]`` advantages on their action tokens, whitened over all of them (REINFORCE++-baseline; Hu et al.,
    2025).

    Whitening moves every value by the batch's mean, also those of groups with equal scores, which have nothing to say:
    these count in mean and deviation, and are exactly 0 afterwards.

    Args:
        advantages_N: ``[N]`` scores less the mean of their group.
        is_equal_N: ``[N]`` bool, True for members of a group of equal scores.
        scale: divide by the standard deviation.
    """
    whitened_T = masked_whiten(gather_owner(advantages_N, owner_T), owner_T >= 0, scale=scale)
    return torch.where(gather_owner(is_equal_N, owner_T), 0, whitened_T)


@torch.no_grad()
def optimal_token_baseline(returns_T: Tensor, energy_T: Tensor, group_N: Tensor, owner_T: Tensor) -> Tensor:
    """Returns ``[T]`` returns less the baseline of least variance for their position in the group (arXiv 2602.07078;
    verl's ``optimal_token_baseline``); 0 where no action.

    At the t-th action token the baseline is ``Σ G_t W_t / Σ W_t`` over the group's trajectories that are as long, with
    ``W_t`` the sum of ``energy`` over a trajectory's first t action tokens. Where one is longer than all others of its
    group the baseline is its own return, and the advantage 0 (verl without ``handle_zero_tail``).

    Args:
        returns_T: ``[T]`` sum of the rewards from each action token on.
        energy_T: ``[T]`` squared norm of the logits' gradient, ``score_energy``.
        group_N: ``[N]`` int64, any label per group.
    """
    returns_T, energy_T = zero_unmasked(returns_T, owner_T >= 0), zero_unmasked(energy_T, owner_T >= 0)
    order_A = owned_positions(owner_T)
    owner_A = owner_T[order_A]
    count_N = segment_count(owner_T, len(group_N))
    place_A = torch.arange(len(order_A), device=order_A.device) - (count_N.cumsum(0) - count_N)[owner_A]
    # A scan from the end over reversed tokens is one from the beginning.
    continues_A = (place_A > 0).to(energy_T.dtype)
    path_A = reverse_linear_scan(energy_T[order_A].flip(0), continues_A.flip(0)).flip(0)
    labels_N, longest = torch.unique(group_N, return_inverse=True)[1], int(count_N.max())
    cell_A, num_cells = labels_N[owner_A] * longest + place_A, (int(labels_N.max()) + 1) * longest
    returns_A = returns_T[order_A]
    total_C = segment_sum(path_A, cell_A, num_cells).clamp(min=1e-8)
    baseline_A = (segment_sum(path_A * returns_A, cell_A, num_cells) / total_C)[cell_A]
    return _scattered(returns_A - baseline_A, order_A, len(owner_T))


@torch.no_grad()
def score_energy(logprobs_T: Tensor, sharp_logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    """Returns ``[T]`` squared norm of a log-probability's gradient in the logits, ``1 - 2 p + Σ p²`` over the
    vocabulary.

    The sum is read from the log-probability of the same token at half the temperature: with ``z`` the logits over the
    temperature, ``2 log p - log p_sharp = lse(2 z) - 2 lse(z) = log Σ p²``.

    Args:
        logprobs_T, sharp_logprobs_T: ``[T]`` of the tokens, at the temperature of sampling and at half of it.
    """
    logprobs_T, sharp_T = zero_unmasked(logprobs_T, mask_T), zero_unmasked(sharp_logprobs_T, mask_T)
    energy_T = 1 - 2 * logprobs_T.exp() + (2 * logprobs_T - sharp_T).clamp(max=0).exp()
    return torch.where(mask_T, energy_T.clamp(min=0), 0)


def _action_order(owner_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns ``[A]`` positions of the action tokens, trajectory after trajectory in time order, and ``[A]`` 1 where
    the next of them belongs to the same trajectory, 0 where it does not.
    """
    order_A = owned_positions(owner_T)
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
    """Returns ``[N]`` score less the mean of its group, the group's index ``[N]``, and the number of groups."""
    member_N, num_groups = _group_index(group_N)
    scores = to_reduction_dtype(scores_N)
    return scores - gather_owner(segment_mean(scores, member_N, num_groups), member_N), member_N, num_groups


def _zero_equal_groups(relative_N: Tensor, raw_scores_N: Tensor, member_N: Tensor, num_groups: int) -> Tensor:
    # The mean of equal floats need not be that float; over a tiny std the rounding would look like a signal.
    is_equal_N = segment_is_constant(raw_scores_N, member_N, num_groups)[member_N]
    return torch.where(is_equal_N, 0, relative_N)


BLOCK = 128
"""Elements of a block: a scan takes ``BLOCK`` vectorised steps on each of ``log(A) / log(BLOCK)`` levels."""


# A linear recurrence without a loop over tokens (A elements, W of a block, B blocks) ---------------------


def reverse_linear_scan(inputs_A: Tensor, coefficients_A: Tensor) -> Tensor:
    """Solves ``out[i] = inputs[i] + coefficients[i] * out[i + 1]``, with 0 after the last element.

    A coefficient of 0 ends a segment: nothing passes from the element behind it. The elements are cut into
        blocks;
    all blocks are scanned side by side, their first elements form a recurrence 128 times shorter, and its
    solution is carried back into the blocks. Work and memory are linear in A. Coefficients are multiplied,
    never divided, so any value in [0, 1] is safe.

    Args:
        inputs_A: ``[A]`` floating point.
        coefficients_A: ``[A]`` of the same dtype.

    Returns:
        ``[A]`` of the same dtype.
    """
    size = inputs_A.shape[0]
    if size == 0:
        return inputs_A.clone()
    num_blocks = -(-size // BLOCK)
    # Contiguous copies, so the steps below run over adjacent memory and leave the arguments alone.
    out_WB = _blocks(inputs_A, num_blocks)
    product_WB = _blocks(coefficients_A, num_blocks)
    for w in range(BLOCK - 2, -1, -1):
        out_WB[w].addcmul_(product_WB[w], out_WB[w + 1])
        product_WB[w].mul_(product_WB[w + 1])
    if num_blocks > 1:
        first_B = reverse_linear_scan(out_WB[0], product_WB[0])
        carried_B = torch.cat([first_B[1:], first_B.new_zeros(1)])
        out_WB.addcmul_(product_WB, carried_B)
    return out_WB.t().reshape(-1)[:size]


def _blocks(values_A: Tensor, num_blocks: int) -> Tensor:
    padded = values_A.new_zeros(num_blocks * BLOCK)
    padded[: values_A.shape[0]] = values_A
    return padded.view(num_blocks, BLOCK).t().contiguous()


def penalise_missing_eos(scores_N: Tensor, ended_N: Tensor, penalty: float) -> Tensor:
    """Returns ``[N]`` scores less ``penalty`` where the trajectory did not end by itself.

    Args:
        scores_N: ``[N]``.
        ended_N: ``[N]`` bool, True where the policy emitted its end of text.
        penalty: how much a missing end costs, at least 0.
    """
    return to_reduction_dtype(scores_N) - penalty * (~ended_N).to(reduction_dtype(scores_N))


def overlong_penalty(lengths_N: Tensor, limit: int, buffer: int, penalty: float) -> Tensor:
    """Returns ``[N]`` fp32: what a response costs that comes close to the longest allowed, to be subtracted from its
    score (DAPO's soft overlong punishment; Yu et al., 2025, eq. 13).

    Nothing up to ``limit - buffer`` tokens, then linearly more, ``penalty`` at ``limit`` and beyond.

    Args:
        lengths_N: ``[N]`` action tokens of each trajectory.
        limit: the longest response allowed, in tokens.
        buffer: tokens before the limit in which it costs something, in [1, limit].
        penalty: what a response of the longest length costs, at least 0.
    """
    return penalty * ((lengths_N.to(torch.float32) - (limit - buffer)) / buffer).clamp(0.0, 1.0)


def token_rewards(scores_N: Tensor, kl_T: Tensor | None, kl_coef: float, owner_T: Tensor) -> Tensor:
    """Returns ``[T]`` rewards: the score on the trajectory's last action token, less ``kl_coef * kl`` on each of them.

    Args:
        scores_N: ``[N]`` one score per trajectory. That of a trajectory without action tokens lands nowhere.
        kl_T: ``[T]`` KL estimate per token, or None for none.
        kl_coef: its coefficient.
        owner_T: ``[T]`` int64 trajectory of each action token, -1 for others; tokens in time order.

    Returns:
        ``[T]`` in the reduction's dtype of the scores, 0 where no action.
    """
    position_N = last_token_positions(owner_T, scores_N.shape[0])
    scores = to_reduction_dtype(scores_N)
    rewards_T = torch.zeros(owner_T.shape[0], dtype=scores.dtype, device=scores.device)
    if kl_T is not None:
        rewards_T = -kl_coef * zero_unmasked(kl_T, owner_T >= 0).to(scores.dtype)
    has_action_N = position_N >= 0
    return rewards_T.index_add(0, position_N[has_action_N], scores[has_action_N])


def completion_rewards(scores_N: Tensor, kl_T: Tensor, kl_coef: float, owner_T: Tensor) -> Tensor:
    """Returns ``[N]`` scores less ``kl_coef`` times the KL summed over the trajectory's action tokens.

    The reward of RLOO as published (Ahmadian et al., 2024), where a whole completion is one action. Arguments
    as for ``token_rewards``; a trajectory without action tokens keeps its score.
    """
    kl_N = segment_sum(zero_unmasked(kl_T, owner_T >= 0), owner_T, scores_N.shape[0])
    return to_reduction_dtype(scores_N) - kl_coef * kl_N
