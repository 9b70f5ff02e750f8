"""Runs that a scheduler preempts and starts again with one and the same command, ``--resume=auto``."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from quartet.observe.run_status import ENDED


def status_of(run: Path) -> str:
    return str(json.loads((run / "run.json").read_text())["status"])


@pytest.mark.parametrize("job", ["rl", "sft", "eval"])
def test_one_command_starts_goes_on_and_reports(world: Any, recipes: Any, quartet: Any, job: str) -> None:
    path = world.path / "runs" / f"requeued-{job}"
    content = {
        "rl": lambda: recipes["rl"]("grpo", steps=2),
        "sft": lambda: recipes["sft"](),
        "eval": lambda: {
            "threads": 1,
            "model": {"path": "model"},
            "data": {"path": "prompts.jsonl", "limit": 4},
            "rewards": [{"type": "function", "target": "rewards.py:digits"}],
            "sampling": {"max_new_tokens": 4},
        },
    }[job]()
    command = (job, world.recipe(f"requeued-{job}", content), f"output_dir={path}", "--resume=auto")
    first = quartet(*command)
    assert first.status == 0 and status_of(path) == "done", first.err
    (path / "run.json").write_text((path / "run.json").read_text().replace('"done"', '"interrupted"'))
    assert quartet(*command).status == 0 and status_of(path) == "done"
    left = {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()}
    again = quartet(*command)
    assert again.status == 0 and "is done already: there is nothing to do" in again.out
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()} == left
    if job == "eval":
        assert "eval/score_mean" in again.out
    quartet(*command, "seed=7").expect_user_error("was started with another recipe", "seed: 0 then, 7 now")


@pytest.mark.parametrize("option", ["--resume", "--resume=auto"])
def test_a_directory_with_the_date_cannot_be_found_again(world: Any, recipes: Any, quartet: Any, option: str) -> None:
    recipe = world.recipe("unnamed", recipes["sft"]())
    quartet("sft", recipe, option).expect_user_error("which run to go on with", option, "output_dir is not set")
    quartet("quickstart", option).expect_user_error("nothing to resume", option, "--out")


def test_resuming_what_is_not_there_says_that_it_starts(world: Any, recipes: Any, quartet: Any) -> None:
    """A mistyped directory is seen."""
    recipe = world.recipe("mistyped", recipes["sft"](steps=1))
    outcome = quartet("sft", recipe, "output_dir=runs/mistyped", "--resume")
    assert outcome.status == 0 and "holds nothing to resume: a new run starts" in outcome.out + outcome.err


def test_a_run_whose_process_is_gone_does_not_count_as_running(world: Any, processes: Any, recipes: Any) -> None:
    """However it went, by SIGKILL here: ``run.json`` still says running, and nobody holds the run."""
    run = world.path / "runs" / "gone"
    log, command = world.path / "gone.log", ("sft", "gone.yaml", f"output_dir={run}")
    world.recipe("gone", recipes["sft"]())
    assert processes.run(*command, cwd=world.path, output=log, kill=("log", 4)) == -signal.SIGKILL
    assert status_of(run) == "running"
    assert processes.run("report", run, cwd=world.path, output=log) == 0
    assert ENDED in (run / "report.html").read_text()
    assert processes.run(*command, "--resume=auto", cwd=world.path, output=log) == 0
    assert f"the process that ran it before {ENDED}" in log.read_text()


@pytest.mark.parametrize("seed", range(2))
def test_two_quick_ctrl_c_end_the_command(world: Any, processes: Any, recipes: Any, seed: int) -> None:
    """At any moment and with any gap."""
    rng = random.Random(seed)
    job = ("rl", "sft")[seed % 2]
    name = f"twice-{seed}"
    log = world.path / f"{name}.log"
    recipe = world.recipe(name, recipes[job](steps=100_000))
    pid = processes.start(job, recipe, f"output_dir=runs/{name}", cwd=world.path, output=log)
    time.sleep(rng.uniform(0.0, 1.5))
    for gap in (rng.choice([0.0, 0.001, 0.02, 0.2]), 0.0):
        os.kill(pid, signal.SIGINT)
        time.sleep(gap)
    assert processes.wait(pid) == 130, log.read_text()
    assert "Traceback" not in log.read_text()
    run = world.path / "runs" / name / "run.json"
    assert not run.exists() or json.loads(run.read_text())["status"] == "interrupted"
