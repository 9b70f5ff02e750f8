"""Code as a reward: which text is the program, what a test is, how tests make a score."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from quartet.config import UserError
from quartet.extras.sandbox import code_tests
from quartet.extras.sandbox.code_tests import Case, CodeSource, extract_code, read_tests
from quartet.extras.sandbox.config import CodeReward
from quartet.extras.sandbox.run import SandboxError, SolutionCheck
from quartet.rewards.source import RewardError
from sandboxes import needs_sandbox

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
        # A fence of another language is no start of ours, and its end none either.
        ("```bash\nls\n```\nso\n```python\nx = 1\n```\nDone", "x = 1\n"),
        # In a list: without the indentation of its fence.
        ("1. Do:\n\n   ```python\n   if x:\n       y = 1\n\n   z = 2\n   ```\n2. Done", "if x:\n    y = 1\n\nz = 2\n"),
        ("- ```py\n  def f():\n    return 1\n  ```", "def f():\n  return 1\n"),
        ("\t```py\n\tif x:\n\t\ty = 1\n\t```", "if x:\n\ty = 1\n"),
    ],
)
def test_the_code_of_a_completion(completion: str, code: str) -> None:
    assert extract_code(completion) == code


def test_a_long_run_of_spaces_is_no_reason_to_wait() -> None:
    start = time.monotonic()
    for text in (
        "```" + " " * 100_000 + "x",
        " " * 100_000 + "x",
        "`" * 100_000,
        "```py\n" * 20_001,
    ):
        extract_code(text)
    assert time.monotonic() - start < 5


def test_forms_of_tests() -> None:
    asserts = "import math\nassert f(1) == 2\n\nassert f(2) == 3, 'three'\n"
    assert read_tests(asserts) == [
        SolutionCheck("import math", False),
        SolutionCheck("assert f(1) == 2"),
        SolutionCheck("assert f(2) == 3, 'three'"),
    ]
    checked = "def check(f):\n    assert f(1) == 2"
    assert read_tests(f"{checked}\ncheck(g)") == [SolutionCheck(checked, False), SolutionCheck("check(g)")]
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


HUMANEVAL = """

METADATA = {'author': 'jt', 'dataset': 'test'}


def check(candidate):
    assert candidate([1.0, 2.0], 0.5) == False
    assert candidate([1.0, 2.0, 1.2], 0.5) == True

"""
PYTEST = """
import pytest
from solution import add as plus

def test_many():
    for a, b in [(1, 2), (3, 4)]:
        assert plus(a, b) == a + b

def test_near():
    assert plus(0.1, 0.2) == pytest.approx(0.3)

class TestErrors:
    text = "a"

    def test_text(self):
        with pytest.raises(TypeError, match="str"):
            plus(self.text, 1)

if __name__ == "__main__":
    pytest.main([__file__])
"""
UNITTEST = """
import unittest
import solution

