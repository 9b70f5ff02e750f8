"""Repetition and writing systems of answers, against slow references, and stragglers by worker."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from quartet.observe.health import (
    NGRAM,
    LanguageChange,
    repetition,
    script_counts,
    script_shares,
    straggler_metrics,
    worker_table,
)
from quartet.observe.spans import Span, SpanRecorder, note_workers, read_spans
from quartet.observe.trackers import JsonlTracker


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
        assert repetition(ids) == pytest.approx(slow_repetition(ids)), ids


def test_repetition_of_a_loop() -> None:
    # 4-grams: 1234 2345 3451 4512 5123 are new, then 1234 … 5123 once more: 5 of 10, 8 tokens.
    assert repetition([1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3]) == (0.5, 8)
    assert repetition([7]) == (0.0, 0) == repetition([])


def test_letters_are_counted_by_their_script() -> None:
    text = "Aé 12!? жЖ 中文々 カタカナー ひら ＡＢ 𝐱 한글\ud800\n"
    assert script_counts(text) == {"latin": 5, "cyrillic": 2, "han": 3, "katakana": 5, "hiragana": 2, "hangul": 2}
    assert script_counts("12 + 3 =\n") == {} and script_shares([{}]) == {}


def test_rare_scripts_are_one_share() -> None:
    shares = script_shares([{"latin": 990, "thai": 5}, {"greek": 5, "latin": 0}])
    assert shares == pytest.approx({"language/latin": 0.99, "language/other": 0.01})


def test_change_is_against_the_first_steps_also_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    change, tracker = LanguageChange(path), JsonlTracker(path)
    tracker.log(0, {"eval/score_mean": 1.0})
    latin, mixed = {"language/latin": 1.0}, {"language/latin": 0.5, "language/han": 0.5}
    assert change.of(latin) is None, "nothing to compare the first step with"
    for step in range(1, 10):
        tracker.log(step, latin if step < 5 else mixed)
    tracker.close()
    # The first five: four all latin and one of halves.
    assert LanguageChange(path).of(mixed) == pytest.approx(0.4) == change.of({**mixed, "loss/policy": 3.0})
    assert change.of({}) is None, "no letters"


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
