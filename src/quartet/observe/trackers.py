"""Where metrics go: JSON Lines, which has everything, and the trackers beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import ConfigDict, TypeAdapter

from quartet.observe.jsonl import RowAppender, read_objects
from quartet.observe.metrics import find_metric

_NUMBERS = TypeAdapter(dict[str, float | None], config=ConfigDict(strict=True))
_NONFINITE = TypeAdapter(dict[str, Literal["nan", "inf", "-inf"]])


Row = Mapping[str, str | float | None]
"""One sample: its columns by name. All rows of a table have the same ones."""


class Tracker(Protocol):
    """What shows a run's metrics and samples. It may raise anything, and take its time: see ``DeliveredTracker``.

    Attributes:
        id: by which a resumed run finds its own again; None where nothing needs to be found.
        url: where people see the run; None where there is no such place.
        delay_s: longest time for which it keeps what is logged in memory, where a kill destroys it.
    """

    id: str | None
    url: str | None
    delay_s: float

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """A table of what was sampled in ``step``; ``name`` as ``samples/rollouts``."""

    def close(self, *, failed: bool = False) -> None: ...


class Delivered(Protocol):
    """A tracker as the run uses it: no call waits or raises."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, step: int, name: str, rows: Callable[[int], Sequence[Row]]) -> None: ...


class JsonlTracker:
    """One JSON object per line: ``{"step": 3, "time_s": 1700000000.0, "loss/policy": 0.1}``.

    JSON has no NaN, so a value that is not finite is written as ``null`` and named under ``nonfinite`` as
    ``"nan"``, ``"inf"`` or ``"-inf"``; :func:`read_metrics` restores it. A half-written last line of a killed
    run is dropped on opening.

    Args:
        others: get the same metrics.
        clock: Unix time in seconds.
    """

    def __init__(self, path: Path, others: Sequence[Delivered] = (), *, clock: Callable[[], float] = time.time) -> None:
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
    """The rows of a ``metrics.jsonl``: ``step``, ``time_s``, metrics; NaN and infinities are restored.

    Rows that are broken, or hold something else than numbers, are left out.
    """
    return read_objects(path, metrics_of_row)


def metrics_of_row(row: dict[str, Any]) -> dict[str, float]:
    """One row of :func:`read_metrics`; ValueError or KeyError for one of another shape."""
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
    delay_s = 0.0

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
    """Of a table in Markdown."""
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", "<br>")
