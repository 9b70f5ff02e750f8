"""The evaluation sections: defaults, and what does not fit together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quartet.config.common import SamplingConfig
from quartet.config.errors import UserError
from quartet.config.evaluation import EvalRecipe, EvaluationConfig, GradingConfig
from quartet.config.load import dump_recipe, load_recipe
from quartet.config.recipe import RLRecipe, RolloutConfig

EVAL = ["model.path=m", "data.path=d.jsonl"]
JUDGE = "{type: judge, url: 'http://x/v1', model: j, method: {name: pairwise}}"


def complaint(job: str, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        load_recipe(job, None, overrides)
    return caught.value


def test_ks_follow_the_number_of_samples() -> None:
    grading = GradingConfig()
    assert grading.passes(1) == () and grading.passes(4) == (4,)
    assert grading.majorities(2) == (), "a vote of two cannot decide anything but agreement"
    assert grading.majorities(4) == (4,)
    assert GradingConfig(pass_at=(1, 2), majority_at=()).passes(4) == (1, 2)
    assert GradingConfig(majority_at=()).majorities(4) == ()


def test_keys_of_training_are_refused_where_they_had_no_effect() -> None:
    for job, place in (("rl", "evaluation."), ("eval", "")):
        refused = complaint(job, f"{place}sampling.truncated_logprobs=true")
        assert "sampling.truncated_logprobs is for rollouts that are trained on" in refused.found, job


HELD_OUT = ["actor.model.path=m", "data.path=d", "rewards.0.type=exact_match", "evaluation.data.path=e"]


def loaded(*overrides: str) -> RLRecipe:
    recipe = load_recipe("rl", None, [*HELD_OUT, *overrides])
    assert isinstance(recipe, RLRecipe)
    return recipe


def test_evaluation_is_watched_and_asks_once_unless_said_otherwise() -> None:
    evaluation = loaded().held_out
    assert evaluation.samples_per_prompt == 1
    assert evaluation.alarm is not None and evaluation.alarm.false_alarm_rate == 0.01
    assert loaded("evaluation.alarm=null").held_out.alarm is None


@pytest.mark.parametrize("name", sorted(set(SamplingConfig.model_fields) - {"truncated_logprobs"}))
def test_evaluation_samples_as_training_does_in_every_key_that_is_not_set(name: str) -> None:
    other = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "max_new_tokens": 24, "draw": "gumbel"}
    values = {**other, "stop_strings": ["\n\n"]}
    training = [f"rollout.sampling.{key}={json.dumps(value)}" for key, value in values.items()]
    assert loaded(*training).held_out.sampling == loaded(*training).rollout.sampling
    own = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_new_tokens": 99, "draw": "inverse"}
    value = {**own, "stop_strings": []}[name]
    said = loaded(*training, f"evaluation.sampling.{name}={json.dumps(value)}").held_out.sampling
    assert json.loads(said.model_dump_json()) == {**values, name: value, "truncated_logprobs": False}


def test_python_and_recipes_that_come_back_sample_as_training_too(tmp_path: Path) -> None:
    short = RolloutConfig(sampling=SamplingConfig(max_new_tokens=24, top_k=5, truncated_logprobs=True))
    greedy = EvaluationConfig(sampling=SamplingConfig(temperature=0.0))
    recipe = RLRecipe(rollout=short, evaluation=greedy)
    expected = SamplingConfig(temperature=0.0, max_new_tokens=24, top_k=5)
    assert recipe.held_out.sampling == expected
    assert RLRecipe(rollout=short).held_out.sampling == SamplingConfig(max_new_tokens=24, top_k=5), "prompts of Python"
    assert recipe.model_copy(update={"rollout": RolloutConfig()}).held_out.sampling == SamplingConfig(temperature=0.0)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    again = load_recipe("rl", tmp_path / "recipe.yaml", ["rollout.sampling.max_new_tokens=48"])
    assert isinstance(again, RLRecipe) and again.held_out.sampling == expected, "a saved recipe says every key"


def test_a_whole_eval_recipe_loads_and_comes_back() -> None:
    recipe = load_recipe(
        "eval",
        None,
        [
            *EVAL,
            "samples_per_prompt=8",
            "sampling.temperature=0.7",
            "grading.pass_at=[1,4]",
            "grading.answer={type: regex, pattern: 'answer: (.*)'}",
            "compare.model=other",
            "compare.tie_margin=0.5",
        ],
    )
    assert isinstance(recipe, EvalRecipe)
    assert recipe.sampling.max_new_tokens == 128 and recipe.compare is not None
    assert EvalRecipe.model_validate_json(recipe.model_dump_json()) == recipe
    assert "tie_margin: 0.5" in dump_recipe(recipe)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["samples_per_prompt=4"], "sampling.temperature is 0"),
        (
            ["rewards=[{type: model, path: m, sharding: {tensor: 2}}]"],
            "rewards.0.sharding.tensor is 2, but the model has 1 process",
        ),
        (["samples_per_prompt=4", "sampling.temperature=1", "grading.pass_at=[8]"], "grading.pass_at has 8"),
        (["grading.majority_at=[0]"], "grading.majority_at has 0"),
        (["grading.answer={type: regex, pattern: '('}"], "not a regular expression"),
        (["compare.modle=x"], "modle"),
        (["grading.answer.type=numbr"], "numbr"),
        (["compare={model: m, judge: {type: judge, url: 'http://x/v1', model: j}}"], "pairwise"),
        ([f"compare={{model: m, source: s, judge: {JUDGE}}}"], "give one of them"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(overrides: list[str], part: str) -> None:
    assert part in str(complaint("eval", *EVAL, *overrides))


def test_the_same_holds_for_evaluation_during_training() -> None:
    with pytest.raises(UserError, match=r"sampling\.temperature is 0"):
        EvaluationConfig(samples_per_prompt=2, sampling=SamplingConfig(temperature=0.0))
