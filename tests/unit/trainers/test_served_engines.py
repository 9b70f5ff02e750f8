"""Engines apart from the trainer's process: the training of a run with them is that of one without, to the bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.config.algorithms import GRPO, KLConfig
from quartet.config.common import CheckpointConfig, LogConfig, SamplingConfig, TrainConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.recipe import ActorConfig, EvaluationConfig, RLRecipe, RolloutConfig
from quartet.observe.trackers import read_metrics
from quartet.trainers.rl import RLTrainer

NOT_NUMBERS = ("throughput/", "time/", "memory/", "rollout/", "overlap/", "handover/", "time_s", "engine/")
BIG = 10**9
ROLES = ["actor", "reference", "rollout"]
PLACEMENTS: dict[str, Any] = {
    "shared": None,
    "separated": {"type": "separated", **{role: {} for role in ROLES}},
    "full_offload": {"type": "full_offload", "pool": {"budget_bytes": BIG}},
    "pipelined": {
        "type": "pipelined",
        "pools": {"engine": {"roles": ["rollout"]}, "models": {"roles": ["actor", "reference"]}},
    },
}


def recipe(path: Path, *, process: bool, **changes: Any) -> RLRecipe:
    values: dict[str, Any] = {
        "algorithm": GRPO(kl=KLConfig(coef=0.05)),
        "actor": ActorConfig(train=TrainConfig(token_budget=512, forward_token_budget=512)),
        "rollout": RolloutConfig(
            sampling=SamplingConfig(max_new_tokens=8), engine=NativeEngineConfig(max_running=6, process=process)
        ),
        "evaluation": EvaluationConfig(every_steps=2, sampling=SamplingConfig(temperature=0.0, max_new_tokens=4)),
        "steps": 3,
        "prompts_per_step": 4,
        "responses_per_prompt": 4,
        "chunk_size": 2,
        "numerics": "exact",
        "output_dir": str(path),
        "log": LogConfig(tensorboard=False),
        "checkpoint": CheckpointConfig(every_steps=1),
    }
    return RLRecipe(**{**values, **changes})


def numbers(path: Path) -> list[dict[str, Any]]:
    rows = read_metrics(path / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(NOT_NUMBERS)} for row in rows]


@pytest.fixture
def trainer(causal_lm: Any, tokenizer: Any, prompts: Any, digits: Any, tmp_path: Path) -> Callable[..., RLTrainer]:
    def make(name: str, *, process: bool = True, resume: bool = False, **changes: Any) -> RLTrainer:
        objects = {"model": causal_lm(), "tokenizer": tokenizer, "rewards": [digits], "prompts": prompts}
        return RLTrainer(
            recipe(tmp_path / name, process=process, **changes),
            evaluation_prompts=prompts[:2],
            resume=resume,
            **objects,
        )

    return make


def trained(trainer: RLTrainer) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    result = trainer.train()
    return numbers(trainer.path), [tensor.clone() for tensor in result.model.state_dict().values()]


def assert_equal(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def test_every_placement_trains_as_with_the_engine_in_the_process(trainer: Callable[..., RLTrainer]) -> None:
    here = trained(trainer("here", process=False))
    for name, placement in PLACEMENTS.items():
        began = time.time()
        assert_equal(trained(trainer(name, placement=placement)), here)
        print(name, time.time() - began)
