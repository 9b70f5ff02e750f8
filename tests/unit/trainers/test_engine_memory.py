"""A policy that no engine process can hold is refused before it is loaded, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from quartet.config import UserError
from quartet.config.load import load_recipe
from quartet.config.recipe import RLRecipe
from quartet.trainers import devices
from quartet.trainers.devices import check_engine_fits
from quartet.trainers.model_loader import ModelLoader, UserObjects
from quartet.trainers.workers import PoolWorker, placement_of

CPU = torch.device("cpu")
TOKENS = 12
PER_TOKEN = 2 * 3 * 2 * 8
"""Keys and values, layers, key/value heads, numbers of a head."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    """A directory and the model's weights; embedding and head are one tensor."""
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    made = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads))
    made.save_pretrained(path)
    return str(path), sum(parameter.numel() for parameter in made.parameters())


def recipe(*overrides: str) -> RLRecipe:
    found = load_recipe("rl", None, [f"rollout.sampling.max_new_tokens={TOKENS}", *overrides])
    assert isinstance(found, RLRecipe)
    return found


@pytest.mark.parametrize(
    ("overrides", "cache"),
    [
        ((), 4 * TOKENS * PER_TOKEN),
        (("rollout.engine.cache_tokens=100",), 4 * 100 * PER_TOKEN),
        (("rollout.engine.cache_tokens=100", "actor.train.precision=bf16"), 2 * 100 * PER_TOKEN),
    ],
)
def test_the_least_that_it_needs(
    model: tuple[str, int], overrides: tuple[str, ...], cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, num_weights = model
    needed = 4 * num_weights + cache
    monkeypatch.setattr(devices, "total_bytes", lambda: 10 * needed)
    monkeypatch.setattr(devices, "available_bytes", lambda: needed)
    check_engine_fits(recipe(*overrides), path, CPU, processes=10)
    with pytest.raises(UserError, match="for each of 11 processes"):
        check_engine_fits(recipe(*overrides), path, CPU, processes=11)
    monkeypatch.setattr(devices, "available_bytes", lambda: needed - 1)
    with pytest.raises(UserError, match="divides a model over devices"):
        check_engine_fits(recipe(*overrides), path, CPU)


def test_of_a_gpu_its_whole_memory_counts(model: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    path, num_weights = model
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 4 * num_weights))
    with pytest.raises(UserError) as caught:
        check_engine_fits(recipe("actor.train.precision=fp32"), path, torch.device("cuda", 1), processes=8)
    assert "cuda:1 has" in caught.value.found and "processes" not in caught.value.found


def test_a_process_of_ray_looks_before_it_loads(
    model: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process with the engine, and no other."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "available_bytes", lambda: 10)
    monkeypatch.setattr(ModelLoader, "actor_model", property(lambda loader: pytest.fail("it was loaded")))
    pools = "placement={type: separated, actor: {}, rollout: {}, reference: {}}"
    of = recipe(f"actor.model.path={model[0]}", "algorithm.name=grpo", "algorithm.kl.coef=0.1", pools)
    placement = placement_of(of, UserObjects())
    with pytest.raises(UserError, match="no process of the native rollout engine can hold"):
        PoolWorker(of, UserObjects(), placement, "rollout", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match="it was loaded"):
        PoolWorker(of, UserObjects(), placement, "actor", str(tmp_path))
