"""Spans on a virtual clock."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from quartet.observe.files import read_rows, truncate_after
from quartet.observe.spans import (
    Span,
    SpanRecorder,
    overlap_seconds,
    read_spans,
    seconds_by_name,
    steady_unix_clock,
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


def test_failure_is_recorded_and_passed_on(tmp_path: Path) -> None:
    clock = Clock()
    recorder = SpanRecorder(tmp_path / "spans.jsonl", clock)
    with pytest.raises(RuntimeError, match="boom"), recorder.span("score", step=1):
        clock.now += 1
        raise RuntimeError("boom")
    recorder.close()
    (span,) = read_spans(tmp_path / "spans.jsonl")
    assert span.failed
    assert span.seconds == 1.0


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


def test_interleaved_spans_and_dropping(tmp_path: Path) -> None:
    clock = Clock()
    recorder = SpanRecorder(None, clock)
    outer, inner = recorder.span("generate", step=1), recorder.span("score", step=1)
    outer.__enter__()
    clock.now += 1
    inner.__enter__()
    clock.now += 1
    outer.__exit__(None, None, None)
    clock.now += 1
    inner.__exit__(None, None, None)
    with recorder.span("generate", step=2):
        clock.now += 1
    assert [s.name for s in recorder.of_step(1)] == ["generate", "score"]
    assert overlap_seconds(recorder.of_step(1), "generate", "score") == 1.0
    recorder.drop_through(1)
    assert recorder.of_step(1) == []
    assert len(recorder.of_step(2)) == 1


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


def test_seconds_by_name_adds_up() -> None:
    assert seconds_by_name([span("a", 0, 2), span("b", 0, 1), span("a", 1, 2)]) == {"a": 3.0, "b": 1.0}


def test_truncation_applies_to_spans(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    recorder = SpanRecorder(path, Clock())
    for step in (None, 1, 2, 3):
        with recorder.span("x", step=step):
            pass
    recorder.close()
    truncate_after(path, 2)
    assert [row.get("step") for row in read_rows(path)] == [None, 1, 2]


def test_default_clock_is_unix_time() -> None:
    assert abs(steady_unix_clock()() - time.time()) < 5
