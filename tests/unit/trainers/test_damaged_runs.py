"""Files of a run that were damaged before it is resumed or reported: told, or the same result; never a traceback."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from quartet.config import UserError
from quartet.config.common import OptimConfig, TrainConfig
from quartet.config.recipe import CheckpointConfig, LogConfig, SFTRecipe
from quartet.config.yamls import parse_yaml
from quartet.observe import files
from quartet.observe.files import read_rows
from quartet.observe.progress import Progress
from quartet.observe.rollouts import RolloutRecord, read_rollout_step, rollouts_path, write_rollout_step
from quartet.trainers.evaluation_metrics import read_answers
from quartet.trainers.run import RunDirectory
from quartet.trainers.run_files import changed_keys, completed_stage, write_models
from quartet.trainers.supervised import SFTTrainer
from saved_states import save, saved

RECIPE = SFTRecipe(log=LogConfig(tensorboard=False), steps=4)
SEED = 3

# Through the real resume ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run that nothing happened to is made by the first test that needs it."""
    return tmp_path_factory.mktemp("whole") / "run"


@pytest.fixture
def sft(causal_lm: Any, tokenizer: Any, demonstrations: Any) -> Callable[..., SFTTrainer]:
    def make(path: Path, *, resume: bool = False, console: io.StringIO | None = None) -> SFTTrainer:
        recipe = SFTRecipe(
            threads=1,
            train=TrainConfig(optim=OptimConfig(lr=5e-3)),
            checkpoint=CheckpointConfig(every_steps=2, keep=2),
            log=LogConfig(tensorboard=False),
            steps=6,
            examples_per_step=6,
            output_dir=str(path),
        )
        progress = Progress(Console(file=console or io.StringIO(), width=500))
        return SFTTrainer(
            recipe, model=causal_lm(), tokenizer=tokenizer, rows=demonstrations, resume=resume, progress=progress
        )

    return make


@pytest.fixture
def run(whole: Path, sft: Any, tmp_path: Path) -> Path:
    """A copy of a finished run, its summary and model taken away: as if killed right before the end."""
    if not whole.exists():
        sft(whole).train()
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    shutil.rmtree(path / "model")
    (path / "summary.json").unlink()
    return path


def untimed(path: Path) -> list[dict[str, Any]]:
    rows = read_rows(path / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(("time", "throughput", "memory"))} for row in rows]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


NEWEST = "checkpoints/step_00000006"
LEFT = "checkpoints/step_00000004"
ENGINE = "engine/__0_0.distcp"
FALLS: dict[str, Callable[[Path], object]] = {
    "a flipped bit in the weights": lambda run: flip(run / NEWEST / ENGINE, 20_000),
    "the other step's weights": lambda run: shutil.copy(run / LEFT / ENGINE, run / NEWEST / ENGINE),
    "a wrong step": lambda run: (run / NEWEST / "info.json").write_text(
        (run / NEWEST / "info.json").read_text().replace('"step": 6', '"step": 4')
    ),
    "emptied": lambda run: [path.unlink() for path in (run / NEWEST).rglob("*") if path.is_file()],
    "renamed": lambda run: (run / NEWEST).rename(run / "checkpoints" / "step_00000008"),
}


@pytest.mark.parametrize("damage", FALLS)
def test_a_resumed_run_tells_the_damage_and_ends_the_same(damage: str, run: Path, whole: Path, sft: Any) -> None:
    FALLS[damage](run)
    told = io.StringIO()
    result = sft(run, resume=True, console=told).train()
    name = "step_00000008" if damage == "renamed" else "step_00000006"
    warning = next(line for line in told.getvalue().splitlines() if line.startswith("damaged checkpoint"))
    assert name in warning and "goes on from step_00000004" in warning
    assert warning in json.loads((run / "run.json").read_text())["remarks"]
    assert warning in json.loads((run / "summary.json").read_text())["notes"] and warning in result.summary["notes"]
    one, other = (load_file(path / "model" / "model.safetensors") for path in (whole, run))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert untimed(run) == untimed(whole)
    assert sorted(os.listdir(run / "checkpoints")) == ["step_00000004", "step_00000006"]


