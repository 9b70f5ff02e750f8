"""The command line itself: help, statuses, and what Ctrl-C prints."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from quartet.cli import main as cli
from quartet.cli.options import GROUPS, resume_argument
from quartet.config import UserError
from quartet.config.load import load_recipe
from quartet.config.run import SupervisedRecipe
from quartet.trainers.run import Interrupted
from quartet.trainers.signals import STOP_SIGNALS

cli.add_plugins()
COMMANDS = [name for names in GROUPS.values() for name in names]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["quartet", *argv])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


def test_help_names_every_command(run: Run) -> None:
    registered: Any = typer.main.get_command(cli.app)
    assert sorted(registered.commands) == sorted(COMMANDS), "one that is in no group is not in the help"
    status, out, _ = run("--help")
    assert status == 0
    assert all(command in out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(run: Run, command: str) -> None:
    status, out, _ = run(command, "--help")
    assert status == 0 and len(out.splitlines()) > 5


@pytest.mark.parametrize("argv", [["tarin"], ["sft"], ["sft", "a.yaml", "--resum"], ["generate", "--model", "x"]])
def test_wrong_usage_is_status_2_without_a_traceback(run: Run, argv: list[str]) -> None:
    status, _, err = run(*argv)
    assert status == 2 and "Traceback" not in err and err


def test_a_users_error_is_status_2_and_three_parts(run: Run, tmp_path: Path) -> None:
    status, _, err = run("sft", str(tmp_path / "nothing.yaml"))
    assert status == 2
    assert err.splitlines()[0].startswith("error: ") and "  found: " in err and "  do: " in err


def test_resume_of_a_quickstart_needs_its_directory(run: Run) -> None:
    status, _, err = run("quickstart", "--resume")
    assert status == 2 and "--out" in err


@pytest.mark.parametrize(("option", "expected"), [(None, False), ("--resume", True), ("--resume=auto", "auto")])
@pytest.mark.parametrize("command", ["sft", "rl", "iterated-reward-model"])
def test_the_value_of_resume_may_be_left_out(
    monkeypatch: pytest.MonkeyPatch, command: str, option: str | None, expected: object
) -> None:
    given: list[object] = []
    monkeypatch.setattr(cli, "_run", lambda *arguments: given.append(resume_argument(arguments[-1])))
    monkeypatch.setattr(sys, "argv", ["quartet", command, *([option] if option else []), "a.yaml", "steps=9"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert (stop.value.code or 0) == 0 and given == [expected]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_where_nothing_can_be_saved_is_the_exit_status(
    run: Run, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def load(*_: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(10)

    late = [signal.getsignal(n) for n in STOP_SIGNALS]
    monkeypatch.setattr(cli, "_run", load)
    try:
        status, _, err = run("sft", "a.yaml")
    finally:
        for n, handler in zip(STOP_SIGNALS, late, strict=True):
            signal.signal(n, handler)
    assert status == 128 + number and "stopped at once" in err


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["sft", "a.yaml"], ["sft", "a.yaml", "output_dir=runs/x y", "--resume"]),
        (["sft", "a.yaml", "steps=9"], ["sft", "a.yaml", "steps=9", "output_dir=runs/x y", "--resume"]),
        (["sft", "a.yaml", "output_dir=runs/x y"], ["sft", "a.yaml", "output_dir=runs/x y", "--resume"]),
        (["sft", "a.yaml", "--resume"], ["sft", "a.yaml", "output_dir=runs/x y", "--resume"]),
        (["sft", "a.yaml", "--resume=auto"], ["sft", "a.yaml", "output_dir=runs/x y", "--resume"]),
    ],
)
def test_an_interrupted_run_prints_a_command_that_resumes_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, argv: list[str], expected: list[str]
) -> None:
    monkeypatch.setattr(cli, "_run", raising(Interrupted(Path("runs/x y"), 7)))
    status, _, err = run(*argv)
    assert status == 130 and "stopped after step 7" in err
    command = err.split("go on with: ")[1].strip()
    assert shlex.split(command) == ["quartet", *expected]


@pytest.mark.parametrize("given", [[], ["--out", "q"]])
def test_an_interrupted_quickstart_is_resumed_by_its_own_options(
    run: Run, monkeypatch: pytest.MonkeyPatch, given: list[str], tmp_path: Path
) -> None:
    from quartet.extras.quickstart.run import Quickstart

    monkeypatch.chdir(tmp_path)
    Quickstart(1, tmp_path / "q")._claim()
    monkeypatch.setattr(Quickstart, "run", raising(Interrupted(Path("q"), 3)))
    status, _, err = run("quickstart", "--seed", "1", *given)
    assert status == 130
    command = shlex.split(err.split("go on with: ")[1])
    assert command == ["quartet", "quickstart", "--seed", "1", "--out", "q", "--resume"]


def test_a_bug_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_run", raising(ZeroDivisionError("ours")))
    monkeypatch.setattr(sys, "argv", ["quartet", "sft", "a.yaml"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_a_users_error_from_anywhere_is_printed_whole(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    error = UserError("it broke", found="pieces", remedy="glue")
    monkeypatch.setattr(cli, "_run", raising(error))
    assert run("rl", "a.yaml")[2] == "error: it broke\n  found: pieces\n  do: glue\n"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rank 0 of six processes on three nodes."""
    sizes = {"WORLD_SIZE": 6, "LOCAL_WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 3}
    for name, value in ({"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "job"} | sizes).items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("job", ["rl", "sft", "reward-model", "process-reward", "preference"])
def test_under_torchrun_what_asks_for_ray_is_run_once_more_on_the_allocations_cluster(
    job: str, launched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quartet.cluster import torchrun

    seen: list[Any] = []
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("" if job == "rl" else "cluster: {type: ray}")
    monkeypatch.setattr(torchrun, "run_under_torchrun", lambda command, seat: seen.append((command, seat.rank)) or 7)
    monkeypatch.setattr(sys, "argv", ["quartet", job, str(recipe), "seed=3", "--resume"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 7
    ours = [sys.executable, "-m", "quartet", job, str(recipe), "seed=3", "--resume"]
    assert seen == [([*ours, "cluster.type=ray", "cluster.address=null"], 0)]


@pytest.mark.parametrize("job", ["sft", "reward-model", "process-reward", "preference"])
def test_under_torchrun_other_jobs_without_sampling_take_its_processes(
    job: str, launched: None, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("processes: 1")
    monkeypatch.setattr(cli, "_run", lambda name, job, path, overrides, resume: seen.append(overrides))
    run(job, str(recipe), "seed=3")
    assert seen == [["seed=3", "cluster={type: torchrun}", "processes=2", "nodes=3"]]
    made = load_recipe(job, recipe, [*seen[0], "sharding.shard=6"])
    assert isinstance(made, SupervisedRecipe) and made.cluster.type == "torchrun"


@pytest.mark.parametrize("job", ["eval", "iterated-reward-model"])
def test_under_torchrun_a_job_of_one_process_is_refused(job: str, launched: None, run: Run) -> None:
    assert f"quartet {job} runs in one process\n  found: 6 processes of torchrun" in run(job, "a.yaml")[2]


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, {"GOMP_SPINCOUNT": "1000"})]
    + [({name: value}, {name: value}) for name, value in (("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "7"))],
)
def test_threads_that_wait_give_their_core_away_unless_the_environment_says_how_they_wait(
    given: dict[str, str], expected: dict[str, str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", dict(given))
    run("--version")
    assert os.environ == expected


def test_torch_is_loaded_after_its_threads_are_told_how_to_wait() -> None:
    """Its runtime reads the environment once, when it is loaded. Neither do commands load it, nor any recipe."""
    code = "import sys; from quartet.cli.main import add_plugins; add_plugins()\n"
    code += "sys.exit(bool({'torch', 'transformers', 'quartet.config.recipe'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
