"""A run that goes on: in the terminal, and as the report's page with what has come since, over HTTP."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quartet.config.errors import UserError, escape_control
from quartet.config.yamls import parse_yaml
from quartet.extras.report.build import (
    ReportLimits,
    StageFiles,
    check_run,
    collect_head,
    collect_run,
    collect_stage,
    evenly,
    explain,
    read_run,
    render_page,
    stage_dirs,
    telling,
)
from quartet.observe.health import examine_health, read_alarms
from quartet.observe.rollouts import RolloutRecord, list_rollout_steps, read_rollout_step
from quartet.observe.spans import seconds_by_name

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
        self._notes = []
        try:
            for path in stage_dirs(self._dir):  # raises where the directory is gone
                self._stages.setdefault(path, _WatchedStage(path)).poll()
            self._run = read_run(self._dir, self._notes)
        except (UserError, OSError) as error:  # moved or deleted meanwhile: what is known stays on the screen
            self._notes.append(f"the run cannot be read: {error}")
        return self._run.get("status") == "running"

    def screen(self) -> RenderableType:
        run = self._run
        head = Text.assemble(
            (escape_control(str(run.get("name", self._dir.name))), "bold"),
            f"  {escape_control(str(run.get('job', '')))}  ",
            (
                escape_control(str(run.get("status", "status unknown"))),
                "green" if run.get("status") == "done" else "cyan",
            ),
        )
        notes = [Text(f"note: {escape_control(note)}", style="yellow") for note in self._notes]
        known = sorted(self._stages.values(), key=lambda stage: stage.newest_s)
        body = known[-1].parts(_total_steps(self._dir, known[-1].files.directory)) if known else []
        return Group(head, *notes, *(body or [Text("nothing logged yet")]))


class _WatchedStage:
    def __init__(self, directory: Path) -> None:
        self.files = StageFiles(directory)
        self._alarms: list[dict[str, Any]] = []
        self._samples: tuple[int, list[RolloutRecord]] = (0, [])

    @property
    def newest_s(self) -> float:
        """Unix time of the newest row."""
        return self.files.rows[-1]["time_s"] if self.files.rows else 0.0

    def poll(self) -> None:
        self.files.poll()
        directory = self.files.directory
        if (directory / "alarms.jsonl").exists():
            self._alarms = read_alarms(directory / "alarms.jsonl")
        steps = list_rollout_steps(directory / "rollouts")
        if steps and self._samples[0] != steps[-1]:
            self._samples = steps[-1], read_rollout_step(directory / "rollouts", steps[-1])

    def parts(self, total: int | None) -> list[RenderableType]:
        """Returns the lines of the screen that are about this stage."""
        health = examine_health(self.files.rows)
        shown: list[RenderableType] = [self._progress(total)]
        shown += [Text(escape_control(text), style="yellow") for text in self.files.troubles]
        shown += [
            Text(f"ALARM at step {row['step']}: {escape_control(row['text'])}", style="bold red")
            for row in self._alarms[-3:]
        ]
        present = [health.findings[name] for name in health.present]
        shown += [Text(f"NOT WELL since {escape_control(finding.text)}", style="bold yellow") for finding in present]
        series: dict[str, list[float]] = {}
        for row in self.files.rows:
            for name in row.keys() - {"step", "time_s"}:
                series.setdefault(name, []).append(row[name])
        names = [name for name in telling(series, health) if name in series] or sorted(series)
        if names:
            shown.append(_figures({name: series[name] for name in names[:_SHOWN_METRICS]}))
        return [*shown, *self._stages(), *self._sampled()]

    def _progress(self, total: int | None) -> RenderableType:
        rows = self.files.rows
        step = int(rows[-1]["step"]) if rows else 0
        known = [row["time/step_s"] for row in rows[-_SPEED_STEPS:] if "time/step_s" in row]
        speed = f"{median(known):.3g} s/step" if known else ""
        left = f"{_clock((total - step) * median(known))} left" if known and total is not None and total > step else ""
        age = f"last step {_clock(max(0.0, time.time() - self.newest_s))} ago" if rows else ""
        count = f"step {step:,}" + (f" of {total:,}" if total is not None else "")
        line = Table.grid(padding=(0, 2))
        line.add_row(count, ProgressBar(total=total or 1, completed=step if total else 0, width=28), speed, left, age)
        return line

    def _stages(self) -> list[RenderableType]:
        """Shows where the seconds of the last step but one, which has all its spans, went."""
        steps = sorted({span.step for span in self.files.spans if span.step is not None})[-2:]
        if not steps:
            return []
        seconds = seconds_by_name(span for span in self.files.spans if span.step == steps[0])
        longest = sorted(seconds.items(), key=lambda item: -item[1])[:_SHOWN_STAGES]
        return [
            Text(
                escape_control("stages  " + "  ".join(f"{name} {took:.3g} s" for name, took in longest)),
                style="dim",
            )
        ]

    def _sampled(self) -> list[RenderableType]:
        """Shows the best of the newest rollouts, a middling one and the worst."""
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
        return [table] if records else []


def _figures(series: dict[str, list[float]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("metric", no_wrap=True, ratio=1)
    for column in ("first", "last"):
        table.add_column(column, justify="right", no_wrap=True, min_width=9)
    table.add_column("curve", no_wrap=True, overflow="crop", min_width=_CURVE)
    for name, values in series.items():
        table.add_row(Text(escape_control(name)), f"{values[0]:.4g}", f"{values[-1]:.4g}", sparkline(values))
    return table


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
    """Returns the values as bars of text; a cross where one is not finite."""
    shown = evenly(values, _CURVE)
    known = [value for value in shown if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] if math.isfinite(value) else "×" for value in shown)


def _one_line(text: str) -> Text:
    return Text(escape_control(text).replace("\n", "↵ ").replace("\t", " "))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _total_steps(*directories: Path) -> int | None:
    """Returns ``steps`` of the stage's recipe, or the run's; None where none says it."""
    for directory in reversed(directories):
        with suppress(OSError, ValueError, TypeError, LookupError, yaml.YAMLError):
            return int(parse_yaml((directory / "recipe.yaml").read_text("utf-8"))["steps"])
    return None


POLL_S = 0.5
"""The run's files are looked at no more often than that."""


