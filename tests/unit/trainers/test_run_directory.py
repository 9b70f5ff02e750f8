"""Who owns a run directory, what is refused, and what a resumed run finds."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from quartet.config import UserError
from quartet.config.common import OptimConfig, TrainConfig
from quartet.config.recipe import ActorConfig, CheckpointConfig, CriticConfig, LogConfig, RLRecipe, SFTRecipe
from quartet.observe.files import ENDED, read_rows, run_status
from quartet.observe.rollouts import write_rollout_step
from quartet.schedule.model_worker import Checkpointed
from quartet.schedule.role_group import LocalGroup
from quartet.text.loading import expand_local_path
from quartet.trainers.checkpoints import check_storage
from quartet.trainers.run import Interrupted, RunDirectory
from quartet.trainers.run_files import UNTESTED_TORCH
from saved_states import save, saved

RECIPE = SFTRecipe(log=LogConfig(tensorboard=False), steps=4)


def status(path: Path) -> str:
    return str(json.loads((path / "run.json").read_text(encoding="utf-8"))["status"])


def finish(path: Path, recipe: Any = RECIPE, *, resume: bool = False) -> None:
    with RunDirectory(path, recipe, resume=resume) as run:
        run.start(0)


def error_of(path: Path, recipe: Any = RECIPE, *, resume: bool = False) -> UserError:
    with pytest.raises(UserError) as caught, RunDirectory(path, recipe, resume=resume):
        raise AssertionError("the directory was taken")
    return caught.value


def test_nothing_is_written_before_the_run_begins(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "run", RECIPE)
    assert not (tmp_path / "run").exists()


def test_status_follows_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunDirectory(path, RECIPE):
        assert status(path) == "running"
    assert status(path) == "done"
    for failure, expected in [(Interrupted(path, 3), "interrupted"), (KeyboardInterrupt(), "interrupted")]:
        with pytest.raises(type(failure)), RunDirectory(path, RECIPE, resume=True):
            raise failure
        assert status(path) == expected
    with pytest.raises(ValueError), RunDirectory(path, RECIPE, resume=True):
        assert status(path) == "running"
        raise ValueError("broken")
    assert status(path) == "failed"


@pytest.mark.parametrize(
    ("recipe", "length", "key"),
    [
        (SFTRecipe, "epochs", "train"),
        (RLRecipe, "steps", "critic.train"),
    ],
)
def test_a_longer_run_goes_on_unless_its_learning_rate_depends_on_the_length(
    recipe: Any, length: str, key: str, tmp_path: Path
) -> None:
    def of(schedule: str, **values: Any) -> Any:
        train = TrainConfig(optim=OptimConfig(schedule=schedule))
        first, _, rest = key.partition(".")
        section = (ActorConfig if first == "actor" else CriticConfig)(train=train) if rest else train
        return recipe(log=LogConfig(tensorboard=False), **{first: section, **values})

    for schedule in ("linear", "cosine"):
        path = tmp_path / schedule
        finish(path, of(schedule, **{length: 4}))
        longer = error_of(path, of(schedule, **{length: 8}), resume=True)
        assert longer.found == f"{length}: 4 then, 8 now; {key}.optim.schedule: {schedule}"
        assert "cannot have another length" in longer.problem and str(path / "model") in longer.remedy
        assert status(path) == "done"
    path = tmp_path / "constant"
    finish(path, of("constant", **{length: 4}))
    assert "recipe.yaml" in error_of(path, of("constant", **{length: 8, "seed": 1}), resume=True).remedy
    finish(path, of("constant", **{length: 8}), resume=True)
    assert f"{length}: 8" in (path / "recipe.yaml").read_text() and status(path) == "done"


def test_another_run_is_not_touched(tmp_path: Path) -> None:
    finish(tmp_path / "run")
    before = (tmp_path / "run" / "run.json").read_bytes()
    error = error_of(tmp_path / "run")
    assert "already holds a run" in error.problem and "job sft, status done" in error.found
    assert "--resume" in error.remedy
    assert (tmp_path / "run" / "run.json").read_bytes() == before


def test_other_files_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    error = error_of(tmp_path)
    assert "not empty" in error.problem and "notes.txt" in error.found
    assert os.listdir(tmp_path) == ["notes.txt"]
    assert "not empty" in error_of(tmp_path, resume=True).problem


@pytest.mark.parametrize("content", ["not json", '{"name": "of another program"}'])
def test_a_run_file_of_another_program_is_left_alone(content: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(content)
    for resume in (False, True):
        assert "choose another output_dir" in error_of(tmp_path, resume=resume).remedy
    assert (tmp_path / "run.json").read_text() == content


def test_a_run_in_use_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run"
    finish(path)
    before = (path / "run.json").read_bytes()
    with open(path / ".lock", "w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert "is in use" in error_of(path, resume=True).problem
    assert (path / "run.json").read_bytes() == before
    with RunDirectory(path, RECIPE, resume=True):
        assert status(path) == "running"


def test_a_changed_recipe_is_named_key_by_key(tmp_path: Path) -> None:
    finish(tmp_path / "run")
    changed = RECIPE.model_copy(update={"seed": 3, "train": TrainConfig(optim=OptimConfig(lr=0.5))})
    error = error_of(tmp_path / "run", changed, resume=True)
    assert "another recipe" in error.problem
    assert error.found == "seed: 0 then, 3 now; train.optim.lr: 1.0e-05 then, 0.5 now".replace("1.0e-05", "1e-05")
    assert "recipe.yaml" in error.remedy
    other = error_of(tmp_path / "run", RLRecipe(), resume=True)
    assert "cannot be resumed as rl" in other.problem and "quartet sft" in other.remedy


def test_what_changes_no_weight_may_change(tmp_path: Path) -> None:
    finish(tmp_path / "run")
    moved = RECIPE.model_copy(
        update={"output_dir": "elsewhere", "checkpoint": CheckpointConfig(every_steps=7), "log": LogConfig()}
    )
    with RunDirectory(tmp_path / "run", moved, resume=True) as run:
        assert run.path == tmp_path / "run" and status(run.path) == "running"


def test_resuming_nothing_starts(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "new", RECIPE, resume=True) as run:
        assert run.latest() is None
        run.start(0)
    assert status(tmp_path / "new") == "done"
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "recipe.yaml").write_text("half a rec")
    finish(tmp_path / "killed")
    assert "examples_per_step" in (tmp_path / "killed" / "recipe.yaml").read_text()


def test_checkpoints_are_found_newest_first_and_pruned(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run", RECIPE) as run:
        run.start(0)
        for step in (2, 4, 6):
            save(run, step, {"x": step}, {"note": f"after {step}"})
        assert run.saved_steps() == [4, 6]
        found = run.latest()
    assert found is not None
    assert (found.step, saved(found), found.info["note"]) == (6, {"x": 6}, "after 6")


class Slow:
    """Holds up every file that is synced, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self._sync = os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.begun.set()
            assert self.go.wait(10)
        self._sync(descriptor)


