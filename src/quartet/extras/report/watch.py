"""A run in the terminal: progress, speed, figures, stragglers, alarms and the newest samples, as they come."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quartet.config.errors import UserError, printable, read_file
from quartet.config.yamls import parse_yaml
from quartet.extras.report.collect import check_run, explain_metric, read_run, stage_dirs, telling
from quartet.extras.report.samples import evenly
from quartet.observe.diagnostics import worker_table
from quartet.observe.follow import StageTails
from quartet.observe.hacking_alarm import read_alarms
from quartet.observe.health import Health
from quartet.observe.rollouts import RolloutRecord, list_steps, read_step
from quartet.observe.spans import Span, seconds_by_name

_SHOWN_METRICS, _SHOWN_STAGES, _SHOWN_SAMPLES = 10, 8, 3
_SPEED_STEPS = 20
_CURVE = 20
"""Characters of a curve."""
_BARS = "▁▂▃▄▅▆▇█"


class Watch:
    """What is known of a run by now.

    Raises:
        UserError: ``run_dir`` holds no run.
    """

    def __init__(self, run_dir: Path) -> None:
        check_run(run_dir)
        self._dir = run_dir
        self._stages: dict[Path, _WatchedStage] = {}
        self._run: dict[str, Any] = {}
        self._notes: list[str] = []

    def poll(self) -> bool:
        """Takes in what is new; returns whether the run goes on."""
        try:
            self._notes = []
            paths = stage_dirs(self._dir)  # raises where the directory is gone
            self._run = read_run(self._dir, self._notes)
            for path in paths:
                self._stages.setdefault(path, _WatchedStage(path)).poll()
        except UserError as error:
            self._notes.append(f"{error.problem}: {error.found}")
        except OSError as error:  # moved or deleted meanwhile: what is known stays on the screen
            self._notes.append(f"the run cannot be read: {error}")
        return self._run.get("status") == "running"

    def screen(self) -> RenderableType:
        run = self._run
        head = Text.assemble(
            (printable(str(run.get("name", self._dir.name))), "bold"),
            f"  {printable(str(run.get('job', '')))}  ",
            (printable(str(run.get("status", "status unknown"))), "green" if run.get("status") == "done" else "cyan"),
            (f"  since {printable(str(run.get('created', '?')))}", "dim"),
        )
        notes = [Text(f"note: {printable(note)}", style="yellow") for note in self._notes]
        known = sorted(self._stages.values(), key=lambda stage: stage.newest_s)
        body: list[RenderableType] = [Text("nothing logged yet")]
        if known:
            body = known[-1].parts(_total_steps(self._dir, known[-1].directory))
        earlier = [Text(f"{stage.directory.name}: {stage.step:,} steps", style="dim") for stage in known[:-1]]
        return Group(head, *notes, *earlier, *body)


class _WatchedStage:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._tails = StageTails(directory)
        self._forget()

    def _forget(self) -> None:
        self.step, self.newest_s = 0, 0.0
        self._series: dict[str, list[tuple[int, float]]] = {}
        self._times: list[float] = []
        self._spans: list[Span] = []
        self._with_workers: list[Span] = []
        self._alarms: list[dict[str, Any]] = []
        self._health = Health()
        self._samples: tuple[int, list[RolloutRecord]] | None = None

    def poll(self) -> None:
        rows, spans = self._tails.metrics.poll(), self._tails.spans.poll()
        if self._tails.restarted:  # resumed from a checkpoint before
            self._forget()
            self._tails = StageTails(self.directory)
            rows, spans = self._tails.metrics.poll(), self._tails.spans.poll()
        for row in rows:
            self.step, self.newest_s = int(row["step"]), row["time_s"]
            self._health.note(self.step, row)
            self._times = [*self._times, row.get("time/step_s", math.nan)][-_SPEED_STEPS:]
            for name in row.keys() - {"step", "time_s"}:
                self._series.setdefault(name, []).append((self.step, row[name]))
        self._with_workers += [span for span in spans if span.worker_s]
        newest = max((span.step for span in (*self._spans, *spans) if span.step is not None), default=0)
        self._spans = [s for s in (*self._spans, *spans) if s.step is not None and s.step >= newest - 1]
        if (self.directory / "alarms.jsonl").exists():
            self._alarms = read_alarms(self.directory / "alarms.jsonl")
        steps = list_steps(self.directory / "rollouts")
        if steps and (self._samples is None or self._samples[0] != steps[-1]):
            self._samples = steps[-1], read_step(self.directory / "rollouts", steps[-1])

    def parts(self, total: int | None) -> list[RenderableType]:
        """The lines of the screen that are about this stage."""
        shown: list[RenderableType] = [self._progress(total)]
        shown += [Text(printable(text), style="yellow") for text in self._tails.troubles]
        shown += [
            Text(f"ALARM at step {row['step']}: {printable(row['text'])}", style="bold red")
            for row in self._alarms[-3:]
        ]
        present = [self._health.findings[name] for name in self._health.present]
        shown += [Text(f"NOT WELL since {printable(finding.text)}", style="bold yellow") for finding in present]
        if self._series:
            shown.append(self._figures())
        if self._spans:
            shown.append(self._stages())
        slow = [row for row in worker_table(self._with_workers) if row.slowest > row.steps / 2]
        for row in slow:
            text = f"{row.worker} is the slowest of {row.stage} in {row.slowest} of {row.steps} steps"
            seconds = f" (median {row.median_s:.3g} s, at most {row.max_s:.3g} s)"
            shown.append(Text(printable(text + seconds), style="yellow"))
        return shown + (self._sampled() if self._samples is not None else [])

    def _progress(self, total: int | None) -> RenderableType:
        known = [seconds for seconds in self._times if math.isfinite(seconds)]
        speed = f"{median(known):.3g} s/step" if known else ""
        left = (
            f"{_clock((total - self.step) * median(known))} left"
            if known and total is not None and total > self.step
            else ""
        )
        age = f"last step {_clock(max(0.0, time.time() - self.newest_s))} ago" if self.newest_s else ""
        count = f"step {self.step:,}" + (f" of {total:,}" if total is not None else "")
        line = Table.grid(padding=(0, 2))
        line.add_row(
            count, ProgressBar(total=total or 1, completed=self.step if total else 0, width=28), speed, left, age
        )
        return line

    def _figures(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("metric", no_wrap=True, ratio=1)
        for column in ("first", "last"):
            table.add_column(column, justify="right", no_wrap=True, min_width=9)
        table.add_column("unit", no_wrap=True)
        table.add_column("curve", no_wrap=True, overflow="crop", min_width=_CURVE)
        always = [name for name in ("rollout/repetition_frac", "language/change") if name in self._series]
        series = {name: [value for _, value in rows] for name, rows in self._series.items()}
        names = [name for name in telling(series, self._health) if name in series and name not in always]
        names = names[: _SHOWN_METRICS - len(always)]
        for name in (names or sorted(self._series)[:_SHOWN_METRICS]) + always:
            values = series[name]
            table.add_row(
                Text(printable(name)), f"{values[0]:.4g}", f"{values[-1]:.4g}", _unit(name), sparkline(values)
            )
        return table

    def _stages(self) -> Text:
        """Where the seconds of the last step with all its spans went."""
        steps = sorted({span.step for span in self._spans if span.step is not None})
        seconds = seconds_by_name(span for span in self._spans if span.step == steps[0])
        longest = sorted(seconds.items(), key=lambda item: -item[1])[:_SHOWN_STAGES]
        return Text(printable("stages  " + "  ".join(f"{name} {took:.3g} s" for name, took in longest)), style="dim")

    def _sampled(self) -> list[RenderableType]:
        """Of the newest rollouts the best, a middling and the worst."""
        assert self._samples is not None
        step, records = self._samples
        scored = sorted(records, key=lambda record: -(record.score if record.score is not None else -math.inf))
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", title=f"samples of step {step}")
        table.title_justify = "left"
        table.add_column("score", justify="right")
        table.add_column("prompt", ratio=1)
        table.add_column("response", ratio=3)
        for record in evenly(scored, _SHOWN_SAMPLES):
            score = "n/a" if record.score is None else f"{record.score:.3g}"
            table.add_row(score, _one_line(record.prompt_text[-80:]), _one_line(record.response_text[:240]))
        return [table]


def watch(run_dir: Path, console: Console, *, once: bool, every_s: float) -> None:
    """Shows the run until it ends; ``once``, and where no terminal is, what is there now.

    Raises:
        UserError: ``run_dir`` holds no run.
    """
    watched = Watch(run_dir)
    goes_on = watched.poll()
    if goes_on and not once and console.is_terminal:
        with Live(watched.screen(), console=console, screen=True, auto_refresh=False) as live:
            while goes_on:
                time.sleep(every_s)
                goes_on = watched.poll()
                live.update(watched.screen(), refresh=True)
    console.print(watched.screen())


def sparkline(values: Sequence[float]) -> str:
    """The values as bars of text; a cross where one is not finite."""
    shown = evenly(values, _CURVE)
    known = [value for value in shown if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] if math.isfinite(value) else "×" for value in shown)


def _unit(name: str) -> str:
    metric = explain_metric(name)
    return "" if metric is None or metric["unit"] == "1" else metric["unit"]


def _one_line(text: str) -> Text:
    return Text(printable(text).replace("\n", "↵ ").replace("\t", " "))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _total_steps(*directories: Path) -> int | None:
    """``steps`` of the stage's recipe, or the run's; None where none says it."""
    for directory in reversed(directories):
        try:
            recipe = parse_yaml(read_file(directory / "recipe.yaml").decode("utf-8"))
        except (UserError, OSError, ValueError, yaml.YAMLError, RecursionError):
            continue
        if isinstance(recipe, dict) and type(recipe.get("steps")) is int:
            return int(recipe["steps"])
    return None
