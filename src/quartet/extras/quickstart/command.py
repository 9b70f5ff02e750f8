"""`quartet quickstart`."""

from __future__ import annotations

import shlex
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from quartet.cli.options import Resume, resume_argument
from quartet.cli.show import metric_table, print_line, relative_path
from quartet.config import UserError

if TYPE_CHECKING:
    from quartet.extras.quickstart.run import QuickstartResult


def quickstart(
    seed: Annotated[int, typer.Option(help="Decides data, weights and sampling.", min=0, max=2**32 - 1)] = 0,
    out: Annotated[Path | None, typer.Option(help="Output directory; default runs/quickstart-<date>.")] = None,
    resume: Resume = None,
) -> None:
    """SFT, reward model and PPO on a toy task."""
    if resume and out is None:
        found = "--resume=auto" if resume == "auto" else "--resume"
        raise UserError("nothing to resume", found=f"{found} without --out", remedy="name the directory with --out")
    path = out or Path("runs") / f"quickstart-{datetime.now():%Y%m%d-%H%M%S}"
    from quartet.extras.quickstart.run import Quickstart
    from quartet.observe.progress import Progress

    with Progress() as progress:
        result = Quickstart(seed, path, resume=resume_argument(resume), progress=progress).run()
    _show(result)


def _show(result: QuickstartResult) -> None:
    """Prints exact match before and after, and what to try next."""
    console, summary, model = Console(), result.summary, result.path / "rl" / "model"
    match = summary["exact_match"]
    table = metric_table(f"Exact match on {summary['num_prompts']} held-out sums", "decoding", "after SFT", "after PPO")
    for temperature, value in match["sft"].items():
        label = "greedy" if float(temperature) == 0 else f"temperature {temperature}"
        table.add_row(label, f"{value:.1%}", f"{match['ppo'][temperature]:.1%}")
    console.print(table)
    gsb = summary["good_same_bad"]
    console.print(
        f"PPO greedy is {100 * match['gain']:+.1f} points over the best of SFT; against SFT it is "
        f"good {gsb['good']} / same {gsb['same']} / bad {gsb['bad']}"
    )
    if (report := result.path / "report.html").exists():
        print_line(console, f"report: {relative_path(report)}   (open it in a browser: every token, every step)")
    command = f'quartet generate --model {shlex.quote(relative_path(model))} --prompt "57+68=" --temperature 0'
    print_line(console, f"next:   {command}")
