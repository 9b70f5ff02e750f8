"""Demonstrations in the actor's updates: which ones, with what effect, and that nothing depends on the prefetching."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from breaking import fails_at
from quartet.config import UserError
from quartet.config.algorithms import GRPO, PPO, KLConfig
from quartet.config.common import CheckpointConfig, OptimConfig, SamplingConfig, TrainConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.recipe import (
    ActorConfig,
    CriticConfig,
    PTXConfig,
    RolloutConfig,
)
from quartet.observe.trackers import read_metrics
from quartet.train.engine import TrainEngine
from quartet.trainers.rl import RLTrainer

MINIBATCHES, EPOCHS, SIZE = 2, 2, 3


def digits_of(completions: list[str], **_: Any) -> list[float]:
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


VALUES: dict[str, Any] = {
    "algorithm": GRPO(),
    "ptx": PTXConfig(coef=0.5, examples_per_minibatch=SIZE),
    "critic": CriticConfig(train=TrainConfig(optim=OptimConfig(lr=1e-2))),
    "rollout": RolloutConfig(sampling=SamplingConfig(max_new_tokens=4), engine=NativeEngineConfig(max_running=8)),
    "steps": 3,
    "prompts_per_step": 4,
    "responses_per_prompt": 3,
    "minibatches": MINIBATCHES,
    "epochs": EPOCHS,
    "checkpoint": CheckpointConfig(every_steps=1),
}


@pytest.fixture
def trainer(tiny_rl: Callable[..., RLTrainer], demonstrations: Any) -> Callable[..., RLTrainer]:
    def make(path: Path, reward: Any = digits_of, *, rows: Any = ..., **changes: Any) -> RLTrainer:
        return tiny_rl(path, reward, ptx_rows=demonstrations if rows is ... else rows, **{**VALUES, **changes})

    return make


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The ids of the demonstrations of every update, in order."""
    seen: list[tuple[str, ...]] = []
    plain = TrainEngine.train_step

    def spy(self: Any, batch: Any, objective: Any, also: Any = (), **options: Any) -> Any:
        seen.extend(term.batch.ids for term in also)
        return plain(self, batch, objective, also, **options)

    monkeypatch.setattr(TrainEngine, "train_step", spy)
    return seen


def model_of(run: RLTrainer) -> dict[str, torch.Tensor]:
    return run.roles.actor.packed.model.state_dict()


def same_weights(one: RLTrainer, other: RLTrainer) -> bool:
    expected = model_of(other)
    return all(torch.equal(values, expected[name]) for name, values in model_of(one).items())


def test_every_update_of_the_actor_sees_its_demonstrations(
    tmp_path: Path, trainer: Callable[..., RLTrainer], mixed: list[tuple[str, ...]]
) -> None:
    used = trainer(tmp_path / "run")
    used.train()
    assert used.roles.ptx is not None
    num = 3 * MINIBATCHES * EPOCHS
    assert mixed == [used.roles.ptx.batch(number).ids for number in range(num)]
    rows = [name.split("@")[0] for ids in mixed for name in ids]
    assert len(set(rows[:24])) == 24, "each of the 24 rows once per pass"
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["data/ptx_epoch"] for row in metrics[1:]] == [n * MINIBATCHES * EPOCHS * SIZE / 24 for n in (1, 2, 3)]
    assert metrics[-1]["loss/ptx"] < metrics[1]["loss/ptx"], "they are learned"
    assert "loss/sft" not in metrics[-1]


def test_what_is_prepared_ahead_changes_no_bit(tmp_path: Path, trainer: Callable[..., RLTrainer]) -> None:
    runs = []
    for ahead in (0, 1, 4):
        ptx = PTXConfig(coef=0.5, examples_per_minibatch=SIZE, prefetch=ahead)
        runs.append(trainer(tmp_path / f"run{ahead}", ptx=ptx))
        runs[-1].train()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]
    assert same_weights(runs[0], runs[1]) and same_weights(runs[0], runs[2])
    plain = trainer(tmp_path / "plain", ptx=None, rows=None)
    plain.train()
    assert not same_weights(plain, runs[0])


@pytest.mark.parametrize("broken", [1, 2, 3])
def test_a_run_that_stops_and_goes_on_ends_with_the_same_bits(
    broken: int, tmp_path: Path, trainer: Callable[..., RLTrainer]
) -> None:
    whole = trainer(tmp_path / "whole")
    whole.train()
    with pytest.raises(UserError, match="server is gone"):
        trainer(tmp_path / "run", fails_at(broken, digits_of)).train()
    other = PTXConfig(coef=0.5, examples_per_minibatch=SIZE, prefetch=0)
    resumed = trainer(tmp_path / "run", resume=True, ptx=other)
    resumed.train()
    assert same_weights(resumed, whole), "also with another prefetch, which may change"


def test_a_resting_actor_sees_none_and_the_critic_never(
    tmp_path: Path, trainer: Callable[..., RLTrainer], mixed: list[tuple[str, ...]]
) -> None:
    train = TrainConfig(optim=OptimConfig(lr=1e-2))
    used = trainer(
        tmp_path / "run",
        algorithm=PPO(kl=KLConfig(coef=0.0)),
        critic=CriticConfig(train=train, warmup_steps=2),
    )
    used.train()
    assert used.roles.ptx is not None
    per_step = MINIBATCHES * EPOCHS
    assert mixed == [used.roles.ptx.batch(number).ids for number in range(2 * per_step, 3 * per_step)]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert ["loss/ptx" in row for row in rows] == [False, False, False, True]
    assert rows[-1]["data/ptx_epoch"] == per_step * SIZE / 24


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"ptx": None}, "ptx_rows without ptx"),
        ({"rows": None}, "ptx.data is missing"),
        ({"rows": [{"prompt": "1+2="}]}, "completion"),
        ({"rows": [{"prompt": "1+2=", "completion": "3" * 99}]}, "allowed 64"),
        ({"actor": ActorConfig(train=TrainConfig(token_budget=24))}, "actor.train.token_budget"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    changes: dict[str, Any], found: str, tmp_path: Path, trainer: Callable[..., RLTrainer], causal_lm: Any
) -> None:
    rows = [{"prompt": "1+2=", "completion": "3" * 30}]
    with pytest.raises(UserError) as raised:
        trainer(tmp_path / "run", **{"rows": rows, **changes})
    assert found in str(raised.value)
    assert not (tmp_path / "run").exists()
