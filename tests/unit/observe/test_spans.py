"""Spans on a virtual clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from quartet.observe.files import read_rows
from quartet.observe.spans import (
    Span,
    SpanRecorder,
    overlap_seconds,
    read_spans,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_span_fields_may_be_set_inside(tmp_path: Path) -> None:
    clock = Clock()
    recorder = SpanRecorder(tmp_path / "spans.jsonl", clock)
    with recorder.span("generate", step=2, role="actor", mode="generate", chunk=0) as span:
        clock.now += 1.5
        span.tokens += 10
        span.tokens += 5
        span.nbytes = 64
    expected = Span("generate", 100.0, 101.5, 2, "actor", "generate", 0, 15, 64)
    assert recorder.of_step(2) == [expected]
    assert expected.seconds == 1.5
    assert read_spans(tmp_path / "spans.jsonl") == [expected], "flushed before close"
    recorder.close()


def test_a_marked_span_is_as_long_as_its_work(tmp_path: Path) -> None:
    """Not as long as its surroundings wait for an event loop that others keep busy."""
    clock = Clock()
    recorder = SpanRecorder(tmp_path / "spans.jsonl", clock)
    with recorder.span("reward", step=1) as span:
        for now in (103.0, 104.5, 104.75):
            clock.now = now
            recorder.mark(span)
        clock.now = 190.0
    assert [(s.start_s, s.end_s) for s in recorder.spans()] == [(103.0, 104.75)]
    assert read_spans(tmp_path / "spans.jsonl") == recorder.spans()
    assert "marks" not in read_rows(tmp_path / "spans.jsonl")[0]


def span(name: str, start: float, end: float) -> Span:
    return Span(name, start, end)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([span("a", 0, 10), span("b", 2, 3), span("b", 2.5, 5), span("b", 8, 12)], 5.0),
        ([span("a", 0, 1), span("a", 1, 2), span("b", 0.5, 1.5)], 1.0),
        ([span("a", 0, 1), span("b", 1, 2)], 0.0),
        ([span("a", 0, 1)], 0.0),
    ],
)
def test_overlap_counts_each_moment_once(spans: list[Span], expected: float) -> None:
    assert overlap_seconds(spans, "a", "b") == pytest.approx(expected)
    assert overlap_seconds(spans, "b", "a") == pytest.approx(expected)
    grid = [i / 100 for i in range(1500)]  # the slow, obvious way
    both = sum(all(any(s.name == n and s.start_s <= t < s.end_s for s in spans) for n in "ab") for t in grid)
    assert both / 100 == pytest.approx(expected)
