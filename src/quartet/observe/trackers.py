"""Where metrics go: JSON Lines, which has everything, and the trackers beside it.

The trackers a recipe may name, each behind a thread of its own: an unreachable one costs the run nothing.

What a resumed run repeats, the steps after its checkpoint, is not logged twice: ``trackers/<type>.json`` in the run's
directory has the run's id there, and the last step that was logged.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import ConfigDict, TypeAdapter

from quartet.config.common import BaseTrackerConfig, TensorBoardConfig
from quartet.config.plugins import load_object, plugin_entries
from quartet.config.run import LogConfig
from quartet.observe.background import BestEffortThread
from quartet.observe.files import RowAppender, read_objects, replace_atomically
from quartet.observe.metrics import find_metric

if TYPE_CHECKING:
    from quartet.config.run import LogConfig

_NUMBERS = TypeAdapter(dict[str, float | None], config=ConfigDict(strict=True))
_NONFINITE = TypeAdapter(dict[str, Literal["nan", "inf", "-inf"]])


Row = Mapping[str, str | float | None]
"""One sample: its columns by name. All rows of a table have the same ones."""


class Tracker(Protocol):
    """What shows a run's metrics and samples. It may raise anything, and take its time: see ``BackgroundTracker``.

    Attributes:
        id: by which a resumed run finds its own again; None where nothing needs to be found.
        url: where people see the run; None where there is no such place.
    """

    id: str | None
    url: str | None

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Logs a table of what was sampled in ``step``; ``name`` as ``samples/rollouts``."""

    def close(self, *, failed: bool = False) -> None: ...


class JsonlTracker:
    """One JSON object per line: ``{"step": 3, "time_s": 1700000000.0, "loss/policy": 0.1}``.

    JSON has no NaN, so a value that is not finite is written as ``null`` and named under ``nonfinite`` as
    ``"nan"``, ``"inf"`` or ``"-inf"``; :func:`read_metrics` restores it. A half-written last line of a killed
    run is dropped on opening.

    Args:
        others: get the same metrics.
        clock: Unix time in seconds.
    """

    def __init__(
        self, path: Path, others: Sequence[BackgroundTracker] = (), *, clock: Callable[[], float] = time.time
    ) -> None:
        self._rows = RowAppender(path)
        self._others = others
        self._clock = clock

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records ``metrics`` under ``step``; ValueError for a name that the table of metrics does not explain."""
        for name in metrics:
            find_metric(name)
        values = {name: float(value) for name, value in metrics.items()}
        row: dict[str, Any] = {"step": step, "time_s": round(self._clock(), 3)}
        row.update({name: value if math.isfinite(value) else None for name, value in values.items()})
        nonfinite = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
        if nonfinite:
            row["nonfinite"] = nonfinite
        self._rows.append(row)
        for tracker in self._others:
            tracker.log(step, values)

    def samples(self, step: int, name: str, rows: Callable[[int], Sequence[Row]]) -> None:
        """Gives the other trackers a table.

        Args:
            rows: makes its first so many rows, in another thread.
        """
        for tracker in self._others:
            tracker.samples(step, name, rows)

    def close(self) -> None:
        self._rows.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Reads the rows of a ``metrics.jsonl``: ``step``, ``time_s``, metrics; NaN and infinities are restored.

    Rows that are broken, or hold something else than numbers, are left out.
    """
    return read_objects(path, metrics_from_row)


def metrics_from_row(row: dict[str, Any]) -> dict[str, float]:
    """Makes one row of :func:`read_metrics`; ValueError or KeyError for one of another shape."""
    nonfinite = _NONFINITE.validate_python(row.pop("nonfinite", {}))
    _NUMBERS.validate_python(row)
    if type(row["step"]) is not int or row["time_s"] is None:
        raise ValueError("no whole step, or no time")
    found = {**row, **{name: float(text) for name, text in nonfinite.items()}}
    if None in found.values():
        raise ValueError("null, and nonfinite does not say what it stands for")
    return found


