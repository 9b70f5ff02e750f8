import pytest
import torch

from quartet.algorithms import segments as seg


def test_sums_means_and_deviations_match_a_loop(make_layout, close):
    layout = make_layout(0)
    values = layout.poisoned(layout.normal(1), float("nan"))
    owner = seg.masked_owner(layout.owner, layout.mask)
    count = seg.segment_count(owner, layout.num_owners)
    total = seg.segment_sum(values, owner, layout.num_owners)
    mean = seg.segment_mean(values, owner, layout.num_owners)
    std = seg.segment_std(torch.where(owner >= 0, values, 0), owner, layout.num_owners)
    for n in range(layout.num_owners):
        own = values[layout.tokens_of(n)]
        assert count[n] == len(own)
        close(total[n], own.sum())
        close(mean[n], own.mean() if len(own) else torch.tensor(0.0, dtype=torch.float64))
        close(std[n], own.std() if len(own) > 1 else torch.tensor(0.0, dtype=torch.float64))


def test_last_token_and_time_order(make_layout):
    layout = make_layout(5)
    owner = seg.masked_owner(layout.owner, layout.mask)
    expected_order = [t for n in range(layout.num_owners) for t in layout.tokens_of(n)]
    assert seg.owned_positions(owner).tolist() == expected_order
    last = [max(layout.tokens_of(n), default=-1) for n in range(layout.num_owners)]
    assert seg.last_token_positions(owner, layout.num_owners).tolist() == last


def test_segment_is_constant():
    values = torch.tensor([0.1, 0.1, 0.2, -5.0, 7.0])
    owner = torch.tensor([0, 0, 0, 1, -1])
    assert seg.segment_is_constant(values, owner, 3).tolist() == [False, True, True]
    assert seg.segment_is_constant(-values[:2], owner[:2], 1).tolist() == [True]


def test_whitening_matches_torch_and_ignores_order(make_layout, close):
    layout = make_layout(2)
    values = layout.normal(0)
    own = values[layout.mask]
    whitened = seg.masked_whiten(torch.where(layout.mask, values, float("inf")), layout.mask)
    close(whitened[layout.mask], (own - own.mean()) / (own.std() + 1e-6))
    assert torch.all(whitened[~layout.mask] == 0)
    permutation = torch.randperm(layout.num_tokens, generator=torch.Generator().manual_seed(0))
    close(seg.masked_whiten(values[permutation], layout.mask[permutation]), whitened[permutation])


@pytest.mark.parametrize("mask", [[False, False], [True, False]])
def test_fewer_than_two_tokens_are_not_whitened(mask):
    whitened = seg.masked_whiten(torch.tensor([3.0, 4.0]), torch.tensor(mask))
    assert whitened.tolist() == [3.0 if mask[0] else 0.0, 0.0]


def test_equal_values_whiten_to_exactly_zero():
    values = torch.full((1001,), 0.1)
    assert torch.all(seg.masked_whiten(values, torch.ones(1001, dtype=torch.bool)) == 0)
