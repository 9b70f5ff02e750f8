"""Tokens of high entropy and of high covariance: by hand, against sorted lists, in any order."""

import pytest
import torch

from quartet.algorithms.segments import covariance_terms, sample_between_mask, top_fraction_mask

NAN = float("nan")


def test_the_top_share_by_hand():
    values, mask = torch.tensor([0.3, NAN, 0.9, 0.1, 0.9, 0.5]), torch.tensor([True, False, True, True, True, True])
    assert top_fraction_mask(values, mask, 0.2).nonzero().flatten().tolist() == [2, 4], "of equal ones all"
    assert top_fraction_mask(values, mask, 0.6).nonzero().flatten().tolist() == [2, 4, 5]
    assert top_fraction_mask(values, mask, 0.01).sum() == 2, "at least one"
    assert torch.equal(top_fraction_mask(values, mask, 1.0), mask)
    assert not top_fraction_mask(values, torch.zeros_like(mask), 0.5).any()


def test_covariance_by_hand():
    # Means -2 and 1 over the three tokens that count.
    logprobs, advantages = torch.tensor([-1.0, -2.0, NAN, -3.0]), torch.tensor([3.0, 0.0, NAN, 0.0])
    found = covariance_terms(logprobs, advantages, torch.tensor([True, True, False, True]))
    assert found.tolist() == pytest.approx([1.0 * 2.0, 0.0, 0.0, -1.0 * -1.0])
    assert float(found.sum()) / 2 == pytest.approx(float(torch.cov(torch.tensor([[-1.0, -2, -3], [3, 0, 0]]))[0, 1]))


def test_drawn_ones_lie_between_the_limits_and_have_the_smallest_keys():
    values, mask = torch.tensor([2.0, 9.0, 3.0, 4.0, 1.0, 3.5, 2.5, NAN]), torch.ones(8, dtype=torch.bool)
    mask[7] = False
    keys = torch.tensor([0.9, 0.0, 0.2, 0.8, 0.1, 0.3, 0.5, 0.0])
    # 2 of the 7 that count, between 1 and 5 (both left out): of 0, 2, 3, 5 and 6 those with keys 0.2 and 0.3.
    assert sample_between_mask(values, mask, 1.0, 5.0, 0.3, keys).nonzero().flatten().tolist() == [2, 5]
    assert sample_between_mask(values, mask, 1.0, 5.0, 0.99, keys).sum() == 5, "as many as there are"
    assert not sample_between_mask(values, mask, 5.0, 6.0, 0.3, keys).any()


def test_choices_follow_their_tokens(make_layout, unchanged):
    layout, p = make_layout(0), torch.randperm(60, generator=torch.Generator().manual_seed(1))
    logprobs, advantages, keys = layout.normal(0), layout.normal(1), torch.rand(60)
    products = covariance_terms(logprobs, advantages, layout.mask)
    torch.testing.assert_close(covariance_terms(logprobs[p], advantages[p], layout.mask[p]), products[p])
    top = top_fraction_mask(products, layout.mask, 0.25)
    expected = sorted(products[layout.mask].tolist())[-int(0.25 * int(layout.mask.sum())) :]
    assert sorted(products[top].tolist()) == expected
    assert torch.equal(top_fraction_mask(products[p], layout.mask[p], 0.25), top[p])
    drawn = sample_between_mask(products, layout.mask, 0.1, 2.0, 0.1, keys)
    assert drawn.sum() == int(0.1 * int(layout.mask.sum()))
    assert torch.equal(sample_between_mask(products[p], layout.mask[p], 0.1, 2.0, 0.1, keys[p]), drawn[p])
    unchanged(covariance_terms, logprobs, advantages, layout.mask)
    unchanged(top_fraction_mask, products, layout.mask, 0.25)
    unchanged(sample_between_mask, products, layout.mask, 0.1, 2.0, 0.1, keys)
