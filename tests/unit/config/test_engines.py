"""``rollout.engine`` and its like: a choice by ``type``, each with its own keys, native where nothing is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quartet.config import UserError
from quartet.config.engines import (
    NativeEngineConfig,
    VLLMEngineConfig,
    is_served,
)
from quartet.config.load import dump_recipe, load_recipe
from quartet.config.recipe import RLRecipe


def engine(*overrides: str, job: str = "rl") -> Any:
    recipe: Any = load_recipe(job, None, overrides)
    return recipe.rollout.engine if job == "rl" else recipe.engine


def test_native_is_the_engine_of_whom_says_nothing() -> None:
    assert engine() == NativeEngineConfig()
    assert engine("rollout.engine.max_running=3") == NativeEngineConfig(max_running=3)
    assert engine("rollout.engine={process: true, stall_timeout_s: 9}") == NativeEngineConfig(
        process=True, stall_timeout_s=9
    )
    assert engine("engine.max_running=3", job="eval") == NativeEngineConfig(max_running=3)


def test_each_kind_has_its_own_keys_and_survives_a_file(tmp_path: Path) -> None:
    recipe = load_recipe("rl", None, ["rollout.engine={type: vllm, engines: 2, engine_args: {seed: 1}}"])
    assert isinstance(recipe, RLRecipe)
    assert recipe.rollout.engine == VLLMEngineConfig(engines=2, engine_args={"seed": 1})
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    assert load_recipe("rl", tmp_path / "recipe.yaml") == recipe


def test_which_engines_compute_apart_from_the_process() -> None:
    assert not is_served(NativeEngineConfig())
    assert is_served(NativeEngineConfig(process=True))
    assert is_served(VLLMEngineConfig())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.max_running=8"], "did you mean rollout.engine.max_running?"),
        (["rollout.steps_per_lease=8"], "did you mean rollout.engine.steps_per_lease?"),
        (["rollout.engine=native"], "set rollout.engine.type to one of native"),
        (["rollout.engine.type=vlm"], "did you mean 'vllm'?"),
        (["rollout.engine={type: vllm, cache_tokens: 3}"], "unknown key 'cache_tokens'"),
        (["rollout.engine.type=vllm", "numerics=exact"], "exact is the native engine's"),
    ],
)
def test_mistakes_are_told_with_the_place_that_is_meant(overrides: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe("rl", None, overrides)
    assert said in f"{caught.value.found} {caught.value.remedy}"


def test_the_old_key_of_an_evaluation_is_told_where_it_is_now() -> None:
    with pytest.raises(UserError, match=r"did you mean engine\.max_running"):
        load_recipe("eval", None, ["max_running=8"])


def test_servers_with_one_model_do_not_answer_for_two() -> None:
    server = "engine={type: server, urls: ['http://h:1'], model: m}"
    with pytest.raises(UserError) as caught:
        load_recipe("eval", None, [server, "compare.model=other"])
    assert "would answer for compare.model" in f"{caught.value.found} {caught.value.remedy}"


@pytest.mark.parametrize("recipe", ["story-ppo", "story-grpo", "story-rloo"])
def test_a_recipe_of_the_native_engine_works_with_vllm(recipe: str) -> None:
    path = Path(__file__).parents[3] / "recipes" / f"{recipe}.yaml"
    native = load_recipe("rl", path)
    other = load_recipe("rl", path, ["rollout.engine.type=vllm"])
    assert (other.rollout.engine.type, other.rollout.engine.max_num_seqs) == ("vllm", native.rollout.engine.max_running)
    with pytest.raises(UserError, match="unknown key 'max_running'"):
        load_recipe("rl", path, ["rollout.engine={type: vllm, max_num_seqs: 4, max_running: 8}"])
