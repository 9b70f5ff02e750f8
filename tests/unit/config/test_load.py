"""Recipe files: overrides, defaults of their place, every mistake with its message, exact round trip."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import quartet
from quartet.config.errors import UserError
from quartet.config.load import dump_recipe, load_recipe
from quartet.config.recipe import RLRecipe, SFTRecipe
from quartet.config.yamls import dump_yaml, parse_yaml, shell_override

SFT = ["model.path=m", "data.path=d.jsonl"]
RL = ["actor.model.path=m", "data.path=d.jsonl"]


def rl(*overrides: str) -> RLRecipe:
    recipe = load_recipe("rl", None, [*RL, *overrides])
    assert isinstance(recipe, RLRecipe)
    return recipe


def complaint(job: str, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        load_recipe(job, None, overrides)
    return caught.value


def test_file_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "job: rl\nactor:\n  model: {path: m}\n  train: {optim: {lr: 1e-6}}\ndata: {path: d}\n"
        "rewards:\n- {type: function, target: 'a.py:f'}\n- {type: model, path: rm}\n"
    )
    recipe = load_recipe("rl", path, ["rewards.0.weight=2", "rewards.2.type=function", "rewards.2.target=b.py:g"])
    assert isinstance(recipe, RLRecipe)
    assert recipe.actor.train.optim.lr == 1e-6
    assert [source.weight for source in recipe.rewards] == [2, 1, 1]
    assert recipe.rewards[2].type == "function"


def test_a_partly_given_section_keeps_the_defaults_of_its_place() -> None:
    recipe = rl(
        "algorithm.name=grpo",
        "algorithm.kl.coef=0.1",
        "responses_per_prompt=4",
        "critic.train.optim.weight_decay=0.1",
        "evaluation.data.path=e",
        "rollout.sampling.temperature=0.5",
        "evaluation.sampling.max_new_tokens=7",
    )
    assert recipe.algorithm.kl.estimator == "k3" and recipe.algorithm.kl.place == "loss"
    assert recipe.critic.train.optim.lr == 2e-5
    assert recipe.evaluation is not None and recipe.evaluation.sampling.temperature == 0.5
    assert recipe.evaluation.sampling.max_new_tokens == 7


def test_a_given_section_without_tag_is_the_default_member() -> None:
    assert rl("algorithm.policy_loss.clip_eps_low=0.1").algorithm.name == "ppo"


def test_the_defaults_of_one_member_do_not_reach_another() -> None:
    algorithm = rl("algorithm.name=rloo", "responses_per_prompt=2").algorithm
    assert algorithm.name == "rloo" and not hasattr(algorithm, "gae_lambda")


@pytest.mark.parametrize(
    ("overrides", "found", "remedy"),
    [
        (["train.optim.learnin_rate=1"], "unknown key 'learnin_rate' in train.optim", "use one of lr, betas"),
        (["stesp=1"], "unknown key 'stesp' at the top", "did you mean 'steps'?"),
        (["token_budget=1"], "unknown key 'token_budget' at the top", "did you mean train.token_budget"),
        (["steps=abc"], "steps: 'abc' (str)", "steps must be a valid integer"),
        (["steps='3'"], "steps: '3' (str)", "steps must be a valid integer"),
        (["train=3"], "train: 3 (int)", "train takes a mapping"),
        (["train.optim.lr=-1"], "train.optim.lr: -1", "train.optim.lr must be greater than 0"),
        (["train.optim.lr=.nan"], "train.optim.lr: nan", "train.optim.lr must be a finite number"),
        (["train.optim.betas=[0.9]"], "train.optim.betas.1 is missing", "set train.optim.betas.1"),
    ],
)
def test_wrong_values_of_sft(overrides: list[str], found: str, remedy: str) -> None:
    error = complaint("sft", *SFT, *overrides)
    assert found in error.found and remedy in error.remedy


@pytest.mark.parametrize(
    ("overrides", "found", "remedy"),
    [
        (["algorithm.name=gropo"], "algorithm.name: gropo", "did you mean 'grpo'?"),
        (["algorithm.name=rloo", "algorithm.gae_lambda=1"], "'gae_lambda' in algorithm", "use one of"),
        (["rewards=[{type: length, max: 3}, {type: length, max: 3, name: b, column: c}]"], "'column'", "use one of"),
        (["rewards.0.type=function"], "rewards.0.target is missing", "set rewards.0.target"),
        (["rewards.0.weight=1"], "rewards.0.type is missing", "one of model, "),
        (["rewards.0={type: function, target: f, wieght: 1}"], "'wieght' in rewards.0", "did you mean 'weight'?"),
        (["prompts_per_step=5", "minibatches=2"], "minibatches (2) must divide prompts_per_step (5)", "change"),
    ],
)
def test_wrong_values_of_rl(overrides: list[str], found: str, remedy: str) -> None:
    error = complaint("rl", *RL, *overrides)
    assert found in error.found and remedy in error.remedy


def test_all_mistakes_are_listed_at_once() -> None:
    error = complaint("rl", "steps=x", "lr=1", "rewards.0.type=function")
    for part in ("steps: 'x'", "unknown key 'lr'", "rewards.0.target is missing"):
        assert part in error.found
    assert "unknown key 'lr' at the top: did you mean actor.train.optim.lr" in error.found
    assert "3 places" in error.problem


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("steps", "key=value"),
        ("a..b=1", "key=value"),
        ("steps=[1", "not valid YAML"),
        ("rewards.3.type=model", "does not fit the list"),
        ("seed.a=1", "no parts"),
    ],
)
def test_malformed_overrides(override: str, part: str) -> None:
    with pytest.raises(UserError, match=part):
        load_recipe("rl", None, ["seed=1", "rewards=[]", override])


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [1\nb: 2\n", ", line 2"),
        ("steps: 1\nseed: 2\nsteps: 3\n", "line 3: the key 'steps' stands here and in line 1"),
        ("model:\n  path: a\n  path: b\n", "line 3"),
        ("1: 2\n", "is not text"),
        ("- a\n", "(list)"),
        ("a: !!python/object:os.system {}\n", "could not determine a constructor"),
        ("job: rl\n", "job: rl, asked for sft"),
    ],
)
def test_malformed_files(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_recipe("sft", path)
    assert part in caught.value.found


def test_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("")
    with pytest.raises(UserError, match=r"did you mean 'recipe\.yaml'"):
        load_recipe("sft", tmp_path / "recpie.yaml")
    with pytest.raises(UserError, match="quartet init sft"):
        load_recipe("sft", tmp_path / "nowhere" / "recipe.yaml")
    with pytest.raises(UserError, match="is a folder"):
        load_recipe("sft", tmp_path)


def test_file_in_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes("seed: 1 # für\n".encode("latin-1"))
    with pytest.raises(UserError, match="UTF-8"):
        load_recipe("sft", path)


def test_empty_file_and_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xef\xbb\xbf# nothing\n")
    assert isinstance(load_recipe("sft", path, SFT), SFTRecipe)


def test_unknown_job() -> None:
    assert "did you mean 'reward-model'?" in complaint("reward_model").remedy


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("10_000", 10_000),
        ("no", "no"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("010", "010"),
        ("true", True),
        ("~", None),
        ("", None),
    ],
)
def test_scalars(text: str, value: Any) -> None:
    assert parse_yaml(text) == value and type(parse_yaml(text)) is type(value)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(["1e-6", "no", "010", "~", "1:30", "=", "<<", "true", ".5", "", "2026-01-01"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(PLAIN)
@example("a\x85b")
@example(["\u2028", "\u2029 ", "\ufeff"])
def test_yaml_round_trip(value: Any) -> None:
    assert parse_yaml(dump_yaml(value)) == value


@settings(max_examples=30)
@given(
    lr=st.floats(1e-12, 1e3, exclude_min=True),
    stops=st.lists(st.text(), max_size=3),
    name=st.sampled_from(["ppo", "grpo", "rloo"]),
    columns=st.dictionaries(st.text(min_size=1, max_size=5), st.text(max_size=5), max_size=3),
)
def test_recipe_round_trip(
    tmp_path_factory: pytest.TempPathFactory, lr: float, stops: list[str], name: str, columns: dict[str, str]
) -> None:
    recipe = RLRecipe.model_validate(
        {
            "actor": {"model": {"path": "1e-6"}, "train": {"optim": {"lr": lr}}},
            "data": {"path": "no", "columns": columns},
            "algorithm": {"name": name},
            "responses_per_prompt": 4,
            "rollout": {"sampling": {"stop_strings": stops}},
            "rewards": [{"type": "function", "target": "a.py:f"}, {"type": "model", "path": "rm"}],
        }
    )
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe("rl", path) == recipe


@given(st.text(min_size=1, max_size=12) | st.sampled_from(["12", "true", "null", "1e3", "a # b", "x: y", "[1", "'a"]))
@settings(max_examples=100)
def test_a_printed_override_is_read_as_the_text_it_was_made_of(text: str) -> None:
    (word,) = shlex.split(shell_override("model.path", text))
    if "\0" not in text:
        assert load_recipe("sft", None, [*SFT, word]).model.path == text  # type: ignore[union-attr]


def test_a_copy_with_other_values_is_checked() -> None:
    recipe = quartet.RLRecipe(algorithm=quartet.GRPO())
    assert recipe.model_copy(update={"seed": 1}) == quartet.RLRecipe(algorithm=quartet.GRPO(), seed=1)
    assert recipe.model_copy() == recipe.model_copy(deep=True) == recipe
    assert recipe.model_copy(update={"algorithm": {"name": "rloo"}}).responses_per_prompt == 4
    for update, message in {"stepz": "did you mean", "steps": "valid integer"}.items():
        with pytest.raises(UserError, match=message):
            recipe.model_copy(update={update: "many"})
    with pytest.raises(ValidationError, match="frozen"):
        recipe.steps = 3  # type: ignore[misc]


def test_paths_from_python() -> None:
    recipe = quartet.SFTRecipe(output_dir=Path("runs/x"), model={"path": Path("m"), "tokenizer": Path("t")})  # type: ignore[arg-type]
    assert (recipe.output_dir, recipe.model) == ("runs/x", quartet.ModelConfig(path="m", tokenizer="t"))
