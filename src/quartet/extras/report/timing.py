"""What the report shows of spans: seconds and tokens per stage for every step, and the timelines of some steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from quartet.extras.report.samples import compact, evenly
from quartet.observe.diagnostics import worker_table
from quartet.observe.spans import BACKGROUND, Span, union

MAX_TIMED_STEPS = 400
MAX_DETAILED_STEPS = 16
MAX_SPANS_PER_STEP = 800


def show_timing(spans: Sequence[Span]) -> dict[str, Any] | None:
    """None without spans. A step lasts from its first span to its last, those aside that write in the background."""
    if not spans:
        return None
    by_step: dict[int | None, list[Span]] = {}
    for span in with_steps(spans):
        by_step.setdefault(span.step, []).append(span)
    ordered = sorted(by_step, key=lambda step: (step is not None, step or 0))
    steps = evenly(ordered, MAX_TIMED_STEPS)
    detailed = evenly(steps, MAX_DETAILED_STEPS)
    names = list(dict.fromkeys(span.name for span in sorted(spans, key=lambda span: span.start_s)))
    dropped = sum(max(0, len(by_step[step]) - MAX_SPANS_PER_STEP) for step in detailed)
    intervals = [union(_own(by_step[step])) for step in steps]
    parts = []
    if len(detailed) < len(ordered):
        parts.append(f"Timelines of {len(detailed)} of {len(ordered)} steps, evenly spaced.")
    if dropped:
        parts.append(f"The shortest {dropped:,} spans of these steps are left out of the timelines.")
    return {
        "steps": steps,
        "names": names,
        "seconds": {name: [_total(by_step[s], name, "seconds") for s in steps] for name in names},
        "tokens": {name: [_total(by_step[s], name, "tokens") for s in steps] for name in names},
        "wall_s": [compact(busy[-1][1] - busy[0][0]) for busy in intervals],
        "busy_s": [compact(sum(end - start for start, end in busy)) for busy in intervals],
        "detail": {"null" if step is None else str(step): _detail(by_step[step]) for step in detailed},
        "workers": show_workers(spans),
        "note": " ".join(parts) or None,
    }


def show_workers(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """The rows of ``worker_table``; none where every stage has one worker."""
    return [
        {**asdict(row), "median_s": compact(row.median_s), "max_s": compact(row.max_s)} for row in worker_table(spans)
    ]


def with_steps(spans: Sequence[Span]) -> list[Span]:
    """Spans of a role that name no step, as parts that move do, belong to the step they begin in.

    Between two steps that is the later one; before the first and after the last the nearest one.
    """
    windows: dict[int, tuple[float, float]] = {}
    for span in _own(spans):
        if span.step is not None:
            start, end = windows.get(span.step, (span.start_s, span.end_s))
            windows[span.step] = (min(start, span.start_s), max(end, span.end_s))
    if not windows:
        return list(spans)

    def step_at(moment: float) -> int:
        return min((step for step, (_, end) in windows.items() if moment < end), default=max(windows))

    return [
        replace(span, step=step_at(span.start_s)) if span.step is None and span.role is not None else span
        for span in spans
    ]


def _own(spans: Iterable[Span]) -> list[Span]:
    """The spans that a step waits for; all, where there are no such."""
    spans = list(spans)
    return [span for span in spans if span.mode != BACKGROUND] or spans


def _total(spans: Iterable[Span], name: str, attribute: str) -> float | int | str | None:
    return compact(sum(getattr(span, attribute) for span in spans if span.name == name))


def _detail(spans: list[Span]) -> list[dict[str, Any]]:
    """Spans of one step with times relative to its beginning, in order of their start."""
    origin = min(span.start_s for span in spans)
    longest = sorted(spans, key=lambda span: -span.seconds)[:MAX_SPANS_PER_STEP]
    return [
        {
            "name": span.name,
            "start": round(span.start_s - origin, 5),
            "end": round(span.end_s - origin, 5),
            "role": span.role,
            "mode": span.mode,
            "chunk": span.chunk,
            "tokens": span.tokens,
            "bytes": span.nbytes,
            "failed": span.failed,
        }
        for span in sorted(longest, key=lambda span: span.start_s)
    ]
