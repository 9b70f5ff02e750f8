import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quartet.algorithms.advantages import BLOCK, reverse_linear_scan


def slow_scan(inputs, coefficients):
    out = torch.zeros_like(inputs)
    behind = 0.0
    for i in range(len(inputs) - 1, -1, -1):
        behind = out[i] = inputs[i] + coefficients[i] * behind
    return out


def random_case(seed, size, cut_probability=0.05):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, generator=generator, dtype=torch.float64)
    coefficients = torch.rand(size, generator=generator, dtype=torch.float64)
    coefficients[torch.rand(size, generator=generator) < cut_probability] = 0.0
    return inputs, coefficients


@given(st.integers(0, 2**31), st.integers(0, 3 * BLOCK), st.floats(0, 0.5))
def test_matches_a_loop(seed, size, cut_probability):
    inputs, coefficients = random_case(seed, size, cut_probability)
    torch.testing.assert_close(
        reverse_linear_scan(inputs, coefficients), slow_scan(inputs, coefficients), atol=1e-10, rtol=1e-9
    )


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK**2, BLOCK**2 + 1])
def test_sizes_around_the_blocks(size, close):
    inputs, coefficients = random_case(size, size)
    close(reverse_linear_scan(inputs, coefficients), slow_scan(inputs, coefficients))


def test_products_that_underflow_stay_exact(close):
    # 0.01 ** 40_000 is far below the smallest float; the result is finite all the same.
    inputs = torch.ones(40_000)
    scanned = reverse_linear_scan(inputs, torch.full_like(inputs, 0.01))
    close(scanned[:-10], torch.full_like(inputs, 1 / 0.99)[:-10])
