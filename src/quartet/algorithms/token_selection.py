"""Which tokens of a step are treated otherwise than the rest: those of high entropy, those of high covariance.

Shape suffix: T stored tokens of the whole step. Every choice depends on all of them, so it is made once, before the
step's first update, and never within a mini-batch or a micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quartet.algorithms.segments import keep, masked_mean


def top_share(values_T: Tensor, mask_T: Tensor, share: float) -> Tensor:
    """``[T]`` bool: the masked tokens with the highest values, ``share`` of them (rounded down, at least one); all that
    equal the last of these, too, so that the order of tokens does not matter.

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


def drawn_between(values_T: Tensor, mask_T: Tensor, lower: float, upper: float, share: float, keys_T: Tensor) -> Tensor:
    """``[T]`` bool: masked tokens with a value between the two limits, those with the smallest keys, ``share`` of *all*
    masked tokens (rounded down, at least one) or as many as there are (Clip-Cov; Cui et al., 2025, eq. 11).

    Args:
        keys_T: ``[T]`` random numbers, all different.
    """
    chosen_T = torch.zeros_like(mask_T)
    places = (mask_T & (values_T > lower) & (values_T < upper)).nonzero().squeeze(1)
    first = keys_T[places].argsort()[: _num(share, int(mask_T.sum()))]
    chosen_T[places[first]] = True
    return chosen_T


def covariance(logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor) -> Tensor:
    """``[T]`` each token's part of the covariance of log-probability and advantage over all masked tokens, 0 elsewhere:
    the product of their deviations from the mean (Cui et al., 2025, arXiv 2505.22617, eq. 10). Entropy falls by it.
    """
    deviations = [keep(values_T, mask_T) - masked_mean(values_T, mask_T) for values_T in (logprobs_T, advantages_T)]
    return torch.where(mask_T, deviations[0] * deviations[1], 0)


def _num(share: float, num_tokens: int) -> int:
    # Shares as 0.3 of 10 must not lose a token to rounding.
    return max(1, int(share * num_tokens + 1e-9))
