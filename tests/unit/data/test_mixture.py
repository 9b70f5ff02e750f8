"""Several sources drawn by weight: shares, passes, and an order without history."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from quartet.data.datasets import Mixture, draw_batch, draw_row

SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=4)


@st.composite
def mixtures(pick: st.DrawFn) -> Mixture:
    sizes = pick(SIZES)
    weights = pick(st.lists(st.floats(0.01, 9.0), min_size=len(sizes), max_size=len(sizes)))
    return Mixture(tuple(sizes), tuple(weights))


def source_of(mixture: Mixture, row: int) -> int:
    return next(s for s in range(len(mixture.sizes)) if row < sum(mixture.sizes[: s + 1]))


@given(mixtures(), st.integers(0, 99), st.integers(0, 4))
def test_every_epoch_has_the_shares(mixture: Mixture, seed: int, epoch: int) -> None:
    num = len(mixture)
    drawn = Counter(source_of(mixture, draw_row(seed, epoch * num + k, mixture)[0]) for k in range(num))
    assert tuple(drawn[s] for s in range(len(mixture.sizes))) == mixture.counts
    assert sum(mixture.counts) == num and min(mixture.counts) >= 1
    whole = sum(mixture.weights)
    if min(weight * num / whole for weight in mixture.weights) >= 1:
        for count, weight in zip(mixture.counts, mixture.weights, strict=True):
            assert abs(count - num * weight / whole) < 1


@given(mixtures(), st.integers(0, 9))
def test_a_source_is_gone_through_pass_after_pass(mixture: Mixture, seed: int) -> None:
    """After any number of epochs the rows of one source were used equally often, up to one, and no draw comes twice."""
    drawn = [draw_row(seed, place, mixture) for place in range(5 * len(mixture))]
    assert len(set(drawn)) == len(drawn)
    used = Counter(row for row, _ in drawn)
    for source in range(len(mixture.sizes)):
        uses = [used[row] for row in range(len(mixture)) if source_of(mixture, row) == source]
        assert max(uses) - min(uses) <= 1
        assert sum(uses) == 5 * mixture.counts[source]


def test_order_is_a_function_of_seed_and_step() -> None:
    mixture = Mixture((50, 30), (1.0, 3.0))
    assert mixture.counts == (20, 60)
    steps = [draw_batch(7, step, mixture, 16) for step in range(12)]
    assert [draw_batch(7, step, Mixture((50, 30), (1.0, 3.0)), 16) for step in reversed(range(12))] == steps[::-1]
    every = [drawn for step in steps for drawn in step]
    assert every == [draw_row(7, place, mixture) for place in range(12 * 16)]
    assert steps != [draw_batch(8, step, mixture, 16) for step in range(12)]
    sides = "".join("ab"[source_of(mixture, row)] for step in steps for row, _ in step)
    assert "ab" in sides[:40] and "ba" in sides[:40], "sources are mixed within an epoch"
    passes = [[row for row, number in every if row >= 50 and number == n] for n in (0, 1)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(50, 80)) and passes[0] != passes[1]
