"""`quartet init`: every combination of job, method and reward is a recipe that loads, commented from the keys."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from quartet.config.choices import RewardConfig
from quartet.config.errors import UserError
from quartet.config.load import job_methods, load_recipe
from quartet.config.plugins import recipe_classes
from quartet.config.strict import discriminator_values, union_members
from quartet.extras.recipes.reference import REWARDS, is_rewarded, sections, starter

COMBINATIONS = [
    (job, method, reward)
    for job in recipe_classes()
    for method, reward in product([None, *job_methods().get(job, ())], [None, *(REWARDS if is_rewarded(job) else ())])
    if job != "iterated-reward-model" or None in (method, reward)  # whose rewards do not meet its methods
]
IMPOSSIBLE = {("rl", "remax", "process_model"): "pays steps one by one"}
"""What config/recipe.py refuses."""


@pytest.mark.parametrize("job", recipe_classes())
def test_every_combination_loads(job: str, tmp_path: Path) -> None:
    path, refused = tmp_path / "recipe.yaml", set()
    for combination in (found for found in COMBINATIONS if found[0] == job):
        _, method, reward = combination
        path.write_text(starter(job, method=method, reward=reward), encoding="utf-8")
        try:
            recipe = load_recipe(job, path).model_dump(mode="json")
        except UserError as error:
            assert IMPOSSIBLE.get(combination, "nothing") in error.found, (combination, error)
            refused.add(combination)
            continue
        if method is not None:
            part = recipe["loss"] if job == "preference" else recipe.get("rl", recipe)["algorithm"]
            assert part["name"] == method
        if reward is not None:
            assert reward == (recipe["collect"]["labeller"] if "collect" in recipe else recipe["rewards"][0])["type"]
    assert refused == {combination for combination in IMPOSSIBLE if combination[0] == job}


def test_every_reward_and_method_has_a_beginning() -> None:
    assert set(REWARDS) == set(discriminator_values(union_members(RewardConfig))[1])
    assert len(COMBINATIONS) > 200


@pytest.mark.parametrize("job", recipe_classes())
def test_the_examples_in_comments_load_when_they_are_uncommented(job: str, tmp_path: Path) -> None:
    text = starter(job)
    examples = re.sub(r"^( *)# (\w+: )", r"\1\2", text, flags=re.M)
    assert examples.count("\n") == text.count("\n") and examples != text
    (tmp_path / "recipe.yaml").write_text(examples, encoding="utf-8")
    assert load_recipe(job, tmp_path / "recipe.yaml") != load_recipe(job, None, _as_overrides(job, text, tmp_path))


def _as_overrides(job: str, text: str, folder: Path) -> list[str]:
    (folder / "plain.yaml").write_text(text, encoding="utf-8")
    return [f"@{folder / 'plain.yaml'}"]


def test_comments_are_the_keys_own_descriptions() -> None:
    text = re.sub(r"\s+(# )?", " ", re.sub(r"\n +# ", " ", starter("rl", method="grpo", reward="math")))
    assert sections("rl", "algorithm")[0].variants["grpo"] in text
    for address in ("algorithm.grpo.kl.coef", "rollout.sampling.max_new_tokens", "rewards.math.column"):
        assert sections("rl", address)[0].keys[0].meaning in text, address


@pytest.mark.parametrize("job", recipe_classes())
def test_a_beginning_is_short_and_names_where_the_rest_is(job: str) -> None:
    lines = starter(job).splitlines()
    assert f"quartet config {job}" in "\n".join(lines[:3])
    assert len(lines) < 70 and max(map(len, lines)) <= 104


def test_columns_with_usual_names_are_mapped() -> None:
    text = starter("rl", reward="math", data="a.jsonl", row={"question": "1 + 1?", "solution": "2"})
    assert "columns: {prompt: question, answer: solution}" in text and "# columns" not in text
    assert "columns" not in starter("rl", reward="math", row={"prompt": "1 + 1?", "answer": "2"})
    assert "columns" not in starter("sft", row={"messages": []})
    assert "columns: {prompt: instruction, completion: output}" in starter("sft", row={"instruction": "", "output": ""})


SHARED = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
MBPP = {"task_id": 1, "text": "Write f.", "code": "def f(): ...", "test_list": ["assert f()"], "test_setup_code": ""}


@pytest.mark.parametrize(
    ("job", "row", "mapped"),
    [
        ("sft", {"instruction": "Do", "input": "", "output": "o"}, "{prompt: instruction + input, completion: output}"),
        ("sft", {"question": "q", "context": ["a", "b"], "answer": "a"}, "{prompt: question, completion: answer}"),
        ("sft", {"conversations": SHARED}, "{messages: conversations}"),
        ("rl", {"conversations": SHARED, "answer": "4"}, "{messages: conversations}"),
        ("preference", {"conversations": SHARED[:1], "chosen": {}, "rejected": {}}, "{messages: conversations}"),
        ("sft", MBPP, "{prompt: text, completion: code}"),
        ("eval", MBPP, "{prompt: text, tests: test_list}"),
        ("sft", {"text": "All of it is learned.", "source": "web"}, None),
        ("sft", {"prompt": "p", "completion": "c", "input": "i"}, None),
    ],
)
def test_no_part_of_a_prompt_is_dropped(job: str, row: dict[str, object], mapped: str | None) -> None:
    reward = {"rl": "math", "eval": "code"}.get(job)
    text = starter(job, reward=reward, data="a.jsonl", row=row).replace('"', "")
    assert (f"columns: {mapped}" in text) if mapped is not None else ("columns: {" not in text)


@pytest.mark.parametrize(
    ("job", "choice", "remedy"),
    [
        ("rl", {"method": "grop"}, "did you mean 'grpo'?"),
        ("rl", {"method": "simulated"}, "use one of ppo, grpo"),
        ("preference", {"reward": "math"}, "leave --reward out"),
        ("sft", {"method": "ppo"}, "leave --method out"),
        ("eval", {"reward": "maths"}, "did you mean 'math'?"),
        ("rm", {}, "use one of sft"),
    ],
)
def test_what_a_job_does_not_have_is_told(job: str, choice: dict[str, str], remedy: str) -> None:
    with pytest.raises(UserError) as error:
        starter(job, **choice)
    assert remedy in error.value.remedy
