"""`quartet report`, `watch`, `compare` and `replay`: what a run does and did."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from quartet.config import UserError
from quartet.config.printable import printable

RunPath = Annotated[Path, typer.Argument(help="Run directory.", show_default=False)]


def report(
    run: RunPath,
    out: Annotated[Path | None, typer.Option(help="Where to write; default <run>/report.html.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Serve a page to this machine that follows the run.")] = False,
    port: Annotated[int, typer.Option(help="Of --live; 0 takes a free one.", min=0, max=65535)] = 0,
) -> None:
    """One HTML file: curves, timing, every token."""
    if not live:
        from quartet.observe.report import build_report

        typer.echo(build_report(run, out))
        return
    if out is not None:
        raise UserError(
            "a live page is served, and not written",
            found=f"--live and --out {out}",
            remedy="leave one of them out",
        )
    from quartet.observe.report.live import LiveServer

    with LiveServer(run, port) as server:
        typer.echo(f"the report of {printable(str(run))} is at {server.url} (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("ended; the run goes on by itself")


def watch(
    run: RunPath,
    once: Annotated[bool, typer.Option("--once", help="Print one screen and end.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
) -> None:
    """A run in the terminal: progress, speed, alarms, newest samples."""
    from rich.console import Console

    from quartet.observe.watch import watch as follow

    try:
        follow(run, Console(), once=once, every_s=every)
    except KeyboardInterrupt:
        typer.echo("ended; the run goes on by itself")


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, two or more.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Where to write; default comparison.html here.")] = None,
) -> None:
    """One HTML file of several runs: recipes, curves, answers."""
    from quartet.observe.report.compare import build_comparison

    typer.echo(build_comparison(runs, out))


def replay(
    run: RunPath,
    step: Annotated[int | None, typer.Option(help="Step; by default the newest that was kept.", min=0)] = None,
    sample: Annotated[int, typer.Option(help="Trajectory of the step, from 0.", min=0)] = 0,
    stage: Annotated[str | None, typer.Option(help="Of a run of several stages.")] = None,
    delay: Annotated[float, typer.Option(help="Seconds between two tokens.", min=0.0)] = 0.0,
) -> None:
    """A kept trajectory token by token: log-probability, reward, advantage, value."""
    from quartet.observe.replay import kept_trajectory, replay_lines

    try:
        for line in replay_lines(kept_trajectory(run, step, sample, stage)):
            typer.echo(printable(line))
            time.sleep(delay)
    except KeyboardInterrupt:
        typer.echo("ended")
