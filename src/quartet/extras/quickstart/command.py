"""`quartet quickstart`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quartet.cli.options import Resume, as_argument
from quartet.cli.show import line, metric_table, shown_path
from quartet.config import UserError
from quartet.config.errors import printable

if TYPE_CHECKING:
    from quartet.extras.quickstart.run import QuickstartResult

_TITLES = {
    "sft": "1  SFT on imperfect demonstrations",
    "evaluate_sft": "   evaluation",
    "reward_model": "2  reward model from noisy pairs",
    "rl": "3  PPO against the reward model",
    "evaluate_rl": "   evaluation",
}


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
        job = Quickstart(seed, path, resume=as_argument(resume), progress=progress)
        result = (job.finished() if resume == "auto" else None) or job.run()
    _show(result)


def _show(result: QuickstartResult) -> None:
    """Prints the table of the three stages, completions side by side, and what to try next."""
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
    stages = metric_table("Stages", "stage", "seconds")
    stages.add_column("result")
    for stage in summary["stages"]:
        stages.add_row(_TITLES[stage["name"]], f"{stage['seconds']:.1f}", _result(stage["metrics"]))
    stages.add_row("all", f"{summary['seconds']:.1f}", "")
    console.print(stages)
    changed = [e for e in result.examples if e[1] != e[2]][:5] or result.examples[:5]
    sides = Table(title="The same prompts before and after PPO (greedy)", title_justify="left")
    for column in ("prompt", "after SFT", "after PPO"):
        sides.add_column(column, overflow="fold")
    for example in changed:
        sides.add_row(*(Text(printable(cell)) for cell in example))
    console.print(sides)
    if (report := result.path / "report.html").exists():
        line(console, f"report: {shown_path(report)}   (open it in a browser: every token, every step)")
    command = f'quartet generate --model {shlex.quote(shown_path(model))} --prompt "57+68=" --temperature 0'
    line(console, f"next:   {command}")


def _result(metrics: Mapping[str, float]) -> str:
    if "eval/exact_match@0.0" in metrics:
        return f"exact match {metrics['eval/exact_match@0.0']:.1%} greedy"
    if "eval/accuracy" in metrics:
        return f"{metrics['eval/accuracy']:.1%} of clean held-out pairs ranked right"
    if "reward/score_mean" in metrics:
        return f"mean score {metrics['reward/score_mean']:.2f}, KL {metrics.get('kl/ref', 0.0):.3f} nats/token"
    return f"loss {metrics['loss/sft']:.3f} nats/token"
