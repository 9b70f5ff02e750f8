"""pass@k, majority votes and intervals against slow, obvious references."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quartet.algorithms.evaluation_math import (
    bootstrap_interval,
    majority_vote,
    pass_at_k,
    wilson_interval,
    win_rate_interval,
)

# pass@k ----------------------------------------------------------------------------------------------------


def drawn_pass(num: int, right: int, k: int) -> float:
    """Over every subset of k samples: does it hold a right one?"""
    marks = [True] * right + [False] * (num - right)
    subsets = list(itertools.combinations(marks, k))
    return sum(any(subset) for subset in subsets) / len(subsets)


def test_pass_at_k_is_the_average_over_all_subsets() -> None:
    for num in range(1, 8):
        for k in range(1, num + 1):
            rights = torch.arange(num + 1)
            found = pass_at_k(torch.full_like(rights, num), rights, k)
            assert found.tolist() == pytest.approx([drawn_pass(num, c, k) for c in range(num + 1)], abs=1e-14)


def test_pass_at_k_keeps_its_digits_where_factorials_overflow() -> None:
    """C(100000, 500) has 1,600 digits; one success in a hundred thousand has probability k / n."""
    num, k = 100_000, 500
    assert pass_at_k(torch.tensor([num]), torch.tensor([1]), k).item() == pytest.approx(k / num, rel=1e-12)
    exact = 1 - math.comb(num - 300, k) / math.comb(num, k)
    assert pass_at_k(torch.tensor([num]), torch.tensor([300]), k).item() == pytest.approx(exact, rel=1e-12)


# Majority --------------------------------------------------------------------------------------------------


def slow_vote(votes: Sequence[int], right: Sequence[bool]) -> float:
    counts = Counter(v for v in votes if v >= 0)
    if not counts:
        return 0.0
    most = max(counts.values())
    winners = [v for v, count in counts.items() if count == most]
    marks = [[r for v, r in zip(votes, right, strict=True) if v == winner] for winner in winners]
    return sum(sum(m) / len(m) for m in marks) / len(winners)


def _rows(k: int) -> st.SearchStrategy[list[tuple[list[int], list[bool]]]]:
    votes = st.lists(st.integers(-1, 3), min_size=k, max_size=k)
    marks = st.lists(st.booleans(), min_size=k, max_size=k)
    return st.lists(st.tuples(votes, marks), min_size=1, max_size=5)


@given(st.integers(1, 6).flatmap(_rows))
def test_majority_votes(rows: list[tuple[list[int], list[bool]]]) -> None:
    votes, right = torch.tensor([v for v, _ in rows]), torch.tensor([r for _, r in rows])
    assert majority_vote(votes, right).tolist() == pytest.approx([slow_vote(v, r) for v, r in rows])


# Intervals -------------------------------------------------------------------------------------------------


def test_wilson_is_where_the_score_test_just_accepts() -> None:
    z = 1.959964
    for mean, num in ((0.3, 20), (0.0, 7), (0.95, 400)):
        for bound in wilson_interval(mean, num):
            if 0 < bound < 1:
                assert abs(mean - bound) == pytest.approx(z * math.sqrt(bound * (1 - bound) / num), rel=1e-5)


def test_bootstrap_against_a_loop() -> None:
    values = torch.tensor([0.0, 0.25, 0.5, 1.0, 1.0, 3.0], dtype=torch.float64)
    weights = torch.tensor([1, 2, 1, 3, 1, 1])
    for given_weights in (None, weights):
        found = bootstrap_interval(values, torch.Generator().manual_seed(3), weights_P=given_weights)
        drawn = torch.randint(6, (2000, 6), generator=torch.Generator().manual_seed(3)).tolist()
        w = [1] * 6 if given_weights is None else weights.tolist()
        means = sorted(sum(values[i].item() * w[i] for i in row) / sum(w[i] for i in row) for row in drawn)
        for bound, tail in zip(found, (0.025, 0.975), strict=True):
            place = tail * (len(means) - 1)
            below = means[math.floor(place)]
            slow = below + (place - math.floor(place)) * (means[math.ceil(place)] - below)
            assert bound == pytest.approx(slow, abs=1e-12)


def log_likelihood(good: int, same: int, bad: int, p: float, q: float) -> float:
    rest = 1 - p - q
    parts = [(good, p), (bad, q), (same, rest)]
    if any(count and value <= 0 for count, value in parts):
        return -math.inf
    return sum(count * math.log(value) for count, value in parts if count)


def slow_statistic(good: int, same: int, bad: int, difference: float) -> float:
    """The score statistic with the shares that maximise the likelihood on a fine grid of shares of bad."""
    num = good + same + bad
    grid = [i / 20_000 for i in range(20_001)]
    fits = [q for q in grid if q + max(0.0, difference) <= 1 and q + difference >= 0 and 2 * q + difference <= 1]
    q = max(fits, key=lambda q: log_likelihood(good, same, bad, q + difference, q))
    variance = 2 * q + difference - difference**2
    return abs((good - bad) / num - difference) / math.sqrt(variance / num)


@pytest.mark.parametrize(("good", "same", "bad"), [(12, 20, 5), (1, 30, 9), (40, 3, 40)])
def test_win_rate_interval_is_where_the_score_test_just_accepts(good: int, same: int, bad: int) -> None:
    for bound in win_rate_interval(good, same, bad):
        assert slow_statistic(good, same, bad, 2 * bound - 1) == pytest.approx(1.959964, abs=0.01)


def test_win_rate_interval_without_ties_is_wilsons() -> None:
    for good, bad in ((7, 3), (0, 6), (25, 75)):
        assert win_rate_interval(good, 0, bad) == pytest.approx(wilson_interval(good / (good + bad), good + bad))


def test_win_rate_interval_of_ties_alone_has_a_width() -> None:
    """d = ± z² / (n + z²)."""
    z2 = 1.959964**2
    low, high = win_rate_interval(0, 40, 0)
    assert high == pytest.approx(0.5 + z2 / (40 + z2) / 2, rel=1e-6) and low == pytest.approx(1 - high)
    assert win_rate_interval(3, 0, 0).high == 1