def test_a_checkpoint_holds_the_state_of_its_step_although_it_is_written_later(
    tmp_path: Path,
) -> None:
    go = threading.Event()
    state = {"weight": torch.zeros(3)}
    info = {"metrics": {"loss": 1.0}}
    with RunDirectory(tmp_path / "run", RECIPE) as run:
        run.start(0)
        run.write_later("held", 1, lambda: go.wait(10))
        save(run, 1, state, info)
        state["weight"].add_(1)
        info["metrics"]["loss"] = 2.0
        go.set()
        assert run.saved_steps() == [1], "waits for the one that is being written"
        found = run.latest()
    assert found is not None
    assert (saved(found)["weight"].tolist(), found.info["metrics"]) == ([0.0] * 3, {"loss": 1.0})
    spans = {row["name"]: row for row in read_rows(tmp_path / "run" / "spans.jsonl")}
    assert spans.keys() == {"held", "checkpoint_snapshot", "checkpoint"}
    assert all(row["role"] == "writer" and row["step"] == 0 for row in spans.values())
    assert spans["checkpoint"]["start_s"] >= spans["held"]["end_s"]


def test_a_checkpoint_is_complete_only_after_the_records_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    rollout = tmp_path / "run" / "rollouts" / "step_000001.jsonl.gz"
    with RunDirectory(tmp_path / "run", RECIPE) as run:
        run.start(0)
        run.write_later("write_rollouts", 1, lambda: write_rollout_step(tmp_path / "run" / "rollouts", 1, []))
        save(run, 1, {}, {})
        assert slow.begun.wait(10)
        assert not rollout.exists() and not list(run.checkpoints.glob("step_*"))
        slow.go.set()
    assert rollout.exists() and RunDirectory(tmp_path / "run", RECIPE, resume=True).saved_steps() == [1]