def test_records_of_an_rl_run_are_cut_back_to_the_checkpoint_that_is_used(
    tiny_rl: Any, digits: Any, tmp_path: Path
) -> None:
    values = {"steps": 3, "prompts_per_step": 2, "responses_per_prompt": 2, "algorithm": {"name": "grpo"}}
    values["checkpoint"] = {"every_steps": 1}
    tiny_rl(tmp_path / "whole", digits, **values).train()
    path = Path(shutil.copytree(tmp_path / "whole", tmp_path / "run"))
    flip(path / "checkpoints" / "step_00000003" / "actor/__0_0.distcp", 9_000)
    (path / "summary.json").unlink()
    shutil.rmtree(path / "model")
    for name in ("step_000003.jsonl.gz", "step_000004.jsonl.gz"):
        (path / "rollouts" / name).write_bytes(b"of the time before")
    result = tiny_rl(path, digits, resume=True, **values).train()
    assert any("step_00000003: the content of actor/__0_0.distcp" in note for note in result.summary["notes"])
    assert [row["step"] for row in read_rows(path / "metrics.jsonl")] == [0, 1, 2, 3]
    assert all((row["step"] or 0) <= 2 for row in read_rows(path / "spans.jsonl") if "step" in row)
    assert sorted(os.listdir(path / "rollouts")) == sorted(os.listdir(tmp_path / "whole" / "rollouts"))
    for name in ("rollouts/step_000003.jsonl.gz", "model/model.safetensors"):
        assert (path / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_no_good_checkpoint_ends_the_run_and_changes_nothing(run: Path, sft: Any) -> None:
    for name in (NEWEST, LEFT):
        (run / name / ENGINE).write_bytes(b"")
    kept = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "run.json"}
    with pytest.raises(UserError, match="can be used") as caught:
        sft(run, resume=True).train()
    assert "step_00000006" in caught.value.found and "step_00000004" in caught.value.found
    assert {path: path.read_bytes() for path in kept} == kept


def test_another_model_than_the_run_s_is_refused(run: Path, sft: Any, causal_lm: Any, tokenizer: Any) -> None:
    trainer = sft(run, resume=True)
    other = SFTTrainer(
        trainer.recipe,
        model=causal_lm(hidden_size=48),
        tokenizer=tokenizer,
        rows=[{"prompt": "1+1=", "completion": "2"}] * 6,
        resume=True,
    )
    with pytest.raises(UserError, match="does not fit the model"):
        other.train()


# Files that are read back when a run is resumed --------------------------------------------------------------


