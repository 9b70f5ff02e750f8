import math

import pytest
import torch

from quartet.algorithms import losses
from quartet.algorithms.losses import SampledTokens


def importance_weights(*tokens, **options):
    return losses.importance_weights(SampledTokens(*tokens), **options)


def is_accepted(*tokens, **options):
    return losses.within_ratio_limits(SampledTokens(*tokens), **options)


def mean_weight(weights, *tokens, **options):
    return losses.mean_weight(weights, SampledTokens(weights, weights, *tokens), **options)


def weights_of(layout, old, rollout, **options):
    return importance_weights(old, rollout, layout.mask, layout.owner, layout.num_owners, **options)


def test_a_floor_and_a_mean_by_hand():
    # Weights 4, 1.5, 0.25 and 0.5; tokens 0 and 3 belong to trajectory 0, the others to 1; the last is masked.
    owner, mask = torch.tensor([0, 1, 1, 0, 1]), torch.tensor([True, True, True, True, False])
    old = torch.tensor([4.0, 1.5, 0.25, 0.5, 9.0]).log()
    options = {"level": "token", "cap": 2.0, "floor": 0.4}
    found = importance_weights(old, torch.zeros(5), mask, owner, 2, mode="truncate", **options)
    assert found.weights.tolist() == pytest.approx([2, 1.5, 0.4, 0.5, 0]) and found.num_capped == 2
    assert float(mean_weight(found.weights, mask, owner, 2, level="token")) == pytest.approx(4.4 / 4)
    masked = importance_weights(old, torch.zeros(5), mask, owner, 2, mode="mask", **options)
    assert masked.weights.tolist() == pytest.approx([0, 1.5, 0, 0.5, 0]) and masked.num_capped == 2
    # One weight per trajectory: 2 on one token, 1 on three. The mean is that of the trajectories.
    owner, weights = torch.tensor([0, 1, 1, 1]), torch.tensor([2.0, 1.0, 1.0, 1.0])
    assert float(mean_weight(weights, weights > 0, owner, 3, level="sequence")) == 1.5
    assert float(mean_weight(weights, weights < 0, owner, 3, level="token")) == 1.0, "nothing to divide"


@pytest.mark.parametrize("statistic", ["geometric", "sequence"])
def test_rejection_matches_a_loop_in_any_order(statistic, make_layout, unchanged):
    layout = make_layout(0)
    old = layout.normal(0)
    rollout = old + 0.2 * layout.normal(1)
    lower, upper = (0.95, 1.06) if statistic == "geometric" else (0.7, 1.4)
    options = {"statistic": statistic, "lower": lower, "upper": upper}
    poisoned = layout.poisoned(old, -math.inf)
    found = is_accepted(poisoned, rollout, layout.mask, layout.owner, layout.num_owners, **options)
    expected = []
    for n in range(layout.num_owners):
        logs = [float(old[t] - rollout[t]) for t in layout.tokens_of(n)]
        total = sum(logs) / (len(logs) if statistic == "geometric" else 1) if logs else 0.0
        expected.append(lower <= math.exp(total) <= upper)
    assert found.tolist() == expected and not all(expected) and any(expected[:-2])
    p = torch.randperm(layout.num_tokens, generator=torch.Generator().manual_seed(0))
    again = is_accepted(old[p], rollout[p], layout.mask[p], layout.owner[p], layout.num_owners, **options)
    assert torch.equal(again, found)
    unchanged(is_accepted, old, rollout, layout.mask, layout.owner, layout.num_owners, **options)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_matches_a_loop(level, mode, make_layout, close):
    layout = make_layout(0)
    old = layout.normal(0)
    rollout = old + 0.4 * layout.normal(1)
    expected = torch.zeros(layout.num_tokens, dtype=torch.float64)
    for n in range(layout.num_owners):
        tokens = layout.tokens_of(n)
        for t in tokens:
            rows = tokens if level == "sequence" else [t]
            weight = (old - rollout)[rows].sum().exp()
            expected[t] = weight if weight <= 1.2 else (1.2 if mode == "truncate" else 0.0)
    poison = float("-inf")
    found = weights_of(
        layout, layout.poisoned(old, poison), layout.poisoned(rollout, poison), level=level, mode=mode, cap=1.2
    )
    close(found.weights, expected)
    assert 0 < found.num_capped < layout.mask.sum()


def test_order_constancy_and_unchanged_inputs(make_layout, close, unchanged):
    layout = make_layout(0)
    old, rollout = layout.normal(0).requires_grad_(), layout.normal(1)
    options = {"level": "sequence", "mode": "truncate", "cap": 2.0}
    before = weights_of(layout, old, rollout, **options).weights
    assert not before.requires_grad
    p = torch.randperm(layout.num_tokens, generator=torch.Generator().manual_seed(0))
    after = importance_weights(
        old[p], rollout[p], layout.mask[p], layout.owner[p], layout.num_owners, **options
    ).weights
    close(after, before[p])
    unchanged(importance_weights, old, rollout, layout.mask, layout.owner, layout.num_owners, **options)
