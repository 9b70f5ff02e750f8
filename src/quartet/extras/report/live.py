"""The report of a run that goes on: the page as it is written to a file, and what has come since, over HTTP."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from quartet.config.errors import UserError
from quartet.extras.report.build import render_page
from quartet.extras.report.collect import (
    check_run,
    collect_alarms,
    collect_head,
    collect_run,
    collect_stage,
    explain,
    metric_columns,
    show_health,
    stage_dirs,
)
from quartet.extras.report.samples import ReportLimits, collect_rollouts
from quartet.extras.report.timing import show_timing, show_workers
from quartet.observe.follow import StageTails
from quartet.observe.health import examine
from quartet.observe.rollouts import list_steps
from quartet.observe.spans import BACKGROUND, Span

KEPT = 500
"""Pieces of news that are kept; a page that has missed more is loaded anew."""
RECENT_STEPS = 3
"""Steps whose spans may still come."""
POLL_S = 0.5
"""The run's files are looked at no more often than that."""
RELOAD = {"reload": True}


class _Stage:
    """What is new in one stage of a run. The page may have some of it already: every piece names its steps.

    Args:
        note: is told, again and again, of what cannot be read.
    """

    def __init__(self, path: Path, limits: ReportLimits, note: Callable[[str], None]) -> None:
        self._path, self._limits, self._note = path, limits, note
        self._tails = StageTails(path)
        self._recent: list[Span] = []
        self._with_workers: list[Span] = []
        self._cut_s = float("-inf")
        self._health = examine(self._tails.metrics.poll())
        self._hold(self._tails.spans.poll())
        self._rollouts = set(list_steps(path / "rollouts"))
        self._alarms = self._collect_alarms()

    def poll(self) -> list[dict[str, Any]]:
        """Errors as of ``stage_dirs``: files may vanish meanwhile."""
        rows, spans = self._tails.metrics.poll(), self._tails.spans.poll()
        if self._tails.restarted:
            return [RELOAD]
        for trouble in self._tails.troubles:
            self._note(trouble)
        news: list[dict[str, Any]] = []
        if rows:
            columns = metric_columns(rows)
            news.append({"metrics": columns, "explained": explain(columns["series"] if columns else ())})
            before = show_health(self._health)
            for row in rows:
                self._health.note(int(row["step"]), row)
            if (health := show_health(self._health)) != before:
                news.append({"health": health})
        if spans:
            self._hold(spans)
            if (timing := show_timing(self._recent)) is not None:
                news.append({"timing": {**timing, "workers": show_workers(self._with_workers)}})
        steps = list_steps(self._path / "rollouts")
        if fresh := [step for step in steps if step not in self._rollouts][-self._limits.steps :]:
            self._rollouts.update(steps)
            limits = replace(self._limits, tokens=self._limits.tokens * len(fresh) // self._limits.steps)
            if (found := collect_rollouts(self._path / "rollouts", limits, self._note, fresh)) is not None:
                news.append({"rollouts": found})
        if (alarms := self._collect_alarms()) != self._alarms:
            self._alarms = alarms
            news.append({"alarms": alarms})
        return [{"stage": self._path.name, **each} for each in news]

    def _hold(self, spans: list[Span]) -> None:
        """Keeps the spans of the last steps, all of each. What names no step stays that came after the steps before."""
        self._with_workers += [span for span in spans if span.worker_s]
        spans = self._recent + spans
        oldest = max((span.step for span in spans if span.step is not None), default=0) - RECENT_STEPS + 1
        past = [
            span.end_s for span in spans if span.step is not None and span.step < oldest and span.mode != BACKGROUND
        ]
        self._cut_s = max([self._cut_s, *past])
        self._recent = [
            span
            for span in spans
            if (span.step >= oldest if span.step is not None else span.role and span.start_s >= self._cut_s)
        ]

    def _collect_alarms(self) -> dict[str, Any] | None:
        return collect_alarms(self._path, self._limits, self._note)


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
        """The report of what is there now; errors as of ``collect_run``."""
        with self._lock:
            self._poll()
            data = {**collect_run(self._dir, self._limits), "live": self._count}
            of_head: list[str] = []
            collect_head(self._dir, of_head)
            self._noted.clear()
            self._noted.update(dict.fromkeys(note for note in data["notes"] if note not in of_head))
        return render_page(data, live=True)

    def news(self, after: int) -> dict[str, Any]:
        """What has come after the first ``after`` pieces of news, and how many there are now."""
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
                if (stage := self._stages.get(path.name)) is not None:
                    found = stage.poll()
                    if RELOAD in found:
                        self._stages[path.name] = self._stage(path)
                else:
                    self._stages[path.name] = self._stage(path)
                    notes: list[str] = []
                    shown = collect_stage(path, self._limits, notes)
                    self._noted |= dict.fromkeys(notes)
                    names = shown["metrics"]["series"] if shown["metrics"] else ()
                    found = [{"stage": path.name, "whole": shown, "explained": explain(names)}]
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
        """Nothing: a line per request would bury the address."""


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
