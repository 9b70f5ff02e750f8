"""Code as a reward: which text is the program, what a test is, how tests make a score."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import pytest

from quartet.config import UserError
from quartet.config.rewards import CodeReward, Isolation
from quartet.rewards import code_tests
from quartet.rewards.code_tests import Case, CodeSource, extract_code, read_tests
from quartet.rewards.sandbox.run import SandboxError, SolutionCheck
from quartet.rewards.source import RewardError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is made of Linux' namespaces")
DOUBLE = "print(2 * int(input()))"
PAIRS = [{"input": "2\n", "output": "4\n"}, {"input": "5", "output": "10"}]


def score(config: CodeReward, completions: list[str], tests: list[Any]) -> list[float | None]:
    source = CodeSource(config)
    source.check_columns(["tests"])
    try:
        return asyncio.run(source.score(["?"] * len(completions), completions, {"tests": tests}))
    finally:
        source.close()


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("x = 1", "x = 1"),
        ("First\n```python\nx = 1\n```\nthen\n```py\nx = 2\n```\nDone", "x = 2\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```Python\r\nx = 1\r\n```", "x = 1\r\n"),
        ("```bash\nls\n```", "```bash\nls\n```"),
    ],
)
def test_the_code_of_a_completion(completion: str, code: str) -> None:
    assert extract_code(completion) == code


def test_a_long_run_of_spaces_is_no_reason_to_wait() -> None:
    text = "```" + " " * 100_000 + "x"
    start = time.monotonic()
    assert extract_code(text) == text
    assert time.monotonic() - start < 5


def test_forms_of_tests() -> None:
    asserts = "import math\nassert f(1) == 2\n\nassert f(2) == 3, 'three'\n"
    assert read_tests(asserts) == [
        SolutionCheck("import math", False),
        SolutionCheck("assert f(1) == 2"),
        SolutionCheck("assert f(2) == 3, 'three'"),
    ]
    whole = "def check(f):\n    assert f(1) == 2\ncheck(g)"
    assert read_tests(whole) == [SolutionCheck(whole)]
    assert read_tests(["x = 1\nassert f(x)", "assert f(2)"]) == [
        SolutionCheck("x = 1\nassert f(x)"),
        SolutionCheck("assert f(2)"),
    ]
    cases = [Case("2\n", "4\n"), Case("5", "10")]
    assert read_tests(PAIRS) == cases
    assert read_tests({"inputs": ["2\n", "5"], "outputs": ["4\n", "10"]}) == cases
    assert read_tests(json.dumps(PAIRS)) == cases
    assert read_tests([{"input": ["1", "2"], "output": [3]}]) == [Case("1\n2", "3")]
    assert read_tests("[f(1)]\nassert f(2)") == [SolutionCheck("[f(1)]", False), SolutionCheck("assert f(2)")], (
        "not JSON"
    )


@pytest.mark.parametrize(
    "value",
    [
        *("", "assert f(", [], [1], 3, {"inputs": ["1"], "outputs": []}, [{"input": "1"}], [""]),
        # One case is no list of cases, nor is a call an input; what is nested too deeply ends no run with a traceback.
        *({"inputs": None, "outputs": None}, {"inputs": "12", "outputs": "34"}, "[" * 10**5, "-" * 10**5 + "1"),
        *("assert " + "f(1) + " * 10**4 + "1", {"fn_name": "f", "inputs": [[1]], "outputs": [[2]]}, "assert '\ud800'"),
    ],
)
def test_what_is_no_test(value: Any) -> None:
    with pytest.raises(ValueError):
        read_tests(value)


def test_scores_of_asserts() -> None:
    right, half = "def f(x):\n    return x + 1", "def f(x):\n    return 2"
    tests = ["assert f(1) == 2", "assert f(5) == 6"]
    completions = [right, f"So:\n```python\n{half}\n```", "def g(): pass", right]
    assert score(CodeReward(), completions, [tests, tests, tests, None]) == [1.0, 0.5, 0.0, None]
    assert score(CodeReward(score="all"), completions, [tests, tests, tests, None]) == [1.0, 0.0, 0.0, None]


@pytest.mark.parametrize("isolation", ["namespaces", "process"])
def test_scores_of_inputs_and_outputs(isolation: Isolation) -> None:
    completions = [DOUBLE, "print(4)", f"{DOUBLE}\nimport os; os._exit(3)", "import sys; sys.exit(0)"]
    assert score(CodeReward(isolation=isolation), completions, [PAIRS] * 4) == [1.0, 0.5, 0.0, 0.0]
    spaces = [{"input": "", "output": "a\nb"}]
    assert score(CodeReward(), ["print('a  \\nb \\n\\n')", "print('a b')"], [spaces] * 2) == [1.0, 0.0]


def test_what_could_not_be_judged_is_remarked() -> None:
    source = CodeSource(CodeReward())
    lazy = "class Far(Exception): pass\ndef f(n):\n    yield n"
    try:
        columns = {"tests": [["assert 3 in f(3)", "assert f(1) == 1"]] * 2}
        found = asyncio.run(source.score(["?"] * 2, [lazy, "def f(n): return [n]"], columns))
    finally:
        source.close()
    assert found == [0.0, 0.5]
    made, refused = source.warnings()
    assert "sandbox made by" in made
    assert "2 tests failed unjudged" in refused and "a generator, which is lazy" in refused
    assert len(CodeSource(CodeReward(isolation="process")).warnings()) == 1


def test_code_that_was_too_slow_once_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    real = code_tests.run_program
    monkeypatch.setattr(code_tests, "run_program", lambda *a: (runs.append(a), real(*a))[1])
    slow = "n = int(input())\nwhile n > 2: pass\nprint(2 * n)"
    pairs = [PAIRS[0], PAIRS[1], PAIRS[1], PAIRS[1]]
    assert score(CodeReward(timeout_s=0.5), [slow], [pairs]) == [0.25]
    assert len(runs) == 2


def test_tests_that_cannot_be_read_are_shown() -> None:
    with pytest.raises(RewardError, match="line 1") as caught:
        score(CodeReward(), ["x"], ["assert f("])
    assert "assert f(" in caught.value.found


def test_a_machine_without_sandbox_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(isolation: str) -> None:
        raise SandboxError("unshare: Operation not permitted")

    monkeypatch.setattr(code_tests, "check_sandbox", refuse)
    with pytest.raises(UserError, match="user namespaces") as caught:
        CodeSource(CodeReward())
    assert "Operation not permitted" in caught.value.found and "isolation: process" in caught.value.remedy


def test_a_sandbox_that_fails_later_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise SandboxError("fork: Resource temporarily unavailable")

    monkeypatch.setattr(code_tests, "judge", refuse)
    with pytest.raises(RewardError, match="sandbox"):
        score(CodeReward(), ["x = 1"], ["assert x == 1"])
