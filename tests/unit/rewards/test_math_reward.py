"""Mathematical equality through math-verify, in processes that cannot hang the run."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from quartet.config import UserError
from quartet.config.rewards import MathReward
from quartet.rewards import mathematics
from quartet.rewards.mathematics import MathSource

needs_library = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is missing")


@pytest.fixture(scope="module")
def source() -> Iterator[MathSource]:
    made = MathSource(MathReward(timeout_s=2.0, concurrency=1))
    yield made
    made.close()


def score(source: MathSource, *pairs: tuple[str, Any]) -> list[float | None]:
    completions, answers = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return asyncio.run(source.score(["?"] * len(pairs), completions, {"answer": answers}))


def pid(source: MathSource) -> int:
    process = source._pool._slots[0].process
    assert process is not None
    return process.pid


@needs_library
def test_equal_in_mathematics(source: MathSource) -> None:
    right = [
        ("so it is $\\frac{1}{2}$", "0.5"),
        ("\\boxed{\\frac{2}{4}}", "\\frac{1}{2}"),
        ("the answer is 1,000", 1000),
        ("$x^2 + 2x + 1$", "$(x+1)^2$"),
        ("\\boxed{\\{3, 1\\}}", "$\\{1, 3\\}$"),
        ("The final answer is $\\sqrt{8}$", "$2\\sqrt{2}$"),
    ]
    assert score(source, *right) == [1.0] * len(right)
    wrong = [("so it is $\\frac{1}{3}$", "0.5"), ("no idea", "5"), ("", "5"), ("\\boxed{}", "5"), ("4", "5")]
    assert score(source, *wrong) == [0.0] * len(wrong)


@needs_library
def test_rows_without_an_answer_do_not_apply(source: MathSource) -> None:
    assert score(source, ("5", None), ("5", "")) == [None, None]


@needs_library
def test_what_never_ends_scores_nothing_and_holds_up_no_other(source: MathSource) -> None:
    start = time.monotonic()
    huge = "\\boxed{9^{9^{9^{9^{9}}}}}"
    assert score(source, (huge, "5"), ("5", "5"), ("x" * 200_000, "5")) == [0.0, 1.0, 0.0]
    assert time.monotonic() - start < 60


@needs_library
def test_a_process_that_is_stuck_or_lost_is_replaced(source: MathSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics, "_PATIENCE", 0.2)
    assert score(source, ("5", "5")) == [1.0]
    os.kill(pid(source), signal.SIGSTOP)
    assert score(source, ("5", "5")) == [0.0], "what shows no equality in time scores nothing"
    monkeypatch.undo()
    assert score(source, ("5", "5")) == [1.0]
    os.kill(pid(source), signal.SIGKILL)
    assert score(source, ("5", "5")) == [1.0], "what ended it was not the completion"


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="math-verify") as caught:
        MathSource(MathReward())
    assert "quartet-rl[math]" in caught.value.remedy
