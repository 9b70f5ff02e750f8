"""Jobs whose answers come from servers: an evaluation, and RL over SGLang's HTTP with weights that really arrive."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.responses import JSONResponse

from quartet.config.algorithms import GRPO
from quartet.config.common import CheckpointConfig, LogConfig, SamplingConfig, TrainConfig
from quartet.config.recipe import ActorConfig, EvaluationConfig, RLRecipe, RolloutConfig
from quartet.extras.servers.config import SGLangEngineConfig
from quartet.models.packed_model import PackedCausalLM
from quartet.observe.trackers import read_metrics
from quartet.rollout.engine import NativeEngine
from quartet.text.tokenizer import TextCodec
from quartet.trainers.rl import RLTrainer

servers: Any = importlib.import_module("http_engines")


@pytest.fixture
def started(causal_lm: Any, tokenizer: Any) -> Iterator[list[Any]]:
    """Two servers with weights of their own, and their addresses."""
    made = []
    with ExitStack() as opened:
        for number in range(2):
            model = causal_lm()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5 + number)
            codec = TextCodec.of(tokenizer)
            inside = NativeEngine(PackedCausalLM(model), owns_weights=True, decode=codec.decode_completion, version=0)
            server = servers.SGLangServer(inside, model.config.max_position_embeddings)
            made.append((opened.enter_context(servers.sglang_server(server)), server))
        yield made


@pytest.mark.parametrize(
    "placement", [None, {"type": "separated", "actor": {}, "rollout": {}}], ids=["shared", "separated"]
)
def test_rl_with_rollouts_of_servers(
    causal_lm: Any, tokenizer: Any, prompts: Any, digits: Any, tmp_path: Path, started: list[Any], placement: Any
) -> None:
    engine = SGLangEngineConfig(urls=tuple(url for url, _ in started), weights_directory=str(tmp_path / "weights"))
    recipe = RLRecipe(
        algorithm=GRPO(),
        actor=ActorConfig(train=TrainConfig(token_budget=512, forward_token_budget=512)),
        rollout=RolloutConfig(sampling=SamplingConfig(max_new_tokens=8), engine=engine),
        evaluation=EvaluationConfig(every_steps=3, sampling=SamplingConfig(temperature=0.0, max_new_tokens=4)),
        steps=3,
        prompts_per_step=4,
        responses_per_prompt=4,
        chunk_size=2,
        placement=placement,
        output_dir=str(tmp_path / "run"),
        log=LogConfig(tensorboard=False),
        checkpoint=CheckpointConfig(every_steps=3),
    )
    _, server = started[0]
    generate, failed = server.generate, []

    async def fails_once(body: Any) -> Any:
        if not failed and body["sampling_params"]["max_new_tokens"] == 8:
            failed.append(True)
            return JSONResponse({"error": "busy"}, 503)
        return await generate(body)

    server.answers["/generate"] = fails_once
    trainer = RLTrainer(
        recipe,
        model=causal_lm(),
        tokenizer=tokenizer,
        rewards=[digits],
        prompts=prompts,
        evaluation_prompts=prompts[:2],
    )
    trained = trainer.train().model
    rows = read_metrics(trainer.path / "metrics.jsonl")
    steps = [row for row in rows if "policy_version" in row]
    assert [row["policy_version"] for row in steps] == [1, 2, 3]
    assert (steps[-1]["engine/retries"], steps[-1]["engine/restarts"]) == (1, 0)
    assert max(row["agreement/canary_diff"] for row in steps) < 1e-5
    assert max(row["agreement/logprob_diff_max"] for row in steps) < 1e-5
    for _, server in started:
        assert int(server.weight_version) == 3
        assert any(path == "/generate" for path, _ in server.asked)
        own = dict(server.engine.packed.model.named_parameters())
        assert all(torch.equal(own[name], value) for name, value in trained.named_parameters())
    assert list((tmp_path / "weights").iterdir()) == []
