"""Repetition within answers, against a slow reference, and stragglers by worker."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from quartet.observe.health import (
    NGRAM,
    measure_repetition,
    straggler_metrics,
    worker_table,
)
from quartet.observe.spans import Span, SpanRecorder, note_workers, read_spans


def slow_repetition(ids: list[int]) -> tuple[float, int]:
    grams = [tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
    is_old = [gram in grams[:i] for i, gram in enumerate(grams)]
    runs = "".join(" x"[old] for old in is_old).split()
    return (sum(is_old) / len(grams) if len(grams) > 1 else 0.0), max(map(len, runs), default=1 - NGRAM) + NGRAM - 1


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 50_000])
def test_repetition_is_that_of_a_plain_loop(vocabulary: int) -> None:
    draw = random.Random(vocabulary)
    for length in [*range(12), 40, 90]:
        ids = [draw.randrange(vocabulary) for _ in range(length)]
        assert measure_repetition(ids) == pytest.approx(slow_repetition(ids)), ids


def test_workers_are_noted_in_the_span_around_the_call(tmp_path: Path) -> None:
    recorder = SpanRecorder(tmp_path / "spans.jsonl")

    async def engine(rank: int) -> None:
        with recorder.span("generate", step=3, role="rollout"):
            await asyncio.sleep(0)  # the other engine's span is open, too
            note_workers("rollout", {rank: 1.0 + rank})
            note_workers("rollout", {rank: 0.5})

    async def run() -> None:
        await asyncio.gather(engine(0), engine(1))
        with recorder.span("values", step=3, role="critic"), recorder.span("inner", step=3):
            pass
        note_workers("critic", {0: 9.0})  # no span is open

    asyncio.run(run())
    recorder.close()
    assert all(span.worker_s == {} for span in recorder.spans() if span.name != "generate")
    assert [span.worker_s for span in read_spans(tmp_path / "spans.jsonl")][:2] == [
        {"rollout 0": 1.5},
        {"rollout 1": 2.5},
    ]
    assert straggler_metrics(recorder.spans()) == {"time/straggler_generate": pytest.approx(2.5 / 2.0)}


def test_who_is_slowest_how_often() -> None:
    spans = [
        Span("values", 0, 1, step, "critic", worker_s={"critic 0": 1.0, "critic 1": slow, "critic 2": 1.0})
        for step, slow in enumerate([2.0, 3.0, 0.5])
    ]
    spans += [Span("publish", 0, 1, 0, "rollout", worker_s={"rollout 0": 1.0, "actor 0": 5.0})]
    assert [(row.worker, row.median_s, row.max_s, row.slowest, row.steps) for row in worker_table(spans)] == [
        ("critic 1", 2.0, 3.0, 2, 3),
        ("critic 0", 1.0, 1.0, 1, 3),
        ("critic 2", 1.0, 1.0, 0, 3),
    ], "a role with one worker has no straggler"
    assert straggler_metrics(spans[:1]) == {"time/straggler_values": 2.0}
