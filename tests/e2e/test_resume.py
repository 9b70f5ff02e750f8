"""A run killed at any moment and resumed ends with the weights, figures and rollouts of one that never stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quartet.train.checkpoint import list_checkpoints

RECIPES = ("rl", "sft", "heads")


@pytest.fixture(scope="module")
def uninterrupted(
    world_of_session: Any, processes: Any, recipes: Any, learning_heads: dict[str, Any]
) -> dict[str, Path]:
    """One whole run per job."""
    found = {}
    for name in RECIPES:
        content = recipes[command_of(name)](output_dir=f"runs/whole-{name}")
        if name == "heads":
            content["rollout"] = {**content["rollout"], "speculation": learning_heads}
        recipe = world_of_session.recipe(f"whole-{name}", content)
        log = world_of_session.path / f"whole-{name}.log"
        assert processes.run(command_of(name), recipe, cwd=world_of_session.path, output=log) == 0, log.read_text()
        found[name] = world_of_session.path / "runs" / f"whole-{name}"
    return found


def command_of(name: str) -> str:
    return "rl" if name == "heads" else name


@pytest.fixture
def killed_and_resumed(
    world: Any, processes: Any, uninterrupted: dict[str, Path], same_run: Callable[[Path, Path], None]
) -> Callable[..., Path]:
    def run(job: str, name: str, *kills: tuple[str, int]) -> Path:
        """Killed once per entry, resumed after each, compared in the end."""
        log = world.path / f"{name}.log"
        command = [command_of(job), f"whole-{job}.yaml", f"output_dir=runs/{name}"]
        for number, kill in enumerate(kills):
            resume = ["--resume"] if number else []
            status = processes.run(*command, *resume, cwd=world.path, output=log, kill=kill)
            assert status == -signal.SIGKILL, (status, log.read_text())
        assert processes.run(*command, "--resume", cwd=world.path, output=log) == 0, log.read_text()
        same_run(uninterrupted[job], world.path / "runs" / name)
        return world.path / "runs" / name

    return run


@pytest.mark.slow
@pytest.mark.parametrize("kill", [("log", 1), ("decode", 29), ("log", 6)], ids=str)
def test_an_rl_run_survives_sigkill(killed_and_resumed: Any, kill: tuple[str, int]) -> None:
    """Before the first row, in the first rollout, after the last step before its row."""
    killed_and_resumed("rl", "rl-" + "-".join(map(str, kill)), kill)


def test_a_run_whose_heads_learn_along_survives_sigkill(killed_and_resumed: Any, metrics_of: Any) -> None:
    """In a rollout, right before the heads' updates of a step, and between two of them."""
    path = killed_and_resumed("heads", "heads-killed", ("decode", 40), ("heads", 1), ("head", 3))
    rows = metrics_of(path)
    assert sum(row.get("heads/tokens", 0.0) for row in rows) > 0
    assert sum(row.get("rollout/draft_acceptance", 0.0) for row in rows) > 0


def test_an_rl_run_survives_one_kill_after_another(killed_and_resumed: Any) -> None:
    """Also one that comes while a resumed run has not yet written anything."""
    killed_and_resumed("rl", "rl-often", ("log", 3), ("decode", 2), ("fsync", 8), ("update", 9))


@pytest.mark.parametrize("kill", [("meanwhile", 1), ("finish", 1)], ids=str)
def test_an_rl_run_survives_sigkill_around_a_checkpoint_in_the_background(
    killed_and_resumed: Any, kill: tuple[str, int]
) -> None:
    """Right after it was handed over, and before the last one is waited for."""
    killed_and_resumed("rl", "rl-" + "-".join(map(str, kill)), kill)


def test_a_kill_while_the_first_checkpoint_is_written_leaves_the_records_of_later_steps(
    world: Any, processes: Any, uninterrupted: dict[str, Path], same_run: Any
) -> None:
    """The steps after it went on meanwhile; a resumed run drops what they have written."""
    name, log = "sft-ahead", world.path / "sft-ahead.log"
    command = ["sft", "whole-sft.yaml", f"output_dir=runs/{name}"]
    assert processes.run(*command, cwd=world.path, output=log, kill=("meanwhile", 2)) == -signal.SIGKILL
    run = world.path / "runs" / name
    assert (run / "metrics.jsonl").read_bytes().count(b"\n") == 3, "two steps saved, a third one done meanwhile"
    assert list_checkpoints(run / "checkpoints") == []
    assert processes.run(*command, "--resume", cwd=world.path, output=log) == 0, log.read_text()
    same_run(uninterrupted["sft"], run)


