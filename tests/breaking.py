"""Runs that break off on purpose, and whether two runs are the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from quartet.observe.trackers import read_metrics


def fails_at(call: int, reward: Callable[..., Any]) -> Callable[..., Any]:
    """The reward, whose server is gone from its ``call``-th call on (the first is 1)."""
    calls = 0

    @wraps(reward)
    def failing(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= call:
            raise ConnectionError("the server is gone")
        return reward(*arguments, **named)

    return failing


def break_at(update: int, engine: Any) -> None:
    """The engine raises in its ``update``-th call of ``train_step`` (the first is 1)."""
    step, calls = engine.train_step, 0

    def breaks(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == update:
            raise RuntimeError("broken on purpose")
        return step(*arguments, **options)

    engine.train_step = breaks


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Equal bits."""
    expected = other.state_dict()
    return all(torch.equal(values, expected[name]) for name, values in one.state_dict().items())


def untimed_rows(run: Path) -> list[dict[str, float]]:
    """The metrics of a run without those that no two runs have in common: seconds, memory, what a restart computes."""
    timed = ("time", "throughput/", "memory/", "rollout/tokens_per_s", "overlap/", "rollout/prefill")
    rows = read_metrics(run / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in rows]