def test_without_background_everything_is_written_at_once(tmp_path: Path) -> None:
    recipe = RECIPE.model_copy(update={"checkpoint": CheckpointConfig(background=False)})
    where = []
    with RunDirectory(tmp_path / "run", recipe) as run:
        run.start(0)
        run.write_later("write_rollouts", 1, lambda: where.append(threading.current_thread()))
        assert where == [threading.main_thread()]
        save(run, 1, {"x": 1}, {})
        assert os.listdir(run.checkpoints) == ["step_00000001"]
    names = [row["name"] for row in read_rows(tmp_path / "run" / "spans.jsonl")]
    assert names == ["write_rollouts", "checkpoint"]


def _full_disk(descriptor: int) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("later", ["save", "finish"])
def test_a_failure_in_the_background_ends_the_run_with_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    path = tmp_path / "run"
    with pytest.raises(UserError) as caught, RunDirectory(path, RECIPE) as run, run.stoppable():
        run.start(0)
        save(run, 1, {"x": 1}, {})
        run.drain()
        monkeypatch.setattr(os, "fsync", _full_disk)
        save(run, 2, {"x": 2}, {})
        if later == "save":
            save(run, 3, {}, {})
        run.finish({})
    assert "step_00000002 could not be written" in caught.value.problem and "No space left" in caught.value.found
    assert status(path) == "failed" and not (path / "summary.json").exists()
    assert RunDirectory(path, RECIPE, resume=True).saved_steps() == [1]


