"""`quartet report`, `watch`, `compare`, `sweep` and `replay`: what runs do and did."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
import yaml

from quartet.config import UserError
from quartet.config.errors import printable
from quartet.trainers.signals import stop_signals

RunPath = Annotated[Path, typer.Argument(help="Run directory.", show_default=False)]


def report(
    run: Annotated[str, typer.Argument(help="Run directory, or its URL.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Where to write; default <run>/report.html.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Serve a page to this machine that follows the run.")] = False,
    port: Annotated[int, typer.Option(help="Of --live; 0 takes a free one.", min=0, max=65535)] = 0,
) -> None:
    """One HTML file: curves, timing, every token."""
    from quartet.config.strict import is_url
    from quartet.extras.report.build import build_report

    if not live:
        typer.echo(_written_report(run, out) if is_url(run) else build_report(Path(run), out))
        return
    if is_url(run):
        raise UserError("a live page follows a run on this machine", found=f"--live {run}", remedy="leave --live out")
    if out is not None:
        raise UserError(
            "a live page is served, and not written",
            found=f"--live and --out {out}",
            remedy="leave one of them out",
        )
    from quartet.extras.report.watch import LiveServer

    with LiveServer(Path(run), port) as server:
        typer.echo(f"the report of {printable(run)} is at {server.url} (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("closed; this does not stop the run")


def _written_report(url: str, out: Path | None) -> Path | str:
    """Returns where the report of a run in object storage was written: ``out``, or beside the run."""
    from quartet.config.plugins import storage
    from quartet.extras.report.build import build_report

    at_url = storage(url)
    written = build_report(at_url.records(), out)
    if out is not None:
        return written
    at_url.upload(written, written.name)
    return f"{url.rstrip('/')}/{written.name}"


def watch(
    run: RunPath,
    once: Annotated[bool, typer.Option("--once", help="Print one screen and end.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
) -> None:
    """A run in the terminal, as it goes on."""
    from rich.console import Console

    from quartet.extras.report.watch import watch as follow

    try:
        follow(run, Console(), once=once, every_s=every)
    except KeyboardInterrupt:
        typer.echo("closed; this does not stop the run")


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, two or more.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Where to write; default comparison.html here.")] = None,
) -> None:
    """One HTML file of several runs."""
    from quartet.extras.report.compare import build_comparison

    typer.echo(build_comparison(runs, out))


def sweep(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML) with a job.", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides of all runs: key=value.")] = None,
    over: Annotated[list[str] | None, typer.Option(help="key=value,value: a run for each; may be repeated.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each recipe, with seeds from its own on.", min=1)] = 1,
) -> None:
    """Runs of a recipe with several values and seeds."""
    from quartet.config.load import job_named, load_recipe
    from quartet.config.strict import is_url
    from quartet.config.yamls import one_line
    from quartet.extras.report.compare import build_comparison

    job, base = job_named(recipe, overrides or ()), list(overrides or ())
    first = load_recipe(job, recipe, base)
    if is_url(first.output_dir):
        raise UserError(
            "a sweep writes to this machine", found=str(first.output_dir), remedy="name a directory: output_dir=DIR"
        )
    out = Path(first.output_dir or Path("runs") / f"sweep-{recipe.stem}")
    runs = sweep_runs(over or (), range(first.seed, first.seed + seeds))
    for name, changes in runs.items():  # a mistake in the last one is told before the first begins
        load_recipe(job, recipe, [*base, *changes, f"output_dir={one_line(str(out / name))}"])
    failed = []
    for number, (name, changes) in enumerate(runs.items(), start=1):
        typer.echo(f"run {number} of {len(runs)}: {printable(name)}")
        words = [*base, *changes, f"output_dir={one_line(str(out / name))}", "--resume=auto"]
        status = _status([sys.executable, "-m", "quartet", job, str(recipe), *words])
        if status < 0 or status > 128:
            typer.echo("the sweep was stopped: the same command goes on with it", err=True)
            raise typer.Exit(128 - status if status < 0 else status)
        failed += [name] if status else []
    if len(failed) < len(runs) - 1:
        written = build_comparison([out / name for name in runs if name not in failed], out / "comparison.html")
        typer.echo(written)
        if sys.stdout.isatty() and (sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()):
            typer.launch(str(written))
    if failed:
        raise UserError(
            f"{len(failed)} of {len(runs)} runs of the sweep failed",
            found=", ".join(failed),
            remedy="see what they said; the same command does them again, and no other",
        )


def _status(command: Sequence[str]) -> int:
    """Runs a command to its end; one that a signal stops may save first. Returns its exit status."""
    with stop_signals() as signals, signals.graceful(), subprocess.Popen(command) as process:
        is_told = False
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=0.2)
            if signals.requested and not is_told:
                process.send_signal(signal.SIGTERM)  # not SIGINT, of which a terminal's second one stops at once
                is_told = True


def sweep_runs(over: Sequence[str], seeds: range) -> dict[str, list[str]]:
    """Returns the overrides of each run by the name of its directory.

    Raises:
        UserError: no values, or values of what differs anyway, or runs that have the same name, or too few or too many
            to compare.
    """
    from quartet.config.yamls import one_line, parse_yaml
    from quartet.extras.report.compare import MAX_RUNS

    axes: list[list[tuple[str, str]]] = []
    for text in over:
        key, _, listed = text.partition("=")
        try:
            values = parse_yaml(f"[{listed}]")
        except (yaml.YAMLError, ValueError):
            values = None
        if not key or not isinstance(values, list) or len(values) < 2:
            raise UserError(
                "a sweep needs two values of a key, or more",
                found=f"--over {text}",
                remedy="for example --over actor.train.optim.lr=1e-6,3e-6",
            )
        if key in ("seed", "output_dir", *(axis[0][0] for axis in axes)):
            raise UserError(
                "a sweep cannot go over this key" if key in ("seed", "output_dir") else "a sweep goes over a key once",
                found=f"--over {text}",
                remedy="each run has its own output_dir; --seeds N with seed=FIRST for seeds; all values of a key in "
                "one --over",
            )
        axes.append([(key, one_line(value)) for value in values])
    found: dict[str, list[str]] = {}
    for chosen, seed in itertools.product(itertools.product(*axes), seeds):
        parts = [f"{key.rpartition('.')[2]}={value}" for key, value in chosen]
        name = re.sub(r"[^\w.=+-]", "_", "-".join([*parts, f"seed={seed}"]))
        if name in found:
            raise UserError("two runs of the sweep are the same", found=name, remedy="name each value once")
        found[name] = [*(f"{key}={value}" for key, value in chosen), f"seed={seed}"]
    if not 2 <= len(found) <= MAX_RUNS:
        raise UserError(
            f"a sweep has 2 to {MAX_RUNS} runs, which are compared",
            found=f"{len(found)}: {len(found) // len(seeds)} recipes with {len(seeds)} seeds",
            remedy="name values with --over, or more or fewer --seeds",
        )
    return found


def replay(
    run: RunPath,
    step: Annotated[int | None, typer.Option(help="Step; by default the newest that was kept.", min=0)] = None,
    sample: Annotated[int, typer.Option(help="Trajectory of the step, from 0.", min=0)] = 0,
    stage: Annotated[str | None, typer.Option(help="Of a run of several stages.")] = None,
    delay: Annotated[float, typer.Option(help="Seconds between two tokens.", min=0.0)] = 0.0,
) -> None:
    """A kept trajectory, token by token."""
    from quartet.extras.report.compare import kept_trajectory, replay_lines

    try:
        for line in replay_lines(kept_trajectory(run, step, sample, stage)):
            typer.echo(printable(line))
            time.sleep(delay)
    except KeyboardInterrupt:
        typer.echo("ended")
