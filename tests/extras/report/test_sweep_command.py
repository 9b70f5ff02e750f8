"""`quartet sweep`: which runs there are, what is refused before the first, and what happens to those that fail."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from quartet.config import UserError
from quartet.config.load import load_recipe
from quartet.config.yamls import parse_yaml
from quartet.extras.report import commands
from quartet.extras.report.commands import sweep, sweep_runs

LR = "actor.train.optim.lr=1e-6,3e-6"
Statuses = Callable[..., list[list[str]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Statuses:
    """Takes the place of processes: each run leaves what a run leaves that was begun, and ends with its status."""

    def ends(*statuses: int) -> list[list[str]]:
        calls: list[list[str]] = []

        def run(command: Sequence[str]) -> int:
            calls.append(list(command))
            (out,) = [parse_yaml(word.partition("=")[2]) for word in command if word.startswith("output_dir=")]
            Path(out).mkdir(parents=True, exist_ok=True)
            Path(out, "recipe.yaml").write_text(f"job: rl\nseed: {len(calls)}\n")
            return statuses[len(calls) - 1] if statuses else 0

        monkeypatch.setattr(commands, "_status", run)
        return calls

    return ends


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "story.yaml"
    path.write_text(
        f"job: rl\nseed: 7\noutput_dir: {tmp_path / 'sweep'}\nactor: {{model: {{path: m}}}}\n"
        "data: {path: d.jsonl}\nrewards: [{type: exact_match}]\n"
    )
    return path


def test_every_value_has_every_seed() -> None:
    assert sweep_runs([LR], range(7, 10)) == {
        f"lr={lr}-seed={seed}": [f"actor.train.optim.lr={lr}", f"seed={seed}"]
        for lr in ("1e-6", "3e-6")
        for seed in (7, 8, 9)
    }
    assert list(sweep_runs(["data.path=a/b.jsonl,'c d'", "steps=1,2"], range(1))) == [
        "path=a_b.jsonl-steps=1-seed=0",
        "path=a_b.jsonl-steps=2-seed=0",
        "path=c_d-steps=1-seed=0",
        "path=c_d-steps=2-seed=0",
    ]
    assert list(sweep_runs([], range(3))) == ["seed=0", "seed=1", "seed=2"]


@pytest.mark.parametrize(
    ("over", "seeds", "found"),
    [
        (["actor.train.optim.lr=1e-6"], 3, "--over actor.train.optim.lr=1e-6"),
        (["actor.train.optim.lr"], 3, "--over actor.train.optim.lr"),
        (["steps=[1,2"], 1, "--over steps=[1,2"),
        (["steps=5,5"], 1, "steps=5-seed=0"),
        (["seed=1,2"], 1, "--over seed=1,2"),
        (["output_dir=a,b"], 1, "--over output_dir=a,b"),
        (["steps=1,2", "steps=3,4"], 1, "--over steps=3,4"),
        ([], 1, "1: 1 recipes with 1 seeds"),
        (["steps=1,2,3,4"], 3, "12: 4 recipes with 3 seeds"),
    ],
)
def test_sweeps_that_are_none_are_refused(over: list[str], seeds: int, found: str) -> None:
    with pytest.raises(UserError) as caught:
        sweep_runs(over, range(seeds))
    assert found in caught.value.found and caught.value.remedy


def test_runs_come_one_after_the_other_and_are_compared(
    recipe: Path, started: Statuses, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = started()
    sweep(recipe, ["steps=4"], [LR], seeds=2)
    assert len(calls) == 4 and all(call[:4] == [sys.executable, "-m", "quartet", "rl"] for call in calls)
    for call, seed, lr in zip(calls, (7, 8, 7, 8), (1e-6, 1e-6, 3e-6, 3e-6), strict=True):
        assert call[-1] == "--resume=auto", "the same command goes on with a sweep that was stopped"
        loaded: Any = load_recipe("rl", call[4], call[5:-1])
        assert (loaded.seed, loaded.actor.train.optim.lr, loaded.steps) == (seed, lr, 4)
    page = recipe.parent / "sweep" / "comparison.html"
    assert page.is_file() and str(page) in capsys.readouterr().out


def test_a_run_that_fails_is_named_and_the_others_are_compared(recipe: Path, started: Statuses) -> None:
    calls = started(0, 2, 0, 1)
    with pytest.raises(UserError, match="2 of 4 runs") as caught:
        sweep(recipe, [], [LR], seeds=2)
    assert caught.value.found == "lr=1e-6-seed=8, lr=3e-6-seed=8" and len(calls) == 4
    assert (recipe.parent / "sweep" / "comparison.html").is_file()


@pytest.mark.parametrize(("status", "ends_with"), [(130, 130), (-15, 143)])
def test_a_signal_ends_the_sweep(recipe: Path, started: Statuses, status: int, ends_with: int) -> None:
    calls = started(0, status)
    with pytest.raises(typer.Exit) as stop:
        sweep(recipe, [], [LR], seeds=2)
    assert stop.value.exit_code == ends_with and len(calls) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_run_under_way_saves_before_a_signal_ends_the_sweep(tmp_path: Path, number: signal.Signals) -> None:
    saves = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), pathlib.Path('saved').touch(), sys.exit(130)))\n"
        "pathlib.Path('begun').touch()\n"
        "time.sleep(60)"
    )

    def stop() -> None:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=stop)
    sender.start()
    command = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{saves}"]
    assert commands._status(command) == 130 and (tmp_path / "saved").exists()
    sender.join()


def test_a_mistake_in_the_last_value_is_told_before_the_first_run(recipe: Path, started: Statuses) -> None:
    calls = started()
    with pytest.raises(UserError, match="is not valid"):
        sweep(recipe, [], ["actor.train.optim.lr=1e-6,fast"])
    with pytest.raises(UserError, match="this machine"):
        sweep(recipe, ["output_dir=s3://bucket/x"], [LR])
    assert calls == []