def test_a_failing_run_still_saves_what_it_handed_over(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(ValueError, match="broken"), RunDirectory(path, RECIPE) as run:
        run.start(0)
        save(run, 1, {"x": 1}, {})
        raise ValueError("broken")
    assert RunDirectory(path, RECIPE, resume=True).saved_steps() == [1]


def test_records_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    """Metrics count complete steps; the spans of step 2 (from 0) belong to the row of step 3."""
    path = tmp_path / "run"
    with RunDirectory(path, RECIPE) as run:
        run.start(0)
        for done in (0, 1, 2, 3):
            run.tracker.log(done, {"loss/sft": float(done)})
            with run.recorder.span("update", step=done):
                pass
    with RunDirectory(path, RECIPE, resume=True) as run:
        run.start(2)
    assert [row["step"] for row in read_rows(path / "metrics.jsonl")] == [0, 1, 2]
    assert [row["step"] for row in read_rows(path / "spans.jsonl")] == [0, 1]
    with RunDirectory(path, RECIPE, resume=True) as run:
        run.start(0)
    assert read_rows(path / "metrics.jsonl") == [] and read_rows(path / "spans.jsonl") == []


def test_a_checkpoint_is_due_on_its_cadence_and_at_the_end(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run", RECIPE.model_copy(update={"checkpoint": CheckpointConfig(every_steps=2)}))
    assert [step for step in range(1, 6) if run.due(step, total_steps=5)] == [2, 4, 5]


def test_ctrl_c_lets_the_step_end_and_a_second_one_stops_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run"
    former = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match="after step 3"), RunDirectory(path, RECIPE) as run, run.stoppable():
        run.check_stop(2)
        os.kill(os.getpid(), signal.SIGINT)
        assert run.due(3, total_steps=100), "saved whatever the cadence says"
        run.check_stop(3)
    assert signal.getsignal(signal.SIGINT) is former
    with (
        pytest.raises(KeyboardInterrupt),
        RunDirectory(path, RECIPE, resume=True) as run,
        run.stoppable(),
    ):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is former


def test_ctrl_c_while_a_run_closes_drops_what_waits_and_is_noted(tmp_path: Path) -> None:
    run, begun, done = RunDirectory(tmp_path / "run", RECIPE), threading.Event(), []

    def piece() -> None:
        begun.set()
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        while not run._signals.requested:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        done.append("the piece under way")

    with pytest.raises(KeyboardInterrupt), run.stoppable(), run:
        run.start(0)
        run.write_later("write_rollouts", 1, piece)
        run.write_later("write_rollouts", 2, lambda: done.append("what waits"))
        begun.wait()
    assert status(tmp_path / "run") == "interrupted" and done == ["the piece under way"]


def test_a_run_whose_process_ended_without_a_word_says_so(tmp_path: Path) -> None:
    path, told = tmp_path / "run", []
    finish(path)
    info = json.loads((path / "run.json").read_text()) | {"status": "running"}
    (path / "run.json").write_text(json.dumps(info))
    assert run_status(path, info) == ENDED
    with RunDirectory(path, RECIPE, resume="auto", tell=told.append):
        assert run_status(path, info) == "running"
    assert len(told) == 1 and ENDED in told[0]
    assert ENDED in json.loads((path / "run.json").read_text())["remarks"][-1]
    (path / ".lock").unlink()
    assert run_status(path, info) == "running", "nobody can know"


def test_a_torch_newer_than_the_tested_ones_is_warned_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f'"torch>=2.11,<{UNTESTED_TORCH}"' in (Path(__file__).parents[3] / "pyproject.toml").read_text()
    for version, num_remarks in (("2.13.1+cpu", 0), ("2.14.0", 1), ("2.14.0", 1), ("2.15.1+cu130", 2)):
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        with RunDirectory(tmp_path / "run", RECIPE, resume="auto"):
            remarks = json.loads((tmp_path / "run" / "run.json").read_text()).get("remarks", [])
        assert len(remarks) == num_remarks
        assert not remarks or remarks[-1].startswith(f"torch {version} is newer than")


def test_a_full_disk_becomes_a_message_and_the_lock_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "run"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(UserError) as caught, RunDirectory(path, RECIPE):
        raise full
    assert "No space left" in caught.value.found and caught.value.__cause__ is full
    assert status(path) == "failed"
    with RunDirectory(path, RECIPE, resume=True):
        pass
    with pytest.raises(PermissionError), RunDirectory(path, RECIPE, resume=True):
        raise PermissionError(errno.EACCES, "not about space")


@pytest.mark.parametrize("shared", [True, False])
def test_storage_that_a_machine_does_not_share_is_refused_at_the_start(tmp_path: Path, shared: bool) -> None:
    """Of another machine, which may have a directory of the same name: what the driver has just made is not in it."""
    here, there = tmp_path / "here", tmp_path / "there"
    for root in (here, there):
        (root / "run").mkdir(parents=True)

    class OnAnotherMachine:
        def check_sees(self, directory: Path) -> None:
            found = directory if shared else there / directory.relative_to(here)
            Checkpointed.check_sees(self, found)  # type: ignore[arg-type]

    workers: Any = {"actor": LocalGroup(OnAnotherMachine())}
    with pytest.raises(UserError, match="does not see the run's directory") if not shared else contextlib.nullcontext():
        asyncio.run(check_storage(RunDirectory(here / "run", RECIPE), workers))
    assert not list((here / "run").iterdir()), "the probe is gone"


def test_a_run_that_goes_on_does_not_hand_out_its_former_model(tmp_path: Path) -> None:
    path, log = tmp_path / "run", LogConfig(tensorboard=False)
    with RunDirectory(path, SFTRecipe(log=log, steps=4)):
        (path / "model").mkdir()
    assert expand_local_path(path, "model") == str(path / "model")
    longer = RunDirectory(path, SFTRecipe(log=log, steps=8), resume=True)
    with longer, pytest.raises(UserError, match="has gone on since"):
        expand_local_path(path, "model")
    assert expand_local_path(path, "model") == str(path / "model")
