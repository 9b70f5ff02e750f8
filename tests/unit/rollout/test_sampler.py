"""What is sampled, how often, and with which log-probability."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quartet.models import logprobs as truncation_module
from quartet.models.logprobs import SamplingLimits, Truncation, truncate_probs
from quartet.rollout import sampler
from quartet.rollout.protocol import Draw, SamplingParams
from quartet.rollout.sampler import (
    SamplingRows,
    noise_keys,
    noise_values,
    sample,
    sample_tokens,
    seed_keys,
    token_hashes,
)

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0])
V = len(LOGITS)
CPU = torch.device("cpu")
DRAWS: tuple[Draw, ...] = ("inverse", "gumbel")
BELOW_ONE = 1 - 2**-53
# Cut into blocks or not, with a shorter last block or without.
WIDTHS = (50, 512, 1500, 2048)


def run(params: Sequence[SamplingParams], logits: Tensor = LOGITS, position: int = 0) -> tuple[Tensor, Tensor]:
    rows = SamplingRows.build(params, logits.shape[-1], CPU)
    positions = np.full(len(params), position, dtype=np.uint64)
    return sample(logits.expand(len(params), -1).clone(), rows, positions)


@pytest.fixture
def force_draws(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[float]], None]:
    """``force_draws(numbers)``: they decide the tokens instead of seeds and positions."""

    def force(numbers: Sequence[float]) -> None:
        monkeypatch.setattr(sampler, "uniform_numbers", lambda keys, positions: np.array(numbers, dtype=np.float64))

    return force


def keep_by_hand(probabilities: Sequence[float], top_k: int, top_p: float, min_p: float = 0.0) -> set[int]:
    """The slow obvious rule: rank, cut to top_k, renormalise, add up until top_p is reached, then min_p."""
    ranked = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))[: top_k or None]
    total = math.fsum(probabilities[i] for i in ranked)
    kept: set[int] = set()
    for i in ranked:
        kept.add(i)
        if math.fsum(probabilities[j] for j in kept) >= top_p * total:
            break
    return {i for i in kept if probabilities[i] >= min_p * max(probabilities)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"top_k": 5, "top_p": 0.7, "temperature": 1.5},
        {"top_k": 6, "top_p": 0.95, "min_p": 0.3, "temperature": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize("draw", DRAWS)
def test_frequencies_match_the_distribution(
    options: dict[str, float], draw: Draw, tolerances: dict[torch.dtype, tuple[float, float]]
) -> None:
    """Chi-square of 20,000 draws; 7 degrees of freedom at most, whose 1e-5 quantile is 34."""
    n = 20_000
    atol, rtol = tolerances[torch.float32]
    tokens, logprobs = run([SamplingParams(seed=i, draw=draw, **options) for i in range(n)])
    scaled = (LOGITS / options.get("temperature", 1.0)).double()
    full = scaled.softmax(-1)
    limits = int(options.get("top_k", 0)), options.get("top_p", 1.0), options.get("min_p", 0.0)
    kept = keep_by_hand(full.tolist(), *limits)
    expected = torch.tensor([p if i in kept else 0.0 for i, p in enumerate(full.tolist())], dtype=torch.float64)
    expected *= n / expected.sum()
    observed = torch.bincount(tokens, minlength=V)
    assert set(tokens.tolist()) == kept
    alive = expected > 0
    assert float(((observed - expected)[alive] ** 2 / expected[alive]).sum()) < 34
    # Untruncated, whatever was cut off.
    torch.testing.assert_close(logprobs.double(), scaled.log_softmax(-1)[tokens], atol=atol, rtol=rtol)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.4}, {"top_p": 0.6}, {"min_p": 0.02}], ids=str)
def test_frequencies_over_several_blocks(options: dict[str, float], draw: Draw) -> None:
    """Chi-square over 1500 tokens, of which those expected less than 10 times count as one."""
    num_rows, repeats = 1000, 10
    logits = torch.randn(1500, generator=torch.Generator().manual_seed(3)) * 2
    observed = torch.zeros(1500, dtype=torch.float64)
    params = [SamplingParams(seed=i, draw=draw, **options) for i in range(num_rows)]
    for position in range(repeats):
        observed += torch.bincount(run(params, logits, position)[0], minlength=1500)
    full = (logits / options.get("temperature", 1.0)).double().softmax(-1)
    kept = keep_by_hand(full.tolist(), 0, options.get("top_p", 1.0), options.get("min_p", 0.0))
    expected = full * torch.tensor([i in kept for i in range(1500)])
    assert not bool(observed[expected == 0].any())
    expected *= num_rows * repeats / expected.sum()
    often = expected >= 10
    cells = torch.stack([*expected[often], expected[~often].sum()])
    counts = torch.stack([*observed[often], observed[~often].sum()])
    cells, counts = cells[cells > 0], counts[cells > 0]
    freedom = len(cells) - 1
    assert freedom > 30
    # Mean and standard deviation of the statistic are freedom and sqrt(2 freedom).
    assert float(((counts - cells) ** 2 / cells).sum()) < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_rows", [1, 3, 300])
def test_log_probabilities_have_the_bits_of_the_plain_formula(width: int, num_rows: int, temperature: float) -> None:
    """With several chunks of rows, a shorter last one, and without."""
    logits = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(1)) * 4
    params = [SamplingParams(seed=i, temperature=temperature) for i in range(num_rows)]
    tokens, logprobs = sample(logits, SamplingRows.build(params, width, CPU), np.zeros(num_rows, dtype=np.uint64))
    scaled = logits / temperature
    plain = scaled - scaled.logsumexp(-1, keepdim=True)
    assert torch.equal(logprobs, plain.gather(1, tokens.unsqueeze(1)).squeeze(1))


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_do_not_see_each_other(width: int) -> None:
    """A mixed batch gives each row exactly what it gets alone, and leaves its logits unchanged."""
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3),
        SamplingParams(seed=3, top_k=2),
        SamplingParams(seed=4, top_p=0.5, temperature=1.7),
        SamplingParams(seed=5, min_p=0.1),
        SamplingParams(seed=2**64 - 1, temperature=0.3),
        SamplingParams(seed=6, top_k=40, min_p=0.01, temperature=1.1),
        SamplingParams(seed=7, draw="gumbel"),
        SamplingParams(seed=8, top_p=0.7, temperature=0.9, draw="gumbel"),
        SamplingParams(temperature=0.0, draw="gumbel"),
    ] * 9
    logits = torch.randn(len(params), width, generator=torch.Generator().manual_seed(0)) * 3
    before = logits.clone()
    positions = np.arange(len(params), dtype=np.uint64)
    tokens, logprobs = sample(logits, SamplingRows.build(params, width, CPU), positions)
    assert torch.equal(logits, before)
    for i, p in enumerate(params):
        alone = sample(logits[i : i + 1], SamplingRows.build([p], width, CPU), positions[i : i + 1])
        assert (int(alone[0]), float(alone[1])) == (int(tokens[i]), float(logprobs[i]))


@pytest.mark.parametrize("width", WIDTHS)
def test_tokens_invert_the_distribution_function(width: int, force_draws: Callable[[Sequence[float]], None]) -> None:
    """The sum up to a token is above the number drawn, the sum before it is not; both to fp32 rounding."""
    generator = torch.Generator().manual_seed(2)
    numbers = torch.rand(200, dtype=torch.float64, generator=generator)
    logits = torch.randn(200, width, generator=generator) * 3
    logits[:, -2:] = 9.0
    force_draws(numbers.tolist())
    tokens, _ = sample(logits, SamplingRows.build([SamplingParams()] * 200, width, CPU), np.zeros(200, dtype=np.uint64))
    probabilities = logits.double().softmax(-1)
    above = probabilities.cumsum(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    below = above - probabilities.gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert bool((below - 1e-6 <= numbers).all())
    assert bool((numbers <= above + 1e-6).all())


@pytest.mark.parametrize("width", WIDTHS)
def test_extreme_draws_pick_tokens_that_have_weight(width: int, force_draws: Callable[[Sequence[float]], None]) -> None:
    """The first with weight at 0, the last at the largest number below 1, whatever stands before and behind."""
    logits = torch.full((4, width), float("-inf"))
    first, last = torch.tensor([0, 7, 7, width - 1]), torch.tensor([width - 1, 7, width - 9, width - 1])
    for i in range(4):
        logits[i, first[i] : last[i] + 1 : max(int(last[i] - first[i]), 1)] = float(i)
    rows = SamplingRows.build([SamplingParams()] * 4, width, CPU)
    positions = np.zeros(4, dtype=np.uint64)
    force_draws([0.0] * 4)
    assert torch.equal(sample(logits, rows, positions)[0], first)
    force_draws([BELOW_ONE] * 4)
    assert torch.equal(sample(logits, rows, positions)[0], last)


@settings(deadline=None, max_examples=150)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.1, 0.1, 0.25, 1.0, 3.0]), min_size=2, max_size=12).filter(any),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.01, 0.3, 0.55, 0.83, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.2, 1.0]),
    candidates=st.sampled_from([1, 2, 5, 256]),
)
def test_truncation_equals_the_slow_rule(
    weights: list[float], top_k: int, top_p: float, min_p: float, candidates: int
) -> None:
    """Whether the most likely few suffice or the whole row is needed; other rows with other rules stand beside."""
    row = torch.tensor(weights) / max(weights)
    others = [SamplingParams(min_p=0.001), SamplingParams(top_k=1), SamplingParams(top_p=0.2)]
    params = [SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p), *others]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truncation_module, "_CANDIDATES", candidates)
        limits = {i: SamplingLimits(p.top_p, p.top_k, p.min_p) for i, p in enumerate(params) if p.truncates}
        truncation = Truncation.build(limits, len(weights), CPU)
    assert truncation is not None
    kept = truncate_probs(row.repeat(len(truncation.rows), 1), truncation)
    for place, i in enumerate(truncation.rows.tolist()):
        p = params[i]
        expected = {j for j in keep_by_hand(row.tolist(), p.top_k, p.top_p, p.min_p) if weights[j] > 0}
        assert set(kept[place].nonzero().squeeze(1).tolist()) == expected
        assert torch.equal(kept[place][kept[place] > 0], row[kept[place] > 0])


@pytest.mark.parametrize("width", [V, 1500])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3, "min_p": 0.1}], ids=str)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("bad", ["nan", "inf", "all_masked"])
def test_unusable_logits_give_no_log_probability(bad: str, draw: Draw, options: dict[str, float], width: int) -> None:
    """Each such row has a token and NaN; the rows beside it are as they would be without."""
    logits = LOGITS.repeat(-(-width // V))[:width].repeat(20, 1)
    if bad == "all_masked":
        logits[::2] = float("-inf")
    else:
        logits[::2, 4] = float(bad)
    params = [SamplingParams(seed=i, draw=draw, **options) for i in range(20)]
    positions = np.zeros(20, dtype=np.uint64)
    tokens, logprobs = sample(logits, SamplingRows.build(params, width, CPU), positions)
    assert bool(logprobs[::2].isnan().all())
    assert bool(((tokens >= 0) & (tokens < width)).all())
    rest = sample(logits[1::2], SamplingRows.build(params[1::2], width, CPU), positions[1::2])
    assert torch.equal(tokens[1::2], rest[0])
    assert torch.equal(logprobs[1::2], rest[1])


# Gumbel noise --------------------------------------------------------------------------------------------


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    """Recorded once: a change of these numbers changes every run that draws so."""
    keys = noise_keys(seed_keys(np.array([0, 1, 2**64 - 1], dtype=np.uint64)), np.array([0, 5, 7], dtype=np.uint64))
    found = noise_values(token_hashes(5, CPU), torch.from_numpy(keys))
    assert torch.equal(noise_values(token_hashes(3000, CPU), torch.from_numpy(keys))[:, :5], found)
    assert torch.equal(noise_values(token_hashes(5, CPU), torch.from_numpy(keys[1:2])), found[1:2])
    assert (found * 2**31).round().long().tolist() == [
        [364972032, 654148288, 1856335488, 659522560, 865104704],
        [1645160192, 242564336, 215593920, 168405936, 81750944],
        [1894720768, 189413424, 689469888, 1943145984, 2119387648],
    ]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"top_k": 9, "top_p": 0.8}], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_token_has_the_largest_sum_of_logit_and_noise(options: dict[str, float], width: int) -> None:
    """In fp64 by the formula, token for token."""
    logits = torch.randn(300, width, generator=torch.Generator().manual_seed(5)) * 3
    params, positions = [SamplingParams(seed=i, draw="gumbel", **options) for i in range(300)], np.arange(300)
    tokens = sample_tokens(logits, SamplingRows.build(params, width, CPU), positions.astype(np.uint64)).squeeze(1)
    keys = noise_keys(seed_keys(np.arange(300, dtype=np.uint64)), positions.astype(np.uint64))
    numbers = noise_values(token_hashes(width, CPU), torch.from_numpy(keys)).double()
    noise = -(-(-numbers).log1p()).log()
    scaled = (logits / options.get("temperature", 1.0)).double()
    if options.get("top_k"):
        best = scaled.topk(9, -1)
        kept = best.values.softmax(-1)
        left_out = kept.cumsum(-1) - kept >= options["top_p"]
        scaled = torch.full_like(scaled, -torch.inf).scatter(
            1, best.indices, best.values.masked_fill(left_out, -torch.inf)
        )
    assert torch.equal(tokens, (scaled + noise).argmax(-1))


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("width", [50, 1500])
def test_near_distributions_give_mostly_the_same_token(draw: Draw, width: int) -> None:
    """Gumbel noise: at least (1 - d) / (1 + d) of the tokens, with d the total variation; one number couples worse."""
    n = 20_000 if width == 50 else 4000
    generator = torch.Generator().manual_seed(6)
    one = torch.randn(width, generator=generator) * 2
    other = one + torch.randn(width, generator=generator) * 0.3
    found = [run([SamplingParams(seed=i, draw=draw) for i in range(n)], logits)[0] for logits in (one, other)]
    same = float((found[0] == found[1]).double().mean())
    distance = float((one.double().softmax(-1) - other.double().softmax(-1)).abs().sum() / 2)
    bound, error = (1 - distance) / (1 + distance), 5 * math.sqrt(0.25 / n)
    assert 0.05 < distance < 0.2
    if draw == "gumbel":
        assert bound - error < same <= 1 - distance + error
    else:
        assert same < bound - error
