"""Sums that do not depend on how a batch was cut."""

from __future__ import annotations

import torch

from quartet.train.metrics import MetricSums


def test_mean_is_weighted_over_all_parts():
    sums = MetricSums()
    sums.mean("m", torch.tensor([1.0, 2.0, 50.0]), torch.tensor([True, True, False]))
    sums.mean("m", torch.tensor([6.0]), torch.tensor([True]))
    sums.mean("m", torch.tensor([7.0]), torch.tensor([False]))
    assert sums.results() == {"m": 3.0}


def test_masked_values_may_hold_anything():
    sums = MetricSums()
    values, mask = torch.tensor([1.0, float("nan"), float("inf")]), torch.tensor([True, False, False])
    sums.mean("mean", values, mask)
    sums.maximum("max", values, mask)
    assert sums.results() == {"mean": 1.0, "max": 1.0}


def test_nothing_counted_is_left_out():
    """A mean over nothing is no number; 0 would look like one."""
    sums = MetricSums()
    sums.mean("mean", torch.tensor([1.0]), torch.tensor([False]))
    sums.maximum("max", torch.tensor([1.0]), torch.tensor([False]))
    assert sums.results() == {}


def test_sums_in_fp64_and_holds_no_graph():
    sums = MetricSums()
    value = torch.tensor(1.0, requires_grad=True)
    for _ in range(3):
        sums.total("loss", value * 2**24)
    sums.total("loss", value)
    assert sums.results() == {"loss": 3 * 2**24 + 1.0}
    assert not any(total.requires_grad for total in sums._totals.values())
