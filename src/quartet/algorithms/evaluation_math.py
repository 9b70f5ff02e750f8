"""Figures of an evaluation: pass@k, majority vote, and intervals for proportions, means and win rates.

Shape suffixes: P prompts, K samples of a vote, R resamples. A prompt is the unit of every interval: samples of one
prompt hang together, prompts do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

NUM_RESAMPLES = 2000
_BLOCK = 1 << 22
"""Most resampled values that exist at a time."""


class Interval(NamedTuple):
    low: float
    high: float


def pass_at_k(num_samples_P: Tensor, num_right_P: Tensor, k: int) -> Tensor:
    """Returns ``[P]`` float64: probability that at least one of ``k`` samples is right, unbiased (Chen et al. 2021, eq.
    1).

    ``1 − C(n − c, k) / C(n, k)``, which is ``1 − Π_{j<k} (1 − c / (n − j))``; computed through ``log1p`` and
    ``expm1``, so that no factorial overflows and a rare success keeps its digits.

    Args:
        num_samples_P: n, samples of each prompt, int64, at least k.
        num_right_P: c, how many of them are right, int64.
        k: at least 1.
    """
    remaining_PK = num_samples_P.double()[:, None] - torch.arange(k, dtype=torch.float64)
    drawn_PK = (num_right_P.double()[:, None] / remaining_PK).clamp(max=1.0)
    return -torch.expm1(torch.log1p(-drawn_PK).sum(1))


def majority_vote(votes_PK: Tensor, right_PK: Tensor) -> Tensor:
    """Tells whether the most frequent answer is right.

    Among tied answers the value is their mean, which is what a draw between them gives on average.

    Args:
        votes_PK: int64, equal numbers for equal answers within a row; -1 abstains.
        right_PK: bool, whether that sample is right. Samples of one answer may differ; their mean counts then.

    Returns:
        ``[P]`` float64 in [0, 1], 0 where everybody abstains.
    """
    valid_PK = votes_PK >= 0
    same_PKK = (votes_PK[:, :, None] == votes_PK[:, None, :]) & valid_PK[:, None, :]
    count_PK = torch.where(valid_PK, same_PKK.sum(2), 0)
    most_P = count_PK.amax(1)
    winner_PK = valid_PK & (count_PK == most_P[:, None])
    return (winner_PK & right_PK).sum(1).double() / winner_PK.sum(1).clamp(min=1)


def wilson_interval(mean: float, num: int, confidence: float = 0.95) -> Interval:
    """Returns the interval of a proportion ``mean`` of ``num`` independent trials (Wilson 1927), at least one; never
    empty, also at 0 and 1.
    """
    z = _quantile(confidence)
    denominator = 1 + z * z / num
    centre = (mean + z * z / (2 * num)) / denominator
    half = z * math.sqrt(mean * (1 - mean) / num + z * z / (4 * num * num)) / denominator
    # At 0 and 1 the bound is exact; the formula only comes near.
    return Interval(max(0.0, centre - half) if mean > 0 else 0.0, min(1.0, centre + half) if mean < 1 else 1.0)


def bootstrap_interval(
    values_P: Tensor,
    generator: torch.Generator,
    confidence: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
    weights_P: Tensor | None = None,
) -> Interval:
    """Returns the percentile interval of the mean over prompts, resampled with replacement (Efron 1979).

    Args:
        values_P: at least two; of one no spread can be learned.
        weights_P: weight of each prompt in the mean; equal when left out.
    """
    num = len(values_P)
    weights_P = torch.ones(num, dtype=torch.float64) if weights_P is None else weights_P.double()
    sums_P = values_P.double() * weights_P
    rows = max(1, _BLOCK // num)
    means = []
    for done in range(0, num_resamples, rows):
        drawn_RP = torch.randint(num, (min(rows, num_resamples - done), num), generator=generator)
        means.append(sums_P[drawn_RP].sum(1) / weights_P[drawn_RP].sum(1))
    tail = (1 - confidence) / 2
    low, high = torch.quantile(torch.cat(means), torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(low, high)


def win_rate_interval(num_good: int, num_same: int, num_bad: int, confidence: float = 0.95) -> Interval:
    """Returns the interval of the win rate ``(good + same / 2) / all``: the score interval of paired proportions (Tango
    1998).

    The win rate is ``(1 + d) / 2`` with ``d`` the share of good less the share of bad. Those ``d`` belong to the
    interval whose score statistic, with the share of good and bad estimated under ``d``, is within the normal quantile.
    Without ties this is Wilson's interval; with ties only it still has a width. There is at least one comparison.
    """
    num = num_good + num_same + num_bad
    z, found = _quantile(confidence), (num_good - num_bad) / num

    def excess(difference: float) -> float:
        return (found - difference) ** 2 * num - z * z * _score_variance(num_good, num_bad, num, difference)

    low = _root(excess, -1.0, found)
    high = _root(excess, 1.0, found)
    return Interval((1 + low) / 2, (1 + high) / 2)


def _score_variance(num_good: int, num_bad: int, num: int, difference: float) -> float:
    """Returns the variance of one comparison's outcome (+1, 0, -1) when its mean is ``difference``: bad is estimated as
    ``q``, the larger root of the likelihood equation, good as ``q + difference``.
    """
    b = -num_good - num_bad + (2 * num - num_good + num_bad) * difference
    c = -num_bad * difference * (1 - difference)
    q = max(0.0, (math.sqrt(max(0.0, b * b - 8 * num * c)) - b) / (4 * num))
    return max(0.0, 2 * q + difference * (1 - difference))


def _root(excess: Callable[[float], float], outside: float, inside: float) -> float:
    """Finds where ``excess`` changes sign between a point outside the interval and one inside, by bisection."""
    if excess(outside) <= 0:
        return outside
    for _ in range(60):
        middle = (outside + inside) / 2
        if excess(middle) > 0:
            outside = middle
        else:
            inside = middle
    return (outside + inside) / 2


def _quantile(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)
