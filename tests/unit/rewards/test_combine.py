"""Several sources, one reward: weights on numbers worked out by hand."""

from __future__ import annotations

import math

import torch

from quartet.rewards.source import combine_scores, source_metrics

NAN = math.nan


def reward(weights: dict[str, float], **scores: list[float]) -> list[float | None]:
    tensors = {name: torch.tensor(values) for name, values in scores.items()}
    total, applies = combine_scores(tensors, weights)
    assert total.dtype == torch.float64
    return [float(t) if a else None for t, a in zip(total, applies, strict=True)]


def test_weighted_sum_of_what_applies() -> None:
    found = reward({"a": 1.0, "b": -0.5}, a=[1.0, NAN, 2.0, NAN], b=[2.0, 4.0, NAN, NAN])
    assert found == [0.0, -2.0, 2.0, None]


def test_metrics_of_sources() -> None:
    scores = {"a": torch.tensor([1.0, 0.0, NAN]), "b": torch.tensor([1.0, 3.0, 5.0])}
    weights = {"a": 1.0, "b": 1.0}
    assert source_metrics(scores, weights, {"a": torch.tensor([0.0, 0.0, 1.0])}) == {
        "reward/a": 0.5,
        "reward/a/left_out": 1.0,
        "reward/b": 3.0,
    }
    nothing = {"a": torch.tensor([NAN]), "b": torch.tensor([NAN])}
    assert source_metrics(nothing, weights, {}) == {}
