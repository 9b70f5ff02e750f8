import pytest
import torch

from quartet.algorithms.off_policy import importance_weights


def weights_of(layout, old, rollout, **options):
    return importance_weights(old, rollout, layout.mask, layout.owner, layout.num_owners, **options)


@pytest.mark.parametrize(
    ("level", "mode", "expected", "num_capped"),
    [
        ("token", "truncate", [0, 2, 1.5, 0.5, 0], 1),
        ("token", "mask", [0, 0, 1.5, 0.5, 0], 1),
        ("sequence", "truncate", [0, 2, 2, 0.5, 0], 2),
        ("sequence", "mask", [0, 0, 0, 0.5, 0], 2),
    ],
)
def test_by_hand(level, mode, expected, num_capped):
    # Weights 4 and 1.5 in trajectory 0 (6 together), 0.5 in trajectory 1; the last token is masked.
    owner = torch.tensor([-1, 0, 0, 1, 1])
    mask = torch.tensor([True, True, True, True, False])
    old = torch.tensor([1.0, 4.0, 1.5, 0.5, 0.0]).log()
    found = importance_weights(old, torch.zeros(5), mask, owner, 2, level=level, mode=mode, cap=2.0)
    assert found.weights.tolist() == pytest.approx(expected)
    assert found.num_capped == num_capped


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


def test_equal_policies_weigh_one_whatever_the_dtype(make_layout):
    layout = make_layout(0)
    old = layout.normal(0, torch.bfloat16)
    found = weights_of(layout, old, old, level="sequence", mode="truncate", cap=1.0)
    assert found.weights.dtype == torch.float32
    assert torch.equal(found.weights == 1, layout.mask & (layout.owner >= 0))
    assert found.num_capped == 0


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
