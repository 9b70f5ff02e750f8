"""What the commands print when they are done."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from quartet.config.errors import escape_control
from quartet.config.plugins import all_jobs

if TYPE_CHECKING:
    from quartet.trainers.evaluation import EvaluationResult


def relative_path(path: Path) -> str:
    """Returns the path relative to the current directory where it lies below it, else in full."""
    full = path.absolute()
    return str(full.relative_to(Path.cwd())) if full.is_relative_to(Path.cwd()) else str(full)


def metric_table(title: str, *columns: str) -> Table:
    """Makes a table with names on the left and numbers in the other columns on the right."""
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    return table


def print_line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(escape_control(text), style=style), soft_wrap=True)


def show_run(path: Path, summary: Mapping[str, Any]) -> None:
    """Prints a run's last metrics and where everything is."""
    console = Console()
    for stage in summary["stages"]:
        table = metric_table(f"{stage['name']}: {stage['seconds']:.1f} s", "metric", "last value")
        kind = re.sub(r"^round_\d+_", "", stage["name"]).replace("_", "-")
        job = all_jobs().get(kind) or all_jobs().get(summary.get("job", ""))
        for name in job.metrics if job is not None else ():
            if name in stage["metrics"]:
                table.add_row(name, f"{stage['metrics'][name]:.4g}")
        console.print(table)
    for note in summary.get("notes", ()):
        print_line(console, f"note: {note}")
    alarm = summary.get("reward_hacking", {})
    if alarm.get("raised"):
        print_line(console, alarm["text"], "bold red")
    made = all_jobs()[summary["job"]].folder if summary.get("job") in all_jobs() else "model"
    print_line(console, f"{made}: {path / made}")
    print_line(console, f"next:  quartet report {shlex.quote(str(path))}")


def show_finished(path: Path, summary: Mapping[str, Any]) -> None:
    """Prints what a run that is done already has found."""
    console = Console()
    print_line(console, f"{path} is done already: there is nothing to do")
    if "figures" not in summary:
        show_run(path, summary)
        return
    for row in summary["figures"]:
        bounds = _bounds(row["low"], row["high"])
        print_line(console, f"{row['figure']}: {row['value']:.4g}" + (f" ({bounds})" if bounds else ""))


def _bounds(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.4g} … {high:.4g}"


def show_evaluation(result: EvaluationResult) -> None:
    """Prints figures with their intervals, and good/same/bad where two models were compared."""
    console = Console()
    compared = ["compared with"] if result.against else []
    table = metric_table(f"{result.num_prompts} prompts", "metric", "value", "interval", *compared)
    others = {figure.name: f"{figure.value:.4g}  {_bounds(figure.low, figure.high)}" for figure in result.against}
    for figure in result.figures:
        row = [escape_control(figure.name), f"{figure.value:.4g}", _bounds(figure.low, figure.high)]
        table.add_row(*row, *([others.get(figure.name, "")] if result.against else []))
    console.print(table)
    if (found := result.comparison) is not None:
        left_out = f", {found.no_verdict} without a verdict" if found.no_verdict else ""
        console.print(
            f"good {found.good} / same {found.same} / bad {found.bad}{left_out}: win rate {found.win_rate:.1%} "
            f"({found.low:.1%} to {found.high:.1%})"
        )
    for note in result.notes:
        print_line(console, f"note: {note}")
    for name in ("answers", *(("against", "comparison") if result.comparison is not None else ())):
        print_line(console, f"{name}: {result.path / name}.jsonl")
