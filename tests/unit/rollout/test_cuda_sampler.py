"""The sampler of CUDA devices, run on the CPU, against the sampler of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quartet.rollout.cuda_sampler import Kind, SamplingColumns, sample_rows, truncated, uniforms
from quartet.rollout.protocol import SamplingParams
from quartet.rollout.sampler import SamplingRows, sample
from quartet.rollout.seeds import seed_keys
from quartet.rollout.seeds import uniforms as host_uniforms

SEED = st.integers(0, 2**64 - 1)


@given(st.lists(st.tuples(SEED, st.integers(0, 2**40)), min_size=1, max_size=20))
def test_random_numbers_are_those_of_the_host_to_the_bit(pairs: list[tuple[int, int]]) -> None:
    seeds = np.array([seed for seed, _ in pairs], dtype=np.uint64)
    positions = np.array([position for _, position in pairs], dtype=np.uint64)
    on_device = uniforms(torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(positions.view(np.int64)))
    expected = host_uniforms(seed_keys(seeds), positions)
    assert np.array_equal(on_device.numpy().view(np.int64), expected.view(np.int64))


MIXTURE = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.6, temperature=1.3),
    SamplingParams(min_p=0.2),
    SamplingParams(top_k=40, top_p=0.9, min_p=0.05, temperature=0.9),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_k=10**6),
]
PARAMS = {
    "greedy": [SamplingParams(temperature=0.0)] * 8,
    "free": [SamplingParams(temperature=t) for t in (0.3, 1.0, 2.5, 1.0)] * 2,
    "mixed": MIXTURE,
}


def seeded(params: list[SamplingParams], base: int) -> list[SamplingParams]:
    columns = ("temperature", "top_p", "top_k", "min_p")
    return [SamplingParams(**{c: getattr(p, c) for c in columns}, seed=base + i) for i, p in enumerate(params)]


def both(logits: Tensor, params: list[SamplingParams], positions: list[int]) -> tuple[tuple[Tensor, Tensor], ...]:
    vocab_size = logits.shape[1]
    ours = sample_rows(logits, SamplingColumns.build(params, vocab_size), torch.tensor(positions), Kind.of(params))
    rows = SamplingRows.build(params, vocab_size, torch.device("cpu"))
    return ours, sample(logits, rows, np.array(positions, dtype=np.uint64))


@pytest.mark.parametrize("vocab_size", [5, 128, 1000, 4096])
@pytest.mark.parametrize("kind", list(PARAMS))
def test_tokens_are_those_of_the_host(
    kind: str, vocab_size: int, tolerances: dict[torch.dtype, tuple[float, float]]
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    assert Kind.of(PARAMS[kind]).value == kind
    atol, rtol = tolerances[torch.float32]
    for trial in range(40):
        logits = torch.randn(8, vocab_size, generator=generator) * 3
        ours, theirs = both(logits, seeded(PARAMS[kind], 100 * trial + 2**63), [trial + 7 * i for i in range(8)])
        assert torch.equal(ours[0], theirs[0])
        torch.testing.assert_close(ours[1], theirs[1], atol=atol, rtol=rtol)


def test_frequencies_are_the_probabilities() -> None:
    """20,000 draws of one distribution; chi-squared with 199 degrees of freedom stays below its 99.9 % point."""
    num_draws, vocab_size = 20_000, 200
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(0)).expand(num_draws, -1)
    params = [SamplingParams(seed=3)] * num_draws
    columns = SamplingColumns.build(params, vocab_size)
    tokens, _ = sample_rows(logits, columns, torch.arange(num_draws), Kind.FREE)
    expected = logits[0].double().softmax(-1) * num_draws
    counts = torch.bincount(tokens, minlength=vocab_size)
    assert float(((counts - expected).square() / expected).sum()) < 267.5


@pytest.mark.parametrize("kind", list(PARAMS))
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_unusable_rows_are_marked_and_harm_nobody(kind: str, bad: float) -> None:
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(1))
    clean = both(logits, PARAMS[kind], list(range(8)))[0]
    logits[2] = -torch.inf
    logits[2, 7] = bad
    (tokens, logprobs), _ = both(logits, PARAMS[kind], list(range(8)))
    assert logprobs.isfinite().tolist() == [i != 2 for i in range(8)]
    assert 0 <= int(tokens[2]) < 300
    others = torch.arange(8) != 2
    assert torch.equal(tokens[others], clean[0][others])
    assert torch.equal(logprobs[others], clean[1][others])


def test_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((64, 500), -torch.inf)
    logits[:, [3, 260, 499]] = torch.tensor([1.0, 2.0, 0.5])
    params = [SamplingParams(seed=i) for i in range(64)]
    tokens, logprobs = sample_rows(logits, SamplingColumns.build(params, 500), torch.arange(64), Kind.FREE)
    assert set(tokens.tolist()) == {3, 260, 499}
    assert bool(logprobs.isfinite().all())


def test_equal_weights_rank_by_token_id() -> None:
    weights = torch.tensor([[0.5, 1.0, 0.5, 0.5, 0.1]])
    every, none = torch.tensor([[1.0]], dtype=torch.float64), torch.tensor([[0.0]])
    kept = truncated(weights, torch.tensor([[3]]), every, none)
    assert kept.tolist() == [[0.5, 1.0, 0.5, 0.0, 0.0]]


def test_a_mixture_serves_any_row() -> None:
    logits = torch.randn(8, 700, generator=torch.Generator().manual_seed(4))
    for kind in ("greedy", "free"):
        columns = SamplingColumns.build(seeded(PARAMS[kind], 5), 700)
        positions = torch.arange(8)
        alone, mixed = (sample_rows(logits, columns, positions, k) for k in (Kind(kind), Kind.MIXED))
        assert torch.equal(alone[0], mixed[0])
        assert torch.equal(alone[1], mixed[1])
