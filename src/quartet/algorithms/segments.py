"""Reductions over owners: the arithmetic every estimator and loss is made of.

Shape suffixes: T stored tokens, A owned tokens, N owners (trajectories, sequences or groups).

An *owner index* ``[T]`` int64 names the owner of each token, -1 for tokens owned by none (a shared prompt). A
mask is folded into it (``masked_owner``), so each function below takes one index and never sees masked
values: they may hold anything, also NaN or -inf. Reductions run in fp32, in fp64 for fp64 input.
"""

from __future__ import annotations

import torch
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to every standard deviation before dividing by it."""


def reduction_dtype(values: Tensor) -> torch.dtype:
    """Returns fp64 for fp64 input, else fp32."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def to_reduction_dtype(values: Tensor) -> Tensor:
    """Returns ``values`` in the reduction's dtype."""
    return values.to(reduction_dtype(values))


def zero_unmasked(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Returns ``[T]`` in the reduction's dtype: ``values`` where ``mask``, 0 elsewhere, whatever stood there."""
    return to_reduction_dtype(torch.where(mask_T, values_T, 0))


def masked_owner(owner_T: Tensor, mask_T: Tensor) -> Tensor:
    """Returns ``[T]`` the owner index with -1 where ``mask`` is False."""
    return torch.where(mask_T, owner_T, -1)


def segment_count(owner_T: Tensor, num_owners: int) -> Tensor:
    """Returns ``[N]`` int64 number of tokens of each owner."""
    # Not bincount: it asks a GPU for the largest owner, and so waits.
    slots = torch.zeros(num_owners + 1, dtype=torch.int64, device=owner_T.device)
    return slots.index_add(0, owner_T + 1, torch.ones_like(owner_T))[1:]


def segment_sum(values_T: Tensor, owner_T: Tensor, num_owners: int) -> Tensor:
    """Returns ``[N]`` sum over each owner's tokens, 0 for owners without any; deterministic on the CPU."""
    # Slot 0 swallows the tokens owned by none, so no selection with a data-dependent size is needed.
    slots = torch.zeros(num_owners + 1, dtype=reduction_dtype(values_T), device=values_T.device)
    return slots.index_add(0, owner_T + 1, values_T.to(slots.dtype))[1:]


def segment_mean(values_T: Tensor, owner_T: Tensor, num_owners: int) -> Tensor:
    """Returns ``[N]`` mean over each owner's tokens, 0 for owners without any."""
    return segment_sum(values_T, owner_T, num_owners) / segment_count(owner_T, num_owners).clamp(min=1)


def segment_std(values_T: Tensor, owner_T: Tensor, num_owners: int) -> Tensor:
    """Returns ``[N]`` unbiased standard deviation over each owner's tokens, 0 for owners of fewer than two."""
    mean_N = segment_mean(values_T, owner_T, num_owners)
    deviation_T = values_T.to(mean_N.dtype) - gather_owner(mean_N, owner_T)
    square_N = segment_sum(deviation_T.square(), owner_T, num_owners)
    return (square_N / (segment_count(owner_T, num_owners) - 1).clamp(min=1)).sqrt()


def segment_is_constant(values_T: Tensor, owner_T: Tensor, num_owners: int) -> Tensor:
    """Returns ``[N]`` bool: all of the owner's values are equal (exactly); True for owners of fewer than two."""
    slots = torch.zeros(num_owners + 1, dtype=values_T.dtype, device=values_T.device)
    largest = slots.scatter_reduce(0, owner_T + 1, values_T, "amax", include_self=False)
    smallest = slots.scatter_reduce(0, owner_T + 1, values_T, "amin", include_self=False)
    return (largest == smallest)[1:]


def gather_owner(values_N: Tensor, owner_T: Tensor) -> Tensor:
    """Returns ``[T]`` each token's entry of an owner field, 0 for tokens owned by none."""
    padded = torch.cat([values_N.new_zeros(1), values_N])
    return padded[owner_T + 1]


def last_token_positions(owner_T: Tensor, num_owners: int) -> Tensor:
    """Returns ``[N]`` int64 position of each owner's last token, -1 for owners without any."""
    position_T = torch.arange(owner_T.shape[0], device=owner_T.device)
    slots = torch.full((num_owners + 1,), -1, dtype=torch.int64, device=owner_T.device)
    return slots.scatter_reduce(0, owner_T + 1, position_T, "amax")[1:]


def owned_positions(owner_T: Tensor) -> Tensor:
    """Returns ``[A]`` positions of the owned tokens, owner after owner, each owner's in their order in ``[T]``."""
    position_A = (owner_T >= 0).nonzero().squeeze(1)
    owner_A = owner_T[position_A]
    if bool((owner_A[1:] >= owner_A[:-1]).all()):
        return position_A
    return position_A[owner_A.argsort(stable=True)]


def masked_mean(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Returns the scalar mean over masked tokens, 0 where there are none."""
    return zero_unmasked(values_T, mask_T).sum() / mask_T.sum().clamp(min=1)


def masked_whiten(values_T: Tensor, mask_T: Tensor, *, scale: bool = True) -> Tensor:
    """Returns ``[T]`` ``(values - mean) / (std + 1e-6)`` over all masked tokens, 0 elsewhere; without ``scale`` the
    mean alone is taken off.

    The standard deviation is unbiased. Equal values give exactly 0; fewer than two tokens are left unchanged.
    """
    kept_T = zero_unmasked(values_T, mask_T)
    count = mask_T.sum()
    mean = kept_T.sum() / count.clamp(min=1)
    deviation_T = torch.where(mask_T, kept_T - mean, 0)
    std = (deviation_T.square().sum() / (count - 1).clamp(min=1)).sqrt()
    is_constant = segment_is_constant(kept_T, torch.where(mask_T, 0, -1), 1)
    whitened_T = torch.where(is_constant, 0, deviation_T / (std + STD_EPSILON) if scale else deviation_T)
    return torch.where(count < 2, kept_T, whitened_T)


# Which tokens of a step are treated otherwise: chosen once, over all tokens, before its first update -----


def top_fraction_mask(values_T: Tensor, mask_T: Tensor, share: float) -> Tensor:
    """Returns ``[T]`` bool: the masked tokens with the highest values, ``share`` of them (rounded down, at least one);
    all that equal the last of these, too, so that the order of tokens does not matter.

    Of entropies the tokens at which the policy forks (Wang et al., 2025, arXiv 2506.01939, eq. 5).

    Args:
        values_T: ``[T]``; ignored where masked.
        share: in (0, 1].
    """
    if not bool(mask_T.any()):
        return torch.zeros_like(mask_T)
    kept = values_T[mask_T]
    least = kept.topk(_num(share, len(kept))).values[-1]
    return mask_T & (values_T >= least)


def sample_between_mask(
    values_T: Tensor, mask_T: Tensor, lower: float, upper: float, share: float, keys_T: Tensor
) -> Tensor:
    """Returns ``[T]`` bool: masked tokens with a value between the two limits, those with the smallest keys, ``share``
    of *all* masked tokens (rounded down, at least one) or as many as there are (Clip-Cov; Cui et al., 2025, eq. 11).

    Args:
        keys_T: ``[T]`` random numbers, all different.
    """
    chosen_T = torch.zeros_like(mask_T)
    places = (mask_T & (values_T > lower) & (values_T < upper)).nonzero().squeeze(1)
    first = keys_T[places].argsort()[: _num(share, int(mask_T.sum()))]
    chosen_T[places[first]] = True
    return chosen_T


def covariance_terms(logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor) -> Tensor:
    """Returns ``[T]`` each token's part of the covariance of log-probability and advantage over all masked tokens, 0
    elsewhere: the product of their deviations from the mean (Cui et al., 2025, arXiv 2505.22617, eq. 10). Entropy falls
    by it.
    """
    deviations = [
        zero_unmasked(values_T, mask_T) - masked_mean(values_T, mask_T) for values_T in (logprobs_T, advantages_T)
    ]
    return torch.where(mask_T, deviations[0] * deviations[1], 0)


def _num(share: float, num_tokens: int) -> int:
    # Shares as 0.3 of 10 must not lose a token to rounding.
    return max(1, int(share * num_tokens + 1e-9))
