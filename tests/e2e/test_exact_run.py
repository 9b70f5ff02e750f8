"""Runs with ``numerics: exact``: what was sampled is what is trained on, to the bit, in every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quartet.models.attention import AttentionParams
from quartet.observe.trackers import read_metrics
from quartet.rollout import step_attention


def steps(world: Any, name: str) -> list[dict[str, float]]:
    rows = read_metrics(world.path / "runs" / name / "metrics.jsonl")
    return [row for row in rows if "agreement/logprob_diff_max" in row]


@pytest.mark.usefixtures("exact_processor")
def test_log_probabilities_agree_exactly_and_first_ratios_are_one(
    world: Any, recipes: Any, quartet: Callable[..., Any]
) -> None:
    name = "exact-grpo"
    content = recipes["rl"]("grpo", numerics="exact", minibatches=1, steps=3, output_dir=f"runs/{name}")
    outcome = quartet("rl", world.recipe(name, content))
    assert outcome.status == 0, outcome.err
    rows = steps(world, name)
    assert len(rows) == 3
    for row in rows:
        assert row["agreement/logprob_diff_max"] == 0.0
        assert row["policy/ratio_max"] == row["policy/ratio_mean"] == 1.0
        assert row["policy/clip_frac"] == 0.0
        assert row["policy/approx_kl"] == 0.0
    assert all(row["agreement/canary_diff"] == 0.0 for row in rows if "agreement/canary_diff" in row)
    assert any("agreement/canary_diff" in row for row in rows)


@pytest.mark.usefixtures("exact_processor")
def test_ppo_with_mini_batches_and_epochs_agrees_exactly(world: Any, recipes: Any, quartet: Callable[..., Any]) -> None:
    """Old log-probabilities come from forward passes of their own here; the reference starts as the actor."""
    content = recipes["rl"]("ppo", numerics="exact", steps=3, output_dir="runs/exact-ppo")
    outcome = quartet("rl", world.recipe("exact-ppo", content))
    assert outcome.status == 0, outcome.err
    rows = steps(world, "exact-ppo")
    assert [row["agreement/logprob_diff_max"] for row in rows] == [0.0] * len(rows)
    assert len(rows) == 3
    assert rows[0]["kl/ref"] == 0.0


@pytest.mark.usefixtures("exact_processor")
def test_an_engine_that_computes_otherwise_shows_in_the_metrics(
    world: Any, recipes: Any, quartet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_row(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, rule: AttentionParams
    ) -> torch.Tensor:
        scores = q.unsqueeze(2) @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * rule.scaling
        weights = (scores + mask).softmax(-1)
        return (weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)).squeeze(2)

    monkeypatch.setattr(step_attention, "decode_attention", one_row)
    content = recipes["rl"]("grpo", numerics="exact", minibatches=1, steps=2, output_dir="runs/exact-fault")
    outcome = quartet("rl", world.recipe("exact-fault", content))
    assert outcome.status == 0, outcome.err
    assert all(0.0 < row["agreement/logprob_diff_max"] < 1e-4 for row in steps(world, "exact-fault"))