class TestAdd(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.seven = 7

    def setUp(self):
        self.two = solution.add(1, 1)

    def test_base(self):
        self.assertEqual(self.two, 2)

    def test_seven(self):
        with self.subTest(n=3):
            self.assertEqual(solution.add(3, 4), self.seven)

    def test_text(self):
        self.assertRaises(TypeError, solution.add, "a", 1)

if __name__ == "__main__":
    unittest.main()
"""
ADD = "def add(a, b):\n    return a + b\n"


def counted(value: Any, entry_point: str | None = None) -> list[str]:
    """The last line of each test."""
    tests = read_tests(value, entry_point)
    return [test.source.split("\n")[-1] for test in tests if isinstance(test, SolutionCheck) and test.counts]


def test_frameworks_of_tests_are_what_they_are() -> None:
    assert counted(HUMANEVAL, "has_close") == ["check(has_close)"]
    assert counted("def check(candidate):\n    assert candidate(1)", "Solution().run") == ["check(Solution().run)"]
    assert counted(PYTEST) == ["test_many()", "test_near()", "TestErrors().test_text()"]
    methods = ("base", "seven", "text")
    assert counted(UNITTEST) == [f"unittest.TestSuite([TestAdd('test_{name}')]).debug()" for name in methods]
    assert counted(["def test_a():\n    assert f(1)", "import math", "assert f(2)"]) == ["test_a()", "assert f(2)"]
    assert counted("if __name__ == '__main__':\n    assert f(1) == 2\n    print('ok')") == ["assert f(1) == 2"]
    # What is called counts where it is called.
    assert counted("def same(a, b):\n    assert a == b\nassert f(0)\nsame(f(1), 2)") == ["assert f(0)", "same(f(1), 2)"]
    assert counted(["def same(a, b):\n    assert a == b", "same(f(1), 2)"]) == ["same(f(1), 2)"]
    assert counted("def test_a():\n    assert f(1)\nif __name__ == '__main__':\n    test_a()") == ["test_a()"]
    # Beside asserts and test functions, what checks otherwise.
    assert counted("def test_a():\n    assert f(1)\nfor n in range(3):\n    assert f(n)") == [
        "    assert f(n)",
        "test_a()",
    ]
    assert counted("assert f(1) == 2\nfor n in range(3):\n    assert f(n) == n + 1")[1:] == ["    assert f(n) == n + 1"]
    assert counted("assert f(1) == 2\ntry:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    raise KeyError")[1:]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        *((value, "no test") for value in ("'Tests of f.'", "import math", "print(f(1))", "x = f(1)\nprint(x)")),
        *((value, "no test") for value in (["import math", "print(f(1))"], "class TestNothing:\n    pass")),
        ("def helper(a):\n    assert a", "no test"),
        (HUMANEVAL, "entry_point"),
        ("def test_f(tmp_path):\n    assert f(tmp_path)", "tmp_path"),
        ("async def test_f():\n    assert await f()", "async"),
        ("import pytest\n@pytest.fixture\ndef one():\n    return 1\ndef test_f(one):\n    assert f(one)", "fixture"),
        # Functions that only call the code would fail whatever it does.
        ("def test_f():\n    return f(1) == 2", "no test"),
        ("def check(candidate):\n    try:\n        candidate(1)\n    except TypeError:\n        pass", "no test"),
        (UNITTEST.replace("    def test_base", "    @unittest.skip('later')\n    def test_base"), "unittest.skip"),
        ("import pytest\n@pytest.mark.parametrize('a', [1])\ndef test_f(a):\n    assert f(a)", "parametrize"),
        ("def setup_module():\n    pass\ndef test_f():\n    assert f(1)", "setup_module"),
        ("import numpy as np\nassert np.allclose(f(1), 2)", "numpy"),
    ],
)
def test_tests_that_would_test_nothing_are_refused(value: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_tests(value)


@needs_sandbox
def test_tests_of_every_framework_are_run() -> None:
    close = "def has_close(n, t):\n    return any(abs(a - b) < t for i, a in enumerate(n) for b in n[:i])"
    wrong = "def has_close(n, t):\n    return False"
    text = "def add(a, b):\n    return f'{a}{b}'"  # raises no TypeError
    source = CodeSource(CodeReward(timeout_s=20))
    try:
        columns: dict[str, list[Any]] = {"tests": [HUMANEVAL, HUMANEVAL, PYTEST, PYTEST, UNITTEST, UNITTEST]}
        columns["entry_point"] = ["has_close"] * 6
        found = asyncio.run(source.score(["?"] * 6, [close, wrong, ADD, text, ADD, text], columns))
        assert found == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    finally:
        source.close()


@pytest.mark.parametrize(
    "value",
    [
        *("", "assert f(", [], [1], 3, {"inputs": ["1"], "outputs": []}, [{"input": "1"}], [""]),
        # One case is no list of cases, nor is a call an input; what is nested too deeply ends no run with a traceback.
        *({"inputs": None, "outputs": None}, {"inputs": "12", "outputs": "34"}, "[" * 10**5, "-" * 10**5 + "1"),
        *("assert " + "f(1) + " * 10**4 + "1", {"fn_name": "f", "inputs": [[1]], "outputs": [[2]]}, "assert '\ud800'"),
        *("x = 1", "def test_f():\n    pass", "import solution"),  # nothing is checked
    ],
)
def test_what_is_no_test(value: Any) -> None:
    with pytest.raises(ValueError):
        read_tests(value)


@needs_sandbox
def test_scores_of_asserts() -> None:
    right, half = "def f(x):\n    return x + 1", "def f(x):\n    return 2"
    tests = ["assert f(1) == 2", "assert f(5) == 6"]
    completions = [right, f"So:\n```python\n{half}\n```", "def g(): pass", right]
    assert score(CodeReward(), completions, [tests, tests, tests, None]) == [1.0, 0.5, 0.0, None]
    assert score(CodeReward(score="all"), completions, [tests, tests, tests, None]) == [1.0, 0.0, 0.0, None]


@needs_sandbox
def test_scores_of_inputs_and_outputs() -> None:
    completions = [DOUBLE, "print(4)", f"{DOUBLE}\nimport os; os._exit(3)"]
    assert score(CodeReward(), completions, [PAIRS] * 3) == [1.0, 0.5, 0.0]
    spaces = [{"input": "", "output": "a\nb"}]
    assert score(CodeReward(), ["print('a  \\nb \\n\\n')", "print('a b')"], [spaces] * 2) == [1.0, 0.0]


@needs_sandbox
def test_code_that_was_too_slow_once_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    real = code_tests.run_program
    monkeypatch.setattr(code_tests, "run_program", lambda *a: (runs.append(a), real(*a))[1])
    slow = "n = int(input())\nwhile n > 2: pass\nprint(2 * n)"
    pairs = [PAIRS[0], PAIRS[1], PAIRS[1], PAIRS[1]]
    assert score(CodeReward(timeout_s=0.5), [slow], [pairs]) == [0.25]
    assert len(runs) == 2


@needs_sandbox
def test_tests_that_cannot_be_read_are_shown() -> None:
    with pytest.raises(RewardError, match="line 1") as caught:
        score(CodeReward(), ["x"], ["assert f("])
    assert "assert f(" in caught.value.found


def test_a_machine_without_sandbox_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise SandboxError("unshare: Operation not permitted")

    monkeypatch.setattr(code_tests, "check_sandbox", refuse)
    with pytest.raises(UserError, match="user namespaces") as caught:
        CodeSource(CodeReward())
    assert "Operation not permitted" in caught.value.found and "bubblewrap" in caught.value.remedy


@needs_sandbox
def test_a_sandbox_that_fails_later_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise SandboxError("fork: Resource temporarily unavailable")

    monkeypatch.setattr(code_tests, "judge", refuse)
    with pytest.raises(RewardError, match="sandbox"):
        score(CodeReward(), ["x = 1"], ["assert x == 1"])
