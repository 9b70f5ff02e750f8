"""Episodes of several turns by engines elsewhere: tokens, versions, log-probabilities and rewards are those of the
engine in the trainer's process.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.config.algorithms import GRPO
from quartet.config.common import LogConfig, OptimConfig, SamplingConfig, TrainConfig
from quartet.config.engines import EngineConfig, NativeEngineConfig, SGLangEngineConfig
from quartet.config.recipe import ActorConfig, EnvironmentConfig, RLRecipe, RolloutConfig
from quartet.envs.protocol import Item, Observation, StepResult
from quartet.models.packed_model import PackedCausalLM
from quartet.observe.rollouts import RolloutRecord, read_step
from quartet.observe.trackers import read_metrics
from quartet.rollout.engine import NativeEngine
from quartet.text.tokenizer import TextCodec
from quartet.trainers.rl import RLTrainer

servers: Any = importlib.import_module("http_engines")

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

    def trained(name: str, engine: EngineConfig, numerics: str, **more: Any) -> Any:
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
        records = [record for step in range(1, STEPS + 1) for record in read_step(result.path / "rollouts", step)]
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


@pytest.mark.usefixtures("exact_processor")
def test_a_native_engine_in_a_process_to_the_bit(run: Any) -> None:
    here, here_model, _ = run("here", NativeEngineConfig(max_running=5), "exact")
    there, there_model, rows = run("there", NativeEngineConfig(max_running=5, process=True), "exact")
    check_episodes(here)
    assert there == here
    assert all(torch.equal(a, b) for a, b in zip(here_model.parameters(), there_model.parameters(), strict=True))
    assert rows[-1]["agreement/logprob_diff_max"] == 0.0


def test_servers_that_are_asked_over_http(run: Any, causal_lm: Any, tokenizer: Any) -> None:
    """Their arithmetic is not that of another batch to the last bit; tokens are drawn with the same numbers, as long as
    nothing breaks requests off: rollout has a pool of its own.
    """
    placement = {"type": "separated", "actor": {}, "rollout": {}}
    here, _, _ = run("here", NativeEngineConfig(max_running=5), "fast", placement=placement)
    codec, made = TextCodec.of(tokenizer), []
    with ExitStack() as opened:
        for seed in (1, 2):
            packed = PackedCausalLM(causal_lm(seed))
            inside = NativeEngine(packed, owns_weights=True, decode=codec.decode_completion, version=0, max_running=5)
            server = servers.SGLangServer(inside, packed.model.config.max_position_embeddings)
            made.append((opened.enter_context(servers.sglang_server(server)), server))
        engine = SGLangEngineConfig(urls=tuple(url for url, _ in made), weights="distributed", lease_s=60.0)
        there, model, rows = run("there", engine, "fast", placement=placement)
    check_episodes(here)
    assert [said(record) for record in there] == [said(record) for record in here]
    for one, other in zip(there, here, strict=True):
        logprobs = [torch.tensor(record.columns["rollout_logprobs"]) for record in (one, other)]
        torch.testing.assert_close(*logprobs, atol=1e-4, rtol=0)
        assert one.rewards == other.rewards
    assert rows[-1]["agreement/canary_diff"] < 1e-5
    for _, server in made:
        assert int(server.weight_version) == STEPS
        own = dict(server.engine.packed.model.named_parameters())
        assert all(torch.equal(own[name], value) for name, value in model.named_parameters())
    # An episode's turns are asked where its earlier ones were, with all of their tokens.
    asked = [[body["input_ids"] for path, body in server.asked if path == "/generate"] for _, server in made]
    longest = max((ids for of_one in asked for ids in of_one), key=len)
    assert any(longest[: len(ids)] == ids and len(ids) < len(longest) for of_one in asked for ids in of_one)
