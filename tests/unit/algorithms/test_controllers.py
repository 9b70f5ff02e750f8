import pytest

from quartet.algorithms.controllers import adaptive_kl_coef


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (6.0, 0.2),  # on target: unchanged
        (6.6, 0.2 * (1 + 0.1 * 256 / 10_000)),  # 10 % above
        (60.0, 0.2 * (1 + 0.2 * 256 / 10_000)),  # far above: the error counts 20 % at most
        (-1.0, 0.2 * (1 - 0.2 * 256 / 10_000)),  # an estimate may be negative
    ],
)
def test_by_hand(observed, expected):
    assert adaptive_kl_coef(0.2, observed, 6.0, 10_000, 256) == pytest.approx(expected)


def test_it_holds_a_divergence_that_falls_with_the_coefficient():
    coef = 0.01
    for _ in range(2000):
        coef = adaptive_kl_coef(coef, 1.0 / coef, 5.0, 1000, 100)
    assert 1.0 / coef == pytest.approx(5.0, rel=1e-3)


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 10.0), (1.0, 0.0)])
def test_refusals(target, horizon):
    with pytest.raises(ValueError, match="above 0"):
        adaptive_kl_coef(0.1, 1.0, target, horizon, 1)
