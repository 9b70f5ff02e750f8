"""A missing earlier stage says which command makes it, wherever it is asked for."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from quartet.config.errors import UserError
from quartet.config.load import load_recipe
from quartet.config.nearest import made_by
from quartet.extras.report.build import build_report
from quartet.models.loading import load_causal_lm, load_scalar_model
from quartet.text.loading import load_tokenizer, local_directory


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("path", "job"),
    [
        ("runs/sft/model", "sft"),
        ("out/my-sft-3/model", "sft"),
        ("runs/reward-model/model", "reward-model"),
        ("runs/rm2/model", "reward-model"),
        ("runs/process-reward/model", "process-reward"),
        ("runs/rl-ppo/critic", "rl"),
        ("runs/rl-online-dpo/model", "rl"),
        ("runs/simpo/adapter", "preference"),
        ("runs/iterated-reward-model/model", "iterated-reward-model"),
        ("runs/eval/answers.jsonl", "eval"),
        ("runs/sft", "sft"),
    ],
)
def test_the_name_of_a_run_says_its_job(path: str, job: str) -> None:
    remedy = made_by(Path(path))
    assert remedy is not None and f"with quartet {job} (" in remedy


@pytest.mark.parametrize("path", ["models/llama/model", "data/sft", "runs/sft.jsonl", "reward.py", "runs/x/model"])
def test_other_paths_are_left_to_other_messages(path: str) -> None:
    assert made_by(Path(path)) is None


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_a_run_that_has_not_ended_is_gone_on_with(tmp_path: Path, status: str) -> None:
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"job": "sft", "status": status}), encoding="utf-8")
    wanted = "let its run end first: quartet sft runs/x/recipe.yaml output_dir=runs/x --resume"
    assert made_by(Path("runs/x/model")) == wanted
    assert made_by(Path("runs/x/round_1_rl/model")) == wanted


def test_commands_are_quoted_for_the_shell(tmp_path: Path) -> None:
    run = tmp_path / "a b" / "12"
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"job": "sft", "status": "failed"}), encoding="utf-8")
    command = str(made_by(Path("a b/12/model"))).removeprefix("let its run end first: ")
    assert shlex.split(command) == ["quartet", "sft", "a b/12/recipe.yaml", "output_dir=a b/12", "--resume"]
    told = {"job": "quickstart", "status": "failed", "directory_option": "--out"}
    (run / "run.json").write_text(json.dumps(told), encoding="utf-8")
    command = str(made_by(Path("a b/12/model"))).removeprefix("let its run end first: ")
    assert shlex.split(command) == ["quartet", "quickstart", "--out", "a b/12", "--resume"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"job": 3}', '{"job": "other"}'])
def test_a_damaged_run_is_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "runs/x").mkdir(parents=True)
    (tmp_path / "runs/x/run.json").write_text(text, encoding="utf-8")
    assert made_by(Path("runs/x/model")) is None


@pytest.mark.parametrize(
    ("ask", "job"),
    [
        (lambda: load_causal_lm("runs/sft/model"), "sft"),
        (lambda: load_tokenizer("runs/sft/model"), "sft"),
        (lambda: load_causal_lm("sft/model"), "sft"),
        (lambda: load_scalar_model("runs/reward-model/model"), "reward-model"),
        (lambda: build_report(Path("runs/rl-grpo"), None), "rl"),
    ],
)
def test_whatever_reads_an_earlier_stage_names_its_command(ask: Callable[[], object], job: str) -> None:
    with pytest.raises(UserError) as error:
        ask()
    assert f"quartet {job} " in error.value.remedy


def test_a_run_given_for_its_model_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "runs/sft").mkdir(parents=True)
    (tmp_path / "runs/sft/run.json").write_text('{"job": "sft", "status": "done"}', encoding="utf-8")
    with pytest.raises(UserError, match="a run without a model"):
        load_causal_lm("runs/sft")
    (tmp_path / "runs/sft/model").mkdir()
    assert local_directory("runs/sft", "model") == "runs/sft/model"


def test_a_recipe_that_is_missing_can_be_written() -> None:
    with pytest.raises(UserError) as error:
        load_recipe("rl", "mine.yaml")
    assert error.value.remedy == "write one with `quartet init rl > mine.yaml`"
