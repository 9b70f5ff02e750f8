"""What vLLM is started with: adapters, several workers, the real model, and what it cannot serve."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quartet.config import UserError
from quartet.rollout.process import EngineProcess
from quartet.rollout.protocol import EngineFailed
from quartet.rollout.staging import StagedWeights
from quartet.weights.sink import write_weights

TOLERANCE = 1e-4


def test_the_real_stories_model(start: Callable[..., Any], stories: Path) -> None:
    """Its heads of 8 are padded to 32: the text stays the story that it was."""
    sides = start(path=stories)
    prompt = (1, *range(300, 330))
    requests = [*sides.requests(6, prompt, max_new_tokens=100), *sides.requests(1, prompt, temperature=0.0)]
    assert sides.error(sides.generate(requests), requests) < TOLERANCE
    for _ in range(3):
        sides.change(0.01)
        requests = sides.requests(6, prompt)
        assert sides.error(sides.generate(requests), requests) < TOLERANCE


def test_two_workers_share_a_model(start: Callable[..., Any]) -> None:
    """Every worker takes an update, in the middle of what runs."""
    before = set(os.listdir("/dev/shm"))
    sides = start(tensor_parallel_size=2)
    for _ in range(3):
        running = sides.requests(4, max_new_tokens=300)
        sides.router.submit(running)
        while not sides.router.generated([running[0].request_id]):
            early = sides.router.completed(0.01)
            assert not early, "they ended before the update: this machine is too busy to look in between"
        sides.change()
        ended: dict[str, Any] = {}
        while len(ended) < len(running):
            ended |= {completion.request_id: completion for completion in sides.router.completed(1.0)}
        assert all(len(completion.token_ids) == 300 for completion in ended.values())
        requests = sides.requests(6)
        assert sides.error(sides.generate(requests), requests) < TOLERANCE
    sides.router.close()
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.parametrize("head_size", [8, 32])
def test_adapters_alone(save_model: Any, start: Callable[..., Any], tmp_path: Path, head_size: int) -> None:
    path = save_model(tmp_path, head_size=head_size)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).requires_grad_(False)
    layers = {name: module for name, module in plain.named_modules() if name.endswith("_proj")}
    factors = {
        f"{name}.lora_{factor}.default.weight": torch.zeros(shape)
        for name, layer in layers.items()
        for factor, shape in (("A", (4, layer.in_features)), ("B", (layer.out_features, 4)))
    }
    sides = start(path=path, sent=factors, lora={"rank": 4, "alpha": 6.0})

    def add_products() -> None:
        for name, layer in layers.items():
            a, b = (factors[f"{name}.lora_{factor}.default.weight"] for factor in "AB")
            sides.model.get_submodule(name).weight.copy_(layer.weight + 6.0 / 4 * b @ a)

    sides.changed = add_products
    for size in (0.0, 0.1, 0.1, 0.1):
        sides.change(size)
        requests = sides.requests(6)
        before = sides.error(sides.generate(requests), requests)
        assert before < TOLERANCE
    running = sides.requests(2, max_new_tokens=LONG)
    sides.router.submit(running)
    sides.change(0.1)
    assert {c.versions[-1] for c in sides.generate(requests)} == {sides.version}
    sides.router.close()


LONG = 430


@pytest.mark.parametrize(
    ("kwargs", "found"),
    [
        ({"max_model_len": 4096}, "max_model_len"),
        ({"cache_bytes": 1 << 50}, "memory"),
        ({"engine_args": {"logprobs_mode": "raw_logprobs"}}, "logprobs_mode"),
        ({"engine_args": {"async_scheduling": True}}, "async_scheduling"),
        ({"engine_args": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size"),
        ({"engine_args": {"data_parallel_size": 2}}, "data_parallel_size"),
        ({"engine_args": {"speculative_config": {"method": "ngram"}}}, "speculative_config"),
        ({"engine_args": {"no_such_argument": 1}}, "no_such_argument"),
        ({"lora": {"rank": 1024, "alpha": 1.0}}, "rank"),
    ],
)
def test_settings_that_do_not_fit(
    save_model: Any, engine_spec: Any, tmp_path: Path, kwargs: dict[str, Any], found: str
) -> None:
    engine = EngineProcess(engine_spec(save_model(tmp_path), **kwargs))
    with pytest.raises(UserError, match=found):
        engine.wait_ready()
    engine.close()


def test_heads_that_cannot_be_padded(save_model: Any, engine_spec: Any, tmp_path: Path) -> None:
    path = save_model(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    engine = EngineProcess(engine_spec(path))
    with pytest.raises(UserError, match="heads of 8 in a model of type 'qwen2'"):
        engine.wait_ready()
    engine.close()


def test_another_version_of_vllm_is_refused_with_the_range(save_model: Any, engine_spec: Any, tmp_path: Path) -> None:
    """As pip would have installed it: only what the package says of itself is there."""
    said = tmp_path / "site" / "vllm-0.10.1.dist-info"
    said.mkdir(parents=True)
    (said / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.10.1\n")
    spec = engine_spec(save_model(tmp_path / "model"))
    engine = EngineProcess(replace(spec, environment={**spec.environment, "PYTHONPATH": str(said.parent)}))
    with pytest.raises(UserError, match=r"0\.10\.1") as refusal:
        engine.wait_ready()
    assert "vllm >= 0.31, < 0.33" in str(refusal.value)
    engine.close()


def test_weights_of_another_model_end_the_engine_before_anything_is_touched(
    save_model: Any, engine_spec: Any, tmp_path: Path
) -> None:
    path, other = save_model(tmp_path / "a"), save_model(tmp_path / "b", tied=False)
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    staging = StagedWeights(list(model.named_parameters()))
    engine = EngineProcess(engine_spec(path, version=None), staging)
    engine.wait_ready() if engine.is_ready() else None
    write_weights(staging.weight_sink(), model.named_parameters(), 1)
    with pytest.raises((EngineFailed, UserError), match=r"unknown name 'lm_head\.weight'"):
        while not engine.is_ready():
            engine.completed(0.2)
        engine.submit([])
    engine.close()
    staging.close()
