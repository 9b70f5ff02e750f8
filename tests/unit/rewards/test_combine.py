"""Several sources, one reward: weights and gates on numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from quartet.config.rewards import GateConfig
from quartet.rewards.source import RewardWeights, combine, effective_weights, source_metrics

NAN = math.nan


def reward(weights: Any, gates: dict[str, GateConfig] | None = None, **scores: list[float]) -> list[float | None]:
    tensors = {name: torch.tensor(values) for name, values in scores.items()}
    total, applies = combine(tensors, RewardWeights(weights, gates or {}))
    assert total.dtype == torch.float64
    return [float(t) if a else None for t, a in zip(total, applies, strict=True)]


def test_weighted_sum_of_what_applies() -> None:
    found = reward({"a": 1.0, "b": -0.5}, a=[1.0, NAN, 2.0, NAN], b=[2.0, 4.0, NAN, NAN])
    assert found == [0.0, -2.0, 2.0, None]
    tensors = {"a": torch.tensor([1.0, NAN])}
    assert combine(tensors, {"a": 2.0})[0].tolist() == [2.0, 0.0], "plain weights have no gates"


def test_behind_a_closed_gate_a_source_adds_nothing() -> None:
    gates = {"style": GateConfig(source="right", at_least=0.5)}
    found = reward({"right": 1.0, "style": 2.0}, gates, right=[1.0, 0.5, 0.4, 0.0], style=[3.0, 3.0, 3.0, NAN])
    assert found == pytest.approx([7.0, 6.5, 0.4, 0.0])


def test_where_the_gates_source_has_no_score_the_gated_one_has_none() -> None:
    gates = {"style": GateConfig(source="right", at_least=0.5, otherwise=-1.0)}
    assert reward({"right": 1.0, "style": 1.0}, gates, right=[NAN], style=[3.0]) == [None]
    assert reward({"right": 1.0, "style": 1.0, "len": 1.0}, gates, right=[NAN], style=[3.0], len=[0.2]) == (
        pytest.approx([0.2])
    )


def test_otherwise_replaces_the_whole() -> None:
    gates = {"right": GateConfig(source="format", at_least=1.0, otherwise=-1.0)}
    weights = {"format": 0.1, "right": 1.0, "len": 5.0}
    found = reward(weights, gates, format=[1.0, 0.0, 0.0], right=[1.0, 1.0, NAN], len=[1.0, 1.0, 1.0])
    assert found == pytest.approx([6.1, -1.0, 5.0]), "where the gated source does not apply its gate is not asked"


def test_of_two_closed_gates_the_first_decides() -> None:
    gates = {
        "b": GateConfig(source="a", at_least=1.0, otherwise=-2.0),
        "c": GateConfig(source="a", at_least=2.0, otherwise=-3.0),
    }
    weights = {"a": 1.0, "b": 1.0, "c": 1.0}
    assert reward(weights, gates, a=[0.0, 1.0, 2.0], b=[1.0] * 3, c=[1.0] * 3) == [-2.0, -3.0, 4.0]


def test_a_gate_looks_at_the_score_before_weights_and_gates() -> None:
    gates = {"b": GateConfig(source="a", at_least=1.0), "c": GateConfig(source="b", at_least=1.0)}
    assert reward({"a": 0.0, "b": 1.0, "c": 1.0}, gates, a=[0.0], b=[1.0], c=[5.0]) == [5.0]


def test_effective_weights_say_what_counts() -> None:
    gates = {"b": GateConfig(source="a", at_least=1.0, otherwise=-1.0)}
    scores = {"a": torch.tensor([1.0, 0.0, NAN]), "b": torch.tensor([1.0, 1.0, 1.0])}
    found = effective_weights(scores, RewardWeights({"a": 0.5, "b": 2.0}, gates))
    assert found["a"].nan_to_num(nan=9.0).tolist() == [0.5, 0.0, 9.0]
    assert found["b"].nan_to_num(nan=9.0).tolist() == [2.0, 0.0, 9.0]


def test_metrics_of_sources() -> None:
    gates = {"b": GateConfig(source="a", at_least=1.0)}
    scores = {"a": torch.tensor([1.0, 0.0, NAN]), "b": torch.tensor([1.0, 3.0, 5.0])}
    weights = RewardWeights({"a": 1.0, "b": 1.0}, gates)
    assert source_metrics(scores, weights, {"a": torch.tensor([0.0, 0.0, 1.0])}) == {
        "reward/a": 0.5,
        "reward/a/left_out": 1.0,
        "reward/b": 3.0,
        "reward/b/gate_open": pytest.approx(2 / 3),
    }
    nothing = {"a": torch.tensor([NAN]), "b": torch.tensor([NAN])}
    assert source_metrics(nothing, weights, {}) == {}
