"""Spans: which stage of a step ran when, for which role, over how many tokens and bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quartet.observe.files import RowAppender, dataclass_from_row, read_objects

BACKGROUND = "background"
"""Mode of a span that the step does not wait for."""


@dataclass
class Span:
    """One stretch of work; ``start_s`` and ``end_s`` are seconds of the recorder's clock.

    ``tokens`` and ``nbytes`` may be set or added to while the span is open. ``failed``: the work raised. ``marks``:
    when the work itself was going on, where its surroundings wait longer (``SpanRecorder.mark``). ``worker_s``: seconds
    of each worker that was called in it, by role and rank ("rollout 1").
    """

    name: str
    start_s: float
    end_s: float
    step: int | None = None
    role: str | None = None
    mode: str | None = None
    chunk: int | None = None
    tokens: int = 0
    nbytes: int = 0
    failed: bool = False
    marks: list[float] = field(default_factory=list, repr=False, compare=False)
    worker_s: dict[str, float] = field(default_factory=dict, repr=False, compare=False)

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


_open: ContextVar[Span | None] = ContextVar("open span", default=None)


def note_workers(role: str, seconds: Mapping[int, float]) -> None:
    """Adds what workers of a role took for a call, by rank, to the span that is open around it; lost without one."""
    if (span := _open.get()) is not None:
        for rank, took in seconds.items():
            worker = f"{role} {rank}"
            span.worker_s[worker] = span.worker_s.get(worker, 0.0) + took


def steady_unix_clock() -> Callable[[], float]:
    """Makes a clock of Unix time in seconds that never jumps: read once, then carried on by the monotonic clock."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


class SpanRecorder:
    """Measures spans, appends each to ``path`` when it ends, and keeps it in memory until it is dropped.

    Spans may nest, overlap (interleaved coroutines) and come from several threads.

    Args:
        path: a JSON Lines file, or None to keep spans in memory only.
        clock: seconds; a virtual clock makes the spans of a planned iteration.
    """

    def __init__(self, path: Path | None = None, clock: Callable[[], float] | None = None) -> None:
        self._rows = RowAppender(path) if path is not None else None
        self._clock = clock if clock is not None else steady_unix_clock()
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    @contextmanager
    def span(
        self,
        name: str,
        *,
        step: int | None = None,
        role: str | None = None,
        mode: str | None = None,
        chunk: int | None = None,
        tokens: int = 0,
        nbytes: int = 0,
    ) -> Iterator[Span]:
        """Opens a span; it is recorded when the block ends, with ``failed`` set when the block raises."""
        now = self._clock()
        span = Span(name, now, now, step, role, mode, chunk, tokens, nbytes, failed=True)
        around = _open.get()
        _open.set(span)
        try:
            yield span
            span.failed = False
        finally:
            _open.set(around)  # no reset: a generator may be closed in another context
            span.end_s = self._clock()
            if span.marks:
                span.start_s, span.end_s = span.marks[0], span.marks[-1]
            with self._lock:
                self._spans.append(span)
                if self._rows is not None:
                    times = {"start_s": round(span.start_s, 6), "end_s": round(span.end_s, 6)}
                    row = asdict(span) | times | {"marks": None}
                    row["worker_s"] = {worker: round(took, 6) for worker, took in span.worker_s.items()} or None
                    self._rows.append({k: v for k, v in row.items() if v is not None and v is not False})

    def mark(self, span: Span) -> None:
        """Notes that the work of an open span is going on now. A span with marks is as long as from the first to the
        last.
        """
        span.marks.append(self._clock())

    def of_step(self, step: int | None) -> list[Span]:
        """Returns the ended spans of one step that are still in memory, in order of their start."""
        return [span for span in self.spans() if span.step == step]

    def spans(self) -> list[Span]:
        """Returns all ended spans that are still in memory, in order of their start."""
        with self._lock:
            return sorted(self._spans, key=lambda s: s.start_s)

    def drop_through(self, step: int) -> None:
        """Forgets the spans of all steps up to ``step``, and those without a step; the file keeps them."""
        with self._lock:
            self._spans = [s for s in self._spans if s.step is not None and s.step > step]

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()


def read_spans(path: Path) -> list[Span]:
    """Reads the spans of a ``spans.jsonl``, in the order in which they ended; UserError for a damaged row."""
    return read_objects(path, span_from_row)


def span_from_row(row: Mapping[str, Any]) -> Span:
    """Makes the span of a row; ValueError or TypeError for one of another shape."""
    return dataclass_from_row(Span, row)


def seconds_by_name(spans: Iterable[Span]) -> dict[str, float]:
    """Returns the seconds per span name, spans added up (overlapping spans of one name count twice)."""
    totals: dict[str, float] = {}
    for span in spans:
        totals[span.name] = totals.get(span.name, 0.0) + span.seconds
    return totals


def overlap_seconds(spans: Iterable[Span], a: str, b: str) -> float:
    """Returns the seconds during which a span named ``a`` and a span named ``b`` were open at the same time."""
    spans = list(spans)
    left, right = merge_intervals(s for s in spans if s.name == a), merge_intervals(s for s in spans if s.name == b)
    return sum(max(0.0, min(e, f) - max(s, t)) for s, e in left for t, f in right)


def merge_intervals(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Returns disjoint intervals that cover exactly what the spans cover, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((s.start_s, s.end_s) for s in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