def test_a_supervised_run_survives_sigkill(killed_and_resumed: Any) -> None:
    killed_and_resumed("sft", "sft-killed", ("log", 4))


@pytest.mark.parametrize("seed", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_run_survives_a_kill_in_the_middle_of_any_file(killed_and_resumed: Any, seed: int) -> None:
    """Every file that must be whole goes through fsync and rename; a kill may come before any of them."""
    rng = random.Random(seed)
    event = ("fsync", "replace")[seed % 2]
    killed_and_resumed("rl", f"rl-file-{seed}", (event, rng.randint(3, 14)))


def test_a_half_written_checkpoint_is_never_picked_up(killed_and_resumed: Any, world: Any, processes: Any) -> None:
    log = world.path / "half.log"
    command = ["sft", "whole-sft.yaml", "output_dir=runs/half"]
    # recipe.yaml takes the first two fsyncs, run.json the third, a checkpoint's files the next ones.
    assert processes.run(*command, cwd=world.path, output=log, kill=("fsync", 5)) == -signal.SIGKILL
    checkpoints = world.path / "runs" / "half" / "checkpoints"
    assert [path.name.split("_")[0] for path in checkpoints.iterdir()] == [".draft"], "killed inside the checkpoint"
    assert processes.run(*command, "--resume", cwd=world.path, output=log) == 0
    assert [p.name for p in sorted(checkpoints.iterdir())] == ["step_00000004", "step_00000006"]


def test_a_kill_after_a_random_delay(world: Any, processes: Any, uninterrupted: dict[str, Path], same_run: Any) -> None:
    """At no chosen event at all, but at a moment drawn from the time that the whole run took."""
    name, log = "rl-random", world.path / "rl-random.log"
    command = ["rl", "whole-rl.yaml", f"output_dir=runs/{name}"]
    whole = json.loads((uninterrupted["rl"] / "summary.json").read_text())["stages"][0]["seconds"]
    rng = random.Random(100)
    pid = processes.start(*command, cwd=world.path, output=log)
    time.sleep(whole * rng.uniform(0.2, 0.9))
    os.kill(pid, signal.SIGKILL)
    assert processes.wait(pid) in (-signal.SIGKILL, 0)
    resumed = processes.run(*command, "--resume", cwd=world.path, output=log)
    assert resumed == 0, log.read_text()
    same_run(uninterrupted["rl"], world.path / "runs" / name)


def _interrupted(world: Any, processes: Any, name: str, rows: int, number: int, *argv: object) -> tuple[int, str]:
    """Sends the signal once ``metrics.jsonl`` has that many rows; exit status and output."""
    log = world.path / f"{name}.log"
    metrics = world.path / "runs" / name / "metrics.jsonl"
    pid = processes.start(*argv, cwd=world.path, output=log)
    deadline = time.monotonic() + 60
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < rows:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.002)
    os.kill(pid, number)
    return processes.wait(pid), log.read_text()


@pytest.mark.parametrize(
    ("job", "number"),
    [("rl", signal.SIGTERM), ("sft", signal.SIGUSR1)],
)
def test_a_signal_saves_and_says_how_to_go_on(
    world: Any, processes: Any, uninterrupted: dict[str, Path], same_run: Any, job: str, number: int
) -> None:
    name = f"{job}-stopped-{number}"
    command = [job, f"whole-{job}.yaml", f"output_dir=runs/{name}"]
    if job == "sft":
        # A run of milliseconds is over before a signal reaches it.
        command += ["steps=4000", "checkpoint.every_steps=4000"]
    # The first row can be from before the first step, when there is nothing to save.
    status, output = _interrupted(world, processes, name, 2, number, *command)
    assert status == 128 + number, output
    assert f"go on with: quartet {' '.join(command)}" in output and "--resume" in output
    run = world.path / "runs" / name
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    saved = max(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").iterdir())
    assert f"stopped after step {saved};" in output
    if job == "rl":
        assert processes.run(*command, "--resume", cwd=world.path, output=world.path / "again.log") == 0
        same_run(uninterrupted[job], run)
