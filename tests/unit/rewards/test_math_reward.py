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
from quartet.rewards import builtin
from quartet.rewards.builtin import MathSource

needs_library = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is missing")

KINDS_OF_MATH = r"""
1 - \sqrt{2}|1-\sqrt{2}|1
(1, 2)|(1,2)|1
8\pi|8\pi|8
11, 13|11,13|11
(-\infty, 2]|(-\infty,2]|2
2^{10}|1024|2
2+3i|2+3i|2
12.5\%|12.5\%|12
1{,}200|1200|1
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}|\begin{pmatrix}1&2\\3&4\end{pmatrix}|1
\{1, 2, 3\}|\{1,2,3\}|1
2\frac{1}{2}|\frac{5}{2}|2
y = 2x + 3|y=2x+3|2
42|42|4
-3|-3|3
\frac{1}{2}|\frac12|1
\frac12|0.5|1
0.5|\frac{1}{2}|0
\sqrt{2}|\sqrt{2}|2
2\sqrt{3}|2\sqrt3|2
\frac{\sqrt{3}}{2}|\frac{\sqrt3}{2}|3
\frac{-1+\sqrt{5}}{2}|\frac{\sqrt{5}-1}{2}|1
x^2 + 2x + 1|(x+1)^2|2
3x - 5|3x-5|3
\pi|\pi|3
\frac{\pi}{4}|\frac{\pi}{4}|4
e^{2}|e^2|2
10^{-3}|0.001|10
\log_2 3|\log_2 3|2
[0, 1)|[0,1)|0
(-\infty, 0) \cup (3, \infty)|(-\infty,0)\cup(3,\infty)|3
\left( \frac{1}{2}, 3 \right)|\left(\frac12,3\right)|3
(2, -1, 4)|(2,-1,4)|2
\left\{ -1, 4 \right\}|\{-1,4\}|4
\begin{pmatrix} 2 \\ 5 \end{pmatrix}|\begin{pmatrix}2\\5\end{pmatrix}|2
\begin{bmatrix} 0 & 1 \\ 1 & 0 \end{bmatrix}|\begin{bmatrix}0&1\\1&0\end{bmatrix}|0
-\frac{2}{3}|-\frac23|2
1,000,000|1000000|1
\$18.50|18.5|18
90^\circ|90|9
5\text{ cm}|5|cm
\text{(B)}|\text{(B)}|\text{(A)}
\text{Evelyn}|\text{Evelyn}|\text{Bob}
x \leq 3|x\leq3|x \leq 2
-2 < x < 5|-2<x<5|5
x = 4|4|3
x = 1, 2|1,2|1
\pm 3|3,-3|3
0.\overline{3}|\frac13|0
3!|6|3
\binom{5}{2}|10|5
\frac{x+1}{x-2}|\frac{x+1}{x-2}|1
\cos 20^\circ|\cos 20^\circ|20
i|i|1
2^{3/2}|2\sqrt2|2
4:3|\frac43|4
1011_2|1011_2|101
"""
"""Answers as the data set MATH has them, 57 kinds: each with an equal one, and a part of it or its first number."""
OTHER_KINDS = r"""
18 dollars|18|1
120,000 people|120000|120
\frac{1}{2} cup|\frac12|1
5 mL|5|4
100 km/h|100|10
10 m/s^2|10|1
25 cm^2|25|2
50 J|50|5
3 x/y|3x/y|3
3 x^2|3x^2|3
1e5|100000|1
1500|1.5e3|1
\pi/2|\frac{\pi}{2}|2
pi/2|\frac{\pi}{2}|2
sin(x) + 1|\sin x+1|1
2 1/2|2\frac12|2
-2 1/2|-2.5|2.5
0.1\overline{6}|\frac16|0.1
-3.\overline{45}|-\frac{38}{11}|3
2xy|2xy|2
x^2 + xyz + 1|x^2+xyz+1|1
x=5 or x=6|5,6|6
1 and 2|1,2|2
\$1{,}200 \text{ per day}|1200|1
2**10|1024|2
**5**|5|4
$1 - \sqrt{2}$|1-\sqrt2|1
so \(x=4\)|4|3
The answer is 5|5|4
She sold 48 + 24 = 72 clips.#### 72|72|48
"""
"""With units, in words, with delimiters, and in plain text."""


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
@pytest.mark.parametrize("kinds", [KINDS_OF_MATH, OTHER_KINDS])
def test_a_right_answer_is_read_whole(kinds: str, source: MathSource) -> None:
    rows = [row.split("|") for row in kinds.strip().splitlines()]
    assert len(rows) in (57, 30)
    golds, equal, parts = zip(*rows, strict=True)
    for given, expected in ((equal, 1.0), (parts, 0.0)):
        found = score(source, *((f"so \\boxed{{{text}}}", gold) for text, gold in zip(given, golds, strict=True)))
        wrong = [(gold, text) for gold, text, value in zip(golds, given, found, strict=True) if value != expected]
        assert not wrong, expected


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
    monkeypatch.setattr(builtin, "_PATIENCE", 0.2)
    assert score(source, ("5", "5")) == [1.0]
    os.kill(pid(source), signal.SIGSTOP)
    assert score(source, ("5", "5")) == [0.0], "what shows no equality in time scores nothing"
    monkeypatch.undo()
    assert score(source, ("5", "5")) == [1.0]
    os.kill(pid(source), signal.SIGKILL)
    assert score(source, ("5", "5")) == [1.0], "what ended it was not the completion"


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="math-verify") as caught:
        MathSource(MathReward())
    assert "quartet-rl[math]" in caught.value.remedy
