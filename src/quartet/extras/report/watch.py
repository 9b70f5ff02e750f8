"""A run that goes on: in the terminal, and as the report's page with what has come since, over HTTP."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
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

from quartet.config.errors import UserError, printable, read_file
from quartet.config.yamls import parse_yaml
from quartet.extras.report.build import (
    ReportLimits,
    StageTails,
    check_run,
    collect_alarms,
    collect_head,
    collect_rollouts,
    collect_run,
    collect_stage,
    evenly,
    explain,
    explain_metric,
    metric_columns,
    read_run,
    render_page,
    show_health,
    show_timing,
    stage_dirs,
    telling,
)
from quartet.observe.health import Health, examine, read_alarms, worker_table
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
        """Returns the lines of the screen that are about this stage."""
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
        """Shows where the seconds of the last step with all its spans went."""
        steps = sorted({span.step for span in self._spans if span.step is not None})
        seconds = seconds_by_name(span for span in self._spans if span.step == steps[0])
        longest = sorted(seconds.items(), key=lambda item: -item[1])[:_SHOWN_STAGES]
        return Text(printable("stages  " + "  ".join(f"{name} {took:.3g} s" for name, took in longest)), style="dim")

    def _sampled(self) -> list[RenderableType]:
        """Shows the best of the newest rollouts, a middling one and the worst."""
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
    """Returns the values as bars of text; a cross where one is not finite."""
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
    """Returns ``steps`` of the stage's recipe, or the run's; None where none says it."""
    for directory in reversed(directories):
        try:
            recipe = parse_yaml(read_file(directory / "recipe.yaml").decode("utf-8"))
        except (UserError, OSError, ValueError, yaml.YAMLError, RecursionError):
            continue
        if isinstance(recipe, dict) and type(recipe.get("steps")) is int:
            return int(recipe["steps"])
    return None


KEPT = 20
"""Pieces of news that are kept; a page that has missed more is loaded anew."""
POLL_S = 0.5
"""The run's files are looked at no more often than that."""
RELOAD = {"reload": True}


class _Stage:
    """What is new in one stage of a run. The page may have some of it already: all but health and alarms name steps.

    Args:
        note: is told, again and again, of what cannot be read.
    """

    def __init__(self, path: Path, limits: ReportLimits, note: Callable[[str], None]) -> None:
        self._path, self._limits, self._note = path, limits, note
        self._tails = StageTails(path)
        self._health, self._spans = examine(self._tails.metrics.poll()), self._tails.spans.poll()
        self._rollouts = set(list_steps(path / "rollouts"))
        self._shown = {"health": show_health(self._health), "alarms": collect_alarms(path, limits, note)}

    def poll(self) -> list[dict[str, Any]]:
        """Reads what is new; errors as of ``stage_dirs``: files may vanish meanwhile."""
        rows, spans = self._tails.metrics.poll(), self._tails.spans.poll()
        if self._tails.restarted:
            return [RELOAD]
        for trouble in self._tails.troubles:
            self._note(trouble)
        found: dict[str, Any] = {"alarms": collect_alarms(self._path, self._limits, self._note)}
        names: Iterable[str] = ()
        if rows:
            for row in rows:
                self._health.note(int(row["step"]), row)
            columns = metric_columns(rows)
            names = columns["series"] if columns else ()
            found |= {"metrics": columns, "health": show_health(self._health)}
        if spans:
            self._spans += spans
            found["timing"] = show_timing(self._spans)
        steps = list_steps(self._path / "rollouts")
        if fresh := [step for step in steps if step not in self._rollouts][-self._limits.steps :]:
            self._rollouts.update(steps)
            limits = replace(self._limits, tokens=self._limits.tokens * len(fresh) // self._limits.steps)
            if (rollouts := collect_rollouts(self._path / "rollouts", limits, self._note, fresh)) is not None:
                found["rollouts"] = rollouts
        changed = {kind: part for kind, part in found.items() if kind not in self._shown or part != self._shown[kind]}
        self._shown |= {kind: part for kind, part in changed.items() if kind in self._shown}
        return [{"stage": self._path.name, **changed, "explained": explain(names)}] if changed else []


class LiveRun:
    """A run as page and news; safe to ask from several threads.

    Raises:
        UserError: ``run_dir`` holds no run.
    """

    def __init__(self, run_dir: Path) -> None:
        check_run(run_dir)
        self._dir, self._limits = run_dir, ReportLimits()
        self._lock = threading.Lock()
        self._news: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._count = 0
        self._is_lost = False
        self._polled_s = float("-inf")
        self._noted: dict[str, None] = {}  # what of the stages cannot be read, in the order in which it was met
        self._stages = {path.name: self._stage(path) for path in stage_dirs(run_dir)}
        self._head = self._collect_head()

    def page(self) -> str:
        """Writes the report of what is there now; errors as of ``collect_run``."""
        with self._lock:
            self._poll()
            data = {**collect_run(self._dir, self._limits), "live": self._count}
            of_head: list[str] = []
            collect_head(self._dir, of_head)
            self._noted.clear()
            self._noted.update(dict.fromkeys(note for note in data["notes"] if note not in of_head))
        return render_page(data, live=True)

    def news(self, after: int) -> dict[str, Any]:
        """Returns what has come after the first ``after`` pieces of news, and how many there are now."""
        with self._lock:
            self._poll()
            missed = self._count - after
            if not 0 <= missed <= len(self._news):
                return {"next": self._count, "news": [RELOAD]}
            return {"next": self._count, "news": list(self._news)[len(self._news) - missed :]}

    def _poll(self) -> None:
        if time.monotonic() - self._polled_s < POLL_S:
            return
        try:
            for path in stage_dirs(self._dir):
                stage = self._stages.get(path.name)
                found = stage.poll() if stage is not None else []
                if stage is None or RELOAD in found:
                    self._stages[path.name] = self._stage(path)
                if stage is None:  # after its tails have begun: a row that comes meanwhile is told twice, not never
                    found = self._whole(path)
                self._tell(*found)
            if (head := self._collect_head()) != self._head:
                self._head = head
                self._tell(head)
            if self._is_lost:
                self._is_lost = False
                self._tell(RELOAD)
        except (OSError, UserError):
            self._is_lost = True  # files come and go while a run is moved or deleted: the next call looks again
        self._polled_s = time.monotonic()

    def _whole(self, path: Path) -> list[dict[str, Any]]:
        """Returns the news of a stage that has only begun."""
        notes: list[str] = []
        shown = collect_stage(path, self._limits, notes)
        self._noted |= dict.fromkeys(notes)
        names = shown["metrics"]["series"] if shown["metrics"] else ()
        return [{"stage": path.name, "whole": shown, "explained": explain(names)}]

    def _stage(self, path: Path) -> _Stage:
        return _Stage(path, self._limits, self._noted.setdefault)

    def _collect_head(self) -> dict[str, Any]:
        notes = list(self._noted)
        return {**collect_head(self._dir, notes), "notes": notes}

    def _tell(self, *news: dict[str, Any]) -> None:
        self._news.extend(news)
        self._count += len(news)


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
            except UserError as error:
                self._answer(503, "text/plain", f"{error}\n")
        elif address.path == "/news":
            after = parse_qs(address.query).get("after", ["-1"])[0]
            found = self.server.run.news(int(after) if after.isdecimal() and len(after) < 16 else -1)
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