class LiveRun:
    """A run as page and news; safe to ask from several threads.

    Each part of the page (a stage's metrics, timing, …) is kept with the number of its last change, so that what a page
    lacks are the parts with higher numbers than it has seen. Tokens come in parts of some steps, the newest of which
    are kept.

    Raises:
        UserError: ``run_dir`` holds no run.
    """

    def __init__(self, run_dir: Path) -> None:
        check_run(run_dir)
        self._dir, self._limits = run_dir, ReportLimits()
        self._lock = threading.Lock()
        self._count = 0
        self._parts: dict[tuple[str, str, int], tuple[int, dict[str, Any]]] = {}
        self._stages: dict[str, tuple[StageFiles, set[int]]] = {}
        self._noted: dict[str, None] = {}  # what of the stages cannot be read, in the order in which it was met
        self._polled_s = float("-inf")

    def page(self) -> str:
        """Writes the report of what is there now; errors as of ``collect_run``."""
        with self._lock:
            self._poll()
            return render_page({**collect_run(self._dir, self._limits), "live": self._count}, live=True)

    def news(self, after: int) -> dict[str, Any]:
        """Returns the parts that have changed since there had been ``after`` changes, and how many there are now."""
        with self._lock:
            self._poll()
            if after > self._count:  # of another server
                return {"next": self._count, "news": [{"reload": True}]}
            return {"next": self._count, "news": [part for number, part in self._parts.values() if number > after]}

    def _poll(self) -> None:
        if time.monotonic() - self._polled_s < POLL_S:
            return
        # Files come and go while a run is moved or deleted: pages keep what they have.
        with suppress(OSError, UserError):
            for path in stage_dirs(self._dir):
                self._poll_stage(path)
            notes = list(self._noted)
            self._tell("", "head", {**collect_head(self._dir, notes), "notes": notes})
        self._polled_s = time.monotonic()

    def _poll_stage(self, path: Path) -> None:
        files, told = self._stages.setdefault(path.name, (StageFiles(path), set()))
        steps = list_rollout_steps(path / "rollouts")
        told.intersection_update(steps)  # a resume deletes steps and makes them again
        fresh = [step for step in steps if step not in told]
        if not (files.poll() or fresh):
            return
        found = collect_stage(files, self._limits, self._noted.setdefault, fresh[-self._limits.steps :])
        told.update(fresh)
        names = found["metrics"]["series"] if found["metrics"] else ()
        self._tell(path.name, "metrics", {"metrics": found["metrics"], "explained": explain(names)})
        for kind in ("health", "timing", "alarms"):
            self._tell(path.name, kind, {kind: found[kind]})
        if found["rollouts"] is not None:
            self._tell(path.name, "rollouts", {"rollouts": found["rollouts"]}, fresh[-1])
        of_tokens = [key for key in self._parts if key[:2] == (path.name, "rollouts")]
        for key in of_tokens[: -self._limits.steps]:
            del self._parts[key]

    def _tell(self, stage: str, kind: str, part: dict[str, Any], step: int = 0) -> None:
        piece = {"stage": stage, **part} if stage else part
        if self._parts.get((stage, kind, step), (0, None))[1] != piece:
            self._count += 1
            self._parts[stage, kind, step] = self._count, piece


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        if urlsplit(f"//{self.headers.get('Host', '')}").hostname not in (
            "127.0.0.1",
            "localhost",
        ):  # a page of another site whose name leads here must not read the run
            self._answer(403, "text/plain", f"the report is at {self.server.url}")
        elif address.path == "/":
            try:
                self._answer(200, "text/html", self.server.run.page())
            except (UserError, OSError) as error:
                self._answer(503, "text/plain", f"{error}\n")
        elif address.path == "/news":
            after = parse_qs(address.query).get("after", [""])[0]
            found = self.server.run.news(int(after) if after.isdecimal() else 0)
            self._answer(200, "application/json", json.dumps(found, separators=(",", ":"), allow_nan=False))
        else:
            self._answer(404, "text/plain", f"nothing is here; the report is at {self.server.url}")

    def _answer(self, status: int, kind: str, text: str) -> None:
        data = text.encode("utf-8")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Does nothing: a line per request would bury the address."""


class LiveServer(ThreadingHTTPServer):
    """Serves the live report of a run to this machine; ``serve_forever`` as of the standard library.

    Args:
        port: 0 takes a free one.

    Raises:
        UserError: ``run_dir`` holds no run, or the port is taken.
    """

    daemon_threads = True

    def __init__(self, run_dir: Path, port: int = 0) -> None:
        self.run = LiveRun(run_dir)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise UserError(
                f"port {port} cannot be used",
                found=str(error.strerror or error),
                remedy="choose another --port; 0 takes a free one",
            ) from error
        self.url = f"http://127.0.0.1:{self.server_port}/"