def record(step: int) -> RolloutRecord:
    return RolloutRecord(
        sequence_id="s",
        prompt_id="p",
        response_index=0,
        policy_version=step,
        prompt_ids=[1, 2],
        response_ids=[3],
        prompt_tokens=["a", "b"],
        response_tokens=["c"],
        prompt_text="ab",
        response_text="c",
        finish_reason="stop",
        rewards={"digits": 0.5},
        score=0.25 * step,
        group="g",
        columns={"advantages": [0.125 * step]},
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory of everything, made without a model."""
    path = tmp_path_factory.mktemp("made") / "run"
    with RunDirectory(path, RECIPE) as run:
        run.start(0)
        for done in (1, 2):
            with run.recorder.span("update", step=done - 1, role="actor", tokens=7):
                pass
            write_rollout_step(path / "rollouts", done, [record(done)])
            run.tracker.log(done, {"loss/sft": 0.5 / done})
            save(run, done, {"x": done}, {"metrics": {}})
        run.finish({"job": "sft", "stages": [{"name": "sft", "seconds": 1.5, "metrics": {"loss/sft": 0.25}}]})
    return path


@pytest.fixture
def small(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def resumed(path: Path) -> tuple[int, list[str]]:
    """The step it goes on from, and what was told."""
    with RunDirectory(path, RECIPE, resume=True) as run:
        found = run.latest(counters=("metrics",))
        assert found is not None and saved(found) == {"x": found.step}
        run.start(found.step)
        return found.step, run.warnings


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("x")


STRUCTURAL: dict[str, Callable[[Path], object]] = {
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 3),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] + b"\n"),
    "a list": lambda path: path.write_text("[1, 2]\n"),
    "a directory": a_directory,
}


@pytest.mark.parametrize("damage", STRUCTURAL)
@pytest.mark.parametrize("name", ["run.json", "recipe.yaml"])
def test_a_damaged_file_ends_the_resume_with_its_name(name: str, damage: str, small: Path) -> None:
    STRUCTURAL[damage](small / name)
    rest = {path: path.read_bytes() for path in small.glob("checkpoints/*/**/*") if path.is_file()}
    with pytest.raises(UserError) as caught:
        resumed(small)
    assert name in str(caught.value) or (name == "recipe.yaml" and "another recipe" in caught.value.problem)
    assert {path: path.read_bytes() for path in rest} == rest


@pytest.mark.parametrize("damage", STRUCTURAL)
@pytest.mark.parametrize("name", ["metrics.jsonl", "spans.jsonl"])
def test_broken_lines_of_records_are_left_out_and_counted(
    name: str, damage: str, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(files._log, "warning", lambda *args: told.append(args))
    STRUCTURAL[damage](small / name)
    if damage in ("a directory", "a pipe"):
        with pytest.raises(UserError):
            resumed(small)
        return
    assert resumed(small)[0] == 2
    num_lines = 3 if damage == "binary" else 1
    assert (told[0][1].name, told[0][2]) == (name, num_lines) and told[0][3].startswith("line")
    assert all(row["step"] is not None for row in read_rows(small / name))


@pytest.mark.parametrize("number", range(10))
def test_a_flipped_bit_in_the_recipe_is_refused_or_changes_nothing(number: int, small: Path) -> None:
    path = small / "recipe.yaml"
    before = parse_yaml(path.read_text())
    rng = random.Random(f"{SEED} {number}")
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    try:
        resumed(small)
    except UserError:
        return
    assert not changed_keys(parse_yaml(path.read_bytes().decode()), before)


@pytest.mark.parametrize("number", range(10))
def test_a_flipped_bit_in_a_rollout_file_is_told_or_harmless(number: int, small: Path) -> None:
    rng = random.Random(f"{SEED} {number}")
    path = rollouts_path(small / "rollouts", 1)
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    try:
        found = read_rollout_step(small / "rollouts", 1)
    except UserError:
        return
    assert found == [record(1)]


# An evaluation, the stages of a larger job --------------------------------------------------------------------


STAGE = {"name": "rl", "seconds": 1.0, "metrics": {"loss": 0.5}}


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    (tmp_path / "model" / "deeper").mkdir(parents=True)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "model" / "deeper" / "config.json").write_bytes(b"{}")
    write_models(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps({"stages": [STAGE]}))
    return tmp_path


def test_a_complete_stage_is_not_run_again(stage: Path) -> None:
    (stage / "model" / "README.md").write_text("mine")
    assert completed_stage(stage, pytest.fail) == STAGE
    (stage / "models.json").unlink()
    assert completed_stage(stage, pytest.fail) == STAGE, "an earlier version's"
    (stage / "summary.json").unlink()
    assert completed_stage(stage, pytest.fail) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [("model/model.safetensors", b"Weights"), ("models.json", b"{}"), ("summary.json", b"")],
)
def test_a_stage_that_is_not_as_it_left_itself_writes_its_files_anew(name: str, content: bytes, stage: Path) -> None:
    (stage / name).write_bytes(content)
    told: list[str] = []
    assert completed_stage(stage, told.append) is None
    assert name == "summary.json" or (len(told) == 1 and name in told[0])


# Other readers -----------------------------------------------------------------------------------------------

ANSWER = {"prompt_id": "p0", "sample": 0, "prompt": "1+2=", "completion": "3", "finish_reason": "stop", "rewards": {}}


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_id": 5},
        {"rewards": {"a": "1"}},
        {"prompt": 7},
    ],
)
def test_damaged_answers_are_named_by_their_line(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(ANSWER) + "\n" + json.dumps({**ANSWER, **changes}) + "\n")
    with pytest.raises(UserError, match="damaged") as caught:
        read_answers(path)
    assert "answers.jsonl, line 2" in caught.value.found
    path.write_text(json.dumps(ANSWER) + "\n")
    assert [answer.completion for answer in read_answers(path)] == ["3"]