class TensorBoardTracker:
    """TensorBoard event files in ``directory``, through TensorBoard's own writer (no torch involved).

    Args:
        directory: created if missing; a resumed run writes another event file beside the old one.
        resume_after: last step to keep; TensorBoard then hides what earlier event files hold of later steps.
    """

    id: str | None = None
    url: str | None = None

    def __init__(self, directory: Path, resume_after: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory))
        if resume_after is not None:
            self._add(resume_after + 1, session_log=SessionLog(status=SessionLog.START))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, **content))
        self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=self._summary(value=values))

    def samples(self, step: int, name: str, rows: Sequence[Row]) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
        self._add(step, summary=text_pb(name, "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)))

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()


def _cell(value: str | float | None) -> str:
    """Writes a value as a cell of a table in Markdown."""
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", "<br>")


@dataclass(frozen=True)
class RunInfo:
    """What trackers are told of a run.

    Args:
        name: of the run, by which people find it.
        directory: of the run.
        recipe: as it is saved, without secrets.
        resumed_after: complete steps at which it goes on; 0 for a run that begins.
        token: a new run's id, where a tracker lets it be chosen.
    """

    name: str
    directory: Path
    recipe: Mapping[str, Any]
    resumed_after: int = 0
    token: str = field(default_factory=partial(secrets.token_hex, 4))


def build_trackers(
    config: LogConfig, run: RunInfo, tell: Callable[[str], object], warn: Callable[[str], object]
) -> list[BackgroundTracker]:
    """Makes the trackers that the recipe names. Nothing is loaded or asked before there is something to log.

    Args:
        tell: is told in their threads where the run can be seen, and of the first failure.
        warn: is told in the caller's, when they are closed, of how much was lost.
    """

    def start(section: BaseTrackerConfig, known: str | None) -> Tracker:
        if isinstance(section, TensorBoardConfig):
            return TensorBoardTracker(run.directory / "tensorboard", run.resumed_after or None)
        tracker: Tracker = load_object(plugin_entries("trackers")[section.type].tracker)(section, run, known)
        return tracker

    return [
        BackgroundTracker(section.type, partial(start, section), run, config.samples, tell, warn)
        for section in config.chosen_trackers
    ]


class BackgroundTracker:
    """A tracker behind a thread of its own: calls return at once and never raise.

    Args:
        kind: type of the tracker.
        start: makes the tracker, of the id that the run had there.
        num_samples: rows of a table; 0: none are shown.
        tell, warn: as of ``build_trackers``.
    """

    def __init__(
        self,
        kind: str,
        start: Callable[[str | None], Tracker],
        run: RunInfo,
        num_samples: int,
        tell: Callable[[str], object],
        warn: Callable[[str], object],
    ) -> None:
        self._kind, self._start, self._num_samples, self._tell, self._warn = kind, start, num_samples, tell, warn
        self._thread = BestEffortThread(f"the tracker {kind}", tell)
        self._path = run.directory / "trackers" / f"{kind}.json"
        self._tracker: Tracker | None = None
        self._known: dict[str, Any] = {}
        self._last: dict[str, int] = {}  # step of metrics, and of each table

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._thread.submit(partial(self._log, step, dict(metrics)))

    def samples(self, step: int, name: str, rows: Callable[[int], Sequence[Row]]) -> None:
        if self._num_samples:
            self._thread.submit(partial(self._show, step, name, rows))

    def close(self, *, failed: bool = False) -> None:
        self._thread.close(partial(self._end, failed))
        if lost := self._thread.num_dropped:
            self._warn(f"the tracker {self._kind} lacks {lost} rows and tables of the run; metrics.jsonl has all")

    # In the thread -----------------------------------------------------------------------------------------

    def _opened(self) -> Tracker:
        if self._tracker is None:
            if self._path.is_file():
                self._known = json.loads(self._path.read_text(encoding="utf-8"))
            self._tracker = self._start(self._known.get("id"))
            self._note(self._known.get("step", -1))
            if self._tracker.url is not None:
                self._tell(f"{self._kind}: {self._tracker.url}")
        return self._tracker

    def _note(self, step: int) -> None:
        if self._tracker is not None and self._tracker.id is not None:
            self._path.parent.mkdir(exist_ok=True)
            replace_atomically(self._path, json.dumps({"id": self._tracker.id, "step": step}).encode())

    def _is_new(self, step: int, name: str = "") -> bool:
        """Tells whether something was not logged already: by the process before, or before a worker died."""
        return step > self._last.get(name, self._known.get("step", -1))

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        tracker = self._opened()
        if self._is_new(step):
            tracker.log(step, metrics)
            self._last[""] = step
            self._note(step)

    def _show(self, step: int, name: str, rows: Callable[[int], Sequence[Row]]) -> None:
        tracker, table = self._opened(), rows(self._num_samples)
        if table and self._is_new(step, name):
            tracker.samples(step, name, table)
            self._last[name] = step

    def _end(self, failed: bool) -> None:
        if self._tracker is not None:
            self._tracker.close(failed=failed)
