"""Runs of episodes of several turns, for tests that compare engines elsewhere with one in the process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.config.algorithms import GRPO
from quartet.config.common import OptimConfig, SamplingConfig, TrainConfig
from quartet.config.recipe import ActorConfig, EnvironmentConfig, RLRecipe, RolloutConfig
from quartet.config.run import LogConfig
from quartet.envs.protocol import Item, Observation, StepResult
from quartet.observe.rollouts import RolloutRecord, read_rollout_step
from quartet.observe.trackers import read_metrics
from quartet.trainers.rl import RLTrainer

STEPS = 2


class Conversation:
    """Three turns, each observation a function of all that was said; the last one rewrites the state."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def reset(self, item: Item) -> str:
        return f"{item.prompt}"

    async def step(self, action: str) -> StepResult:
        self.said.append(action)
        number = sum(character.isdigit() for character in "".join(self.said))
        if len(self.said) == 3:
            return StepResult(None, number / 12, done=True)
        return StepResult(Observation(f"+{number}", rewrites=len(self.said) == 2), number / 100)


@pytest.fixture
def run(
    causal_lm: Any, tokenizer: Any, prompts: Any, tmp_path: Path
) -> Callable[..., tuple[list[RolloutRecord], dict[str, torch.Tensor], list[dict[str, float]]]]:
    """All records in order, the trained weights, and the figures of the steps."""

    def trained(name: str, engine: Any, numerics: str, **more: Any) -> Any:
        recipe = RLRecipe(
            output_dir=str(tmp_path / name),
            algorithm=GRPO(),
            actor=ActorConfig(train=TrainConfig(optim=OptimConfig(lr=1e-2))),
            environment=EnvironmentConfig(max_turns=3, max_tokens=60),
            rollout=RolloutConfig(sampling=SamplingConfig(max_new_tokens=4), engine=engine),
            steps=STEPS,
            prompts_per_step=4,
            responses_per_prompt=3,
            chunk_size=2,
            numerics=numerics,
            threads=1,
            log=LogConfig(tensorboard=False),
            **more,
        )
        objects = {"model": causal_lm(), "tokenizer": tokenizer, "prompts": prompts}
        result = RLTrainer(recipe, environment=Conversation, **objects).train()
        records = [
            record for step in range(1, STEPS + 1) for record in read_rollout_step(result.path / "rollouts", step)
        ]
        rows = [row for row in read_metrics(result.path / "metrics.jsonl") if "policy_version" in row]
        return sorted(records, key=lambda record: (record.policy_version, record.sequence_id)), result.model, rows

    return trained


def said(record: RolloutRecord) -> Any:
    """All that no float is in."""
    columns = {k: v for k, v in record.columns.items() if k in ("policy_version", "observation_mask")}
    return json.dumps(
        [record.sequence_id, record.part, record.policy_version, record.prompt_ids, record.response_ids,
         record.finish_reason, columns]
    )  # fmt: skip


def check_episodes(records: list[RolloutRecord]) -> None:
    """That there is something to compare."""
    assert {record.policy_version for record in records} == set(range(STEPS))
    assert {record.part for record in records} == {0, 1}
    assert any(1 in record.columns["observation_mask"] for record in records), "a turn after an observation"
    assert len({tuple(record.response_ids) for record in records}) > len(records) / 2
