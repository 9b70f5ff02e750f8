"""What is sampled, how often, and with which log-probability."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quartet.rollout.protocol import SamplingParams
from quartet.rollout.sampler import SamplingRows, draw, sample, truncate

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0])
V = len(LOGITS)


def run(params: Sequence[SamplingParams], logits: Tensor = LOGITS, position: int = 0) -> tuple[Tensor, Tensor]:
    rows = SamplingRows.build(params, logits.shape[-1], torch.device("cpu"))
    positions = np.full(len(params), position, dtype=np.uint64)
    return sample(logits.expand(len(params), -1).clone(), rows, positions)


def keep_by_hand(probabilities: Sequence[float], top_k: int, top_p: float) -> set[int]:
    """The slow obvious rule: rank, cut to top_k, renormalise, add up until top_p is reached."""
    ranked = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))[: top_k or None]
    total = math.fsum(probabilities[i] for i in ranked)
    kept: set[int] = set()
    for i in ranked:
        kept.add(i)
        if math.fsum(probabilities[j] for j in kept) >= top_p * total:
            break
    return kept


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.8},
        {"top_k": 5, "top_p": 0.7, "temperature": 1.5},
    ],
    ids=str,
)
def test_frequencies_match_the_distribution(
    options: dict[str, float], tolerances: dict[torch.dtype, tuple[float, float]]
) -> None:
    """Chi-square of 20,000 draws; 7 degrees of freedom at most, whose 1e-5 quantile is 34."""
    n = 20_000
    atol, rtol = tolerances[torch.float32]
    tokens, logprobs = run([SamplingParams(seed=i, **options) for i in range(n)])
    scaled = (LOGITS / options.get("temperature", 1.0)).double()
    full = scaled.softmax(-1)
    kept = keep_by_hand(full.tolist(), int(options.get("top_k", 0)), options.get("top_p", 1.0))
    expected = torch.tensor([p if i in kept else 0.0 for i, p in enumerate(full.tolist())], dtype=torch.float64)
    expected *= n / expected.sum()
    observed = torch.bincount(tokens, minlength=V)
    assert set(tokens.tolist()) == kept
    alive = expected > 0
    assert float(((observed - expected)[alive] ** 2 / expected[alive]).sum()) < 34
    # Untruncated, whatever was cut off.
    torch.testing.assert_close(logprobs.double(), scaled.log_softmax(-1)[tokens], atol=atol, rtol=rtol)


def test_the_frequency_check_can_fail() -> None:
    """The same statistic against a slightly wrong temperature is far beyond the bound."""
    n = 20_000
    tokens, _ = run([SamplingParams(seed=i, temperature=1.1) for i in range(n)])
    expected = LOGITS.double().softmax(-1) * n
    assert float(((torch.bincount(tokens, minlength=V) - expected) ** 2 / expected).sum()) > 34


def test_greedy_takes_the_largest_with_log_probability_at_one() -> None:
    tokens, logprobs = run([SamplingParams(temperature=0.0)])
    assert tokens.tolist() == [0]
    torch.testing.assert_close(logprobs, LOGITS.log_softmax(-1)[:1])


def test_rows_do_not_see_each_other() -> None:
    """A mixed batch gives each row exactly what it gets alone."""
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3),
        SamplingParams(seed=3, top_k=2),
        SamplingParams(seed=4, top_p=0.5, temperature=1.7),
        SamplingParams(seed=2**64 - 1, temperature=0.3),
    ] * 8
    logits = torch.randn(len(params), 50, generator=torch.Generator().manual_seed(0)) * 3
    positions = np.arange(len(params), dtype=np.uint64)
    tokens, logprobs = sample(logits, SamplingRows.build(params, 50, logits.device), positions)
    for i, p in enumerate(params):
        alone = sample(logits[i : i + 1], SamplingRows.build([p], 50, logits.device), positions[i : i + 1])
        assert (int(alone[0]), float(alone[1])) == (int(tokens[i]), float(logprobs[i]))


def test_a_token_without_probability_is_never_drawn() -> None:
    """Zeros in front, between and behind, with the extreme draws 0 and the largest double below 1."""
    weights = torch.tensor([[0.0, 0.0, 0.3, 0.0, 0.7, 0.0, 0.0]], dtype=torch.float64)
    extremes = torch.tensor([0.0, 1 - 2**-53, 0.3, 0.29999, 0.5], dtype=torch.float64)
    tokens = draw(weights.expand(5, -1).contiguous(), extremes)
    assert tokens[0] == 2
    assert tokens[1] == 4
    assert set(tokens.tolist()) == {2, 4}
    single = torch.tensor([[0.0, 1e-300, 0.0]], dtype=torch.float64)
    assert draw(single.expand(2, -1).contiguous(), extremes[:2]).tolist() == [1, 1]


def test_masked_logits_are_never_sampled() -> None:
    logits = LOGITS.clone()
    logits[[0, 3, 7]] = float("-inf")
    tokens, logprobs = run([SamplingParams(seed=i) for i in range(3000)], logits)
    assert set(tokens.tolist()) == {1, 2, 4, 5, 6}
    assert bool(logprobs.isfinite().all())


@settings(deadline=None, max_examples=60)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.1, 0.1, 0.25, 1.0, 3.0]), min_size=2, max_size=9).filter(any),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.01, 0.3, 0.55, 0.83, 0.99, 1.0]),
)
def test_truncation_equals_the_slow_rule(weights: list[float], top_k: int, top_p: float) -> None:
    probabilities = torch.tensor([weights], dtype=torch.float64) / sum(weights)
    limit = torch.tensor([min(top_k or len(weights), len(weights))])
    kept = truncate(probabilities, limit, torch.tensor([top_p], dtype=torch.float64))[0]
    expected = {i for i in keep_by_hand(probabilities[0].tolist(), top_k, top_p) if weights[i] > 0}
    assert set(kept.nonzero().squeeze(1).tolist()) == expected
    assert torch.equal(kept[kept > 0], probabilities[0][kept > 0])


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("bad", ["nan", "inf", "all_masked"])
def test_unusable_logits_give_no_finite_log_probability(bad: str, greedy: bool) -> None:
    logits = LOGITS.clone()
    if bad == "all_masked":
        logits[:] = float("-inf")
    else:
        logits[4] = float(bad)
    params = [SamplingParams(temperature=0.0 if greedy else 1.0, seed=i) for i in range(50)]
    tokens, logprobs = run(params, logits)
    assert not bool(logprobs.isfinite().any())
    assert bool(((tokens >= 0) & (tokens < V)).all())
