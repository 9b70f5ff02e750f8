"""`quartet report`, `watch`, `compare` and `replay`: what runs do and did."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quartet.config.errors import escape_control

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
    from quartet.extras.report.watch import LiveServer

    with LiveServer(Path(run), port) as server:
        typer.echo(f"the report of {escape_control(run)} is at {server.url} (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("closed; this does not stop the run")


def _written_report(url: str, out: Path | None) -> Path | str:
    """Returns where the report of a run in object storage was written: ``out``, or beside the run."""
    from quartet.config.plugins import storage_for
    from quartet.extras.report.build import build_report

    at_url = storage_for(url)
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


def replay(
    run: RunPath,
    step: Annotated[int | None, typer.Option(help="Step; by default the newest that was kept.", min=0)] = None,
    sample: Annotated[int, typer.Option(help="Trajectory of the step, from 0.", min=0)] = 0,
) -> None:
    """A kept trajectory, token by token."""
    from quartet.extras.report.compare import kept_trajectory, replay_lines

    for line in replay_lines(kept_trajectory(run, step, sample)):
        typer.echo(escape_control(line))
