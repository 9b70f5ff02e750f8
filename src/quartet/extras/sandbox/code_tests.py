"""Reward for code: what of its tests the completion's program passes."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from quartet.config.errors import UserError
from quartet.extras.sandbox.child import PYTEST_NAMES
from quartet.extras.sandbox.config import CodeReward
from quartet.extras.sandbox.run import SandboxError, SandboxLimits, SolutionCheck, check_sandbox, judge, run_program
from quartet.rewards.source import Columns, LimitedThreads, RewardError, RewardSource, Scores
from quartet.text.examples import PromptText

# No part gives back what it has taken: a long run of spaces is read once.
_FENCED = re.compile(r"```[ \t]*+([\w+#.-]*+)[ \t]*+\r?\n(.*?)```", re.DOTALL)
_PYTHON = re.compile(r"(py(thon3?)?)?", re.IGNORECASE)


@dataclass(frozen=True)
class Case:
    """What a program reads and must write."""

    text: str
    output: str


Tests: TypeAlias = Sequence[Case] | Sequence[SolutionCheck]


class CodeSource(RewardSource):
    """See :class:`~quartet.config.rewards.CodeReward`.

    Raises:
        UserError: this machine does not allow the sandbox.
    """

    column: str

    def __init__(self, config: CodeReward) -> None:
        self.name, self.column = config.name, config.column
        self._all = config.score == "all"
        self._limits = SandboxLimits(wall_s=config.timeout_s, memory_bytes=config.memory_mb << 20)
        try:
            check_sandbox()
        except SandboxError as error:
            raise UserError(
                f"the reward {self.name!r} needs a sandbox that this machine does not allow",
                found=str(error),
                remedy="install bubblewrap (apt-get install bubblewrap) and allow user namespaces (in a container: "
                "--privileged, or the seccomp profile and /proc unmasked; Linux 5.14 or newer); or score code by a "
                "server with type: http",
            ) from error
        self._threads = LimitedThreads(config.concurrency, self.name)

    async def score(self, prompts: Sequence[PromptText], completions: Sequence[str], columns: Columns) -> Scores:
        names = columns.get("entry_point") or [None] * len(completions)
        samples = zip(completions, columns[self.column], names, strict=True)
        return [await self._threads.run(self._score, *sample) for sample in samples]

    def _score(self, completion: str, value: Any, entry_point: Any) -> float | None:
        if value is None:
            return None
        try:
            tests = read_tests(value, entry_point)
        except ValueError as error:
            raise RewardError(
                f"the reward {self.name!r} cannot use the tests of a sample",
                found=f"{error}: {value!r:.300}",
                remedy=f"give the column {self.column!r} a form of docs/rewards.md: asserts, functions of pytest, "
                "classes of unittest, check(candidate) with a column entry_point, pairs of input and output",
            ) from error
        try:
            passed = self._passed(extract_code(completion), tests)
        except SandboxError as error:
            raise RewardError(
                f"the reward {self.name!r} could not set up its sandbox",
                found=str(error),
                remedy="the machine may be out of processes or memory; lower its concurrency and resume the run",
            ) from error
        return float(all(passed)) if self._all else sum(passed) / len(passed)

    def _passed(self, code: str, tests: Tests) -> list[bool]:
        if isinstance(tests[0], SolutionCheck):
            checks = [test for test in tests if isinstance(test, SolutionCheck)]
            return [not failure for failure in judge(code, checks, self._limits)]
        passed: list[bool] = []
        for case in tests:
            assert isinstance(case, Case), "tests are of one kind"
            run = run_program(code, case.text, self._limits)
            is_right = run.ended == "by itself" and run.status == 0 and _same_output(run.output, case.output)
            passed.append(is_right)
            # One run out of time, or one test failed where all must pass, and the others need not be waited for.
            if run.ended == "time" or (self._all and not is_right):
                break
        return passed + [False] * (len(tests) - len(passed))

    def close(self) -> None:
        self._threads.close()


def extract_code(completion: str) -> str:
    """Returns the last fenced block that is marked as Python or not at all, without the indentation of a list that it
    stands in; the whole text where there is none.
    """
    blocks = [body for language, body in _FENCED.findall(completion) if _PYTHON.fullmatch(language)]
    return textwrap.dedent(blocks[-1]) if blocks else completion


def read_tests(value: Any, entry_point: str | None = None) -> Tests:
    """Reads the tests of a data row: Python source, a list of it (each one test), pairs ``{"input", "output"}``, two
    lists ``{"inputs", "outputs"}``, or JSON of any of these.

    In one piece of source every top-level statement that checks something counts as a test, every pytest function,
    every method of a unittest class, and ``check(candidate)``, which is called with what ``entry_point`` names.

    Raises:
        ValueError: none of these, or no test in it.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(json.JSONDecodeError, RecursionError):  # Python may begin so, too.
            value = json.loads(value)
    if isinstance(value, Mapping) and {"inputs", "outputs"} <= set(value):
        if value.get("fn_name"):
            raise ValueError("calls of the function that fn_name names, which must be written as asserts")
        if not all(isinstance(value[name], list | tuple) for name in ("inputs", "outputs")):
            raise ValueError("inputs and outputs are not two lists")
        value = [{"input": i, "output": o} for i, o in zip(value["inputs"], value["outputs"], strict=True)]
    tests: Tests
    if isinstance(value, str):
        (tests,) = _source_tests([value], entry_point)
    elif isinstance(value, Sequence) and value and all(isinstance(item, str) for item in value):
        entries = _source_tests(value, entry_point)
        tests = [SolutionCheck("\n".join(t.source for t in entry), any(t.counts for t in entry)) for entry in entries]
    elif isinstance(value, Sequence) and all(isinstance(i, Mapping) and {"input", "output"} <= set(i) for i in value):
        tests = [Case(_lines(item["input"]), _lines(item["output"])) for item in value]
    else:
        raise ValueError("neither Python nor pairs of input and output")
    if not any(isinstance(test, Case) or test.counts for test in tests):
        raise ValueError("there is no test in it: nothing that checks what the code does")
    return tests


_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


def _source_tests(sources: Sequence[str], entry_point: str | None) -> list[list[SolutionCheck]]:
    """Cuts each of the sources, which share one namespace, into its top-level statements, and calls of what they
    define.

    Raises:
        ValueError: they are not Python, or need what the sandbox does not have.
    """
    bodies = [_parsed(source) for source in sources]
    nodes = [node for body in bodies for statement in body for node in ast.walk(statement)]
    _check_modules(nodes)
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    # Functions that check when they are called: they hold a check, or call another that does.
    functions = [node for node in nodes if isinstance(node, _Function)]
    checking: set[str] = set()
    while more := {f.name for f in functions if _checks(f, checking)} - checking:
        checking |= more
    found = []
    for body in bodies:
        calls = [call for node in body for call in _calls(node, checking, called, entry_point)]
        statements = [
            SolutionCheck(
                text := ast.unparse(node),
                # A test function that the source calls itself is one test all the same.
                not isinstance(node, _Function | ast.ClassDef) and _checks(node, checking) and text not in calls,
            )
            for node in body
        ]
        found.append(statements + [SolutionCheck(call) for call in calls])
    return found


def _checks(node: ast.AST, checking: set[str]) -> bool:
    """Tells whether something in there can make a test fail by what it finds: ``assert``, ``raise``, or a call named
    so or of one of the functions ``checking``.
    """
    for part in ast.walk(node):
        match part:
            case ast.Assert() | ast.Raise():
                return True
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                if name.startswith("assert") or name in ("fail", "raises", "exit", "_exit", "quit") or name in checking:
                    return True
    return False


def _calls(node: ast.stmt, checking: set[str], called: set[str], entry_point: str | None) -> list[str]:
    """Writes source that runs the tests that a definition at the top is, each by itself: as pytest, unittest and
    HumanEval do.
    """
    if isinstance(node, _Function) and node.name in checking:
        if node.name == "check" and "check" not in called and len(node.args.args) == 1:
            if not entry_point:
                raise ValueError("check(candidate) is never called, and no column entry_point names what to check")
            return [f"check({entry_point})"]
        if node.name.startswith("test") and not (node.name in called and node.args.args):
            _check_arguments(node, node.args.args)
            return [f"{node.name}()"]
    if isinstance(node, ast.ClassDef):
        tests = [each for each in node.body if isinstance(each, _Function) and each.name.startswith("test")]
        if any(ast.unparse(base).endswith("TestCase") for base in node.bases):
            case = "import unittest\nunittest.TestSuite([{}({!r})]).debug()"
            return [case.format(node.name, test.name) for test in tests]
        if node.name.startswith("Test"):
            for test in tests:
                _check_arguments(test, test.args.args[1:])
            return [f"{node.name}().{test.name}()" for test in tests]
    return []


def _parsed(source: str) -> list[ast.stmt]:
    """Returns the statements of a source of tests: those that run it as a program in their place, without the calls
    that start a framework.
    """
    try:
        body = ast.parse(source).body
        ast.unparse(ast.Module(body, type_ignores=[]))
    except SyntaxError as error:
        raise ValueError(f"not Python (line {error.lineno}: {error.msg})") from None
    except (RecursionError, MemoryError):
        raise ValueError("Python that is nested too deeply") from None
    found: list[ast.stmt] = []
    for node in body:
        is_main = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        found += node.body if isinstance(node, ast.If) and is_main else [node]
    return [node for node in found if not _STARTS_FRAMEWORK.match(ast.unparse(node))]


_NOT_RUN = ("unittest.skip", "unittest.expectedFailure", "setup_", "setUpModule")
_STARTS_FRAMEWORK = re.compile(r"(unittest|pytest)\.main\(")


def _check_modules(nodes: Sequence[ast.AST]) -> None:
    """Raises ``ValueError`` where tests use a module that the sandbox does not have, and so would always fail."""
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    here = {*sys.stdlib_module_names, "solution", "pytest"}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                module = alias.name.partition(".")[0]
                if module not in here and (alias.asname or module) in used:
                    raise ValueError(f"it uses {module}, which the sandbox does not have (the standard library alone)")
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else getattr(node, "name", None) or ""
        if name.startswith(_NOT_RUN):
            raise ValueError(f"it has {name}, which is not run here")
        if name.startswith("pytest.") and not name.startswith(PYTEST_NAMES):
            raise ValueError(f"it uses {name}; of pytest the sandbox has {', '.join(PYTEST_NAMES)}")


def _check_arguments(function: _Function, arguments: Sequence[ast.arg]) -> None:
    """Raises ``ValueError`` where a test cannot be called by its name alone."""
    if isinstance(function, ast.AsyncFunctionDef):
        raise ValueError(f"{function.name} is async, which pytest needs a plugin for")
    missing = [argument.arg for argument in arguments[: len(arguments) - len(function.args.defaults)]]
    if missing:
        raise ValueError(f"{function.name} takes {', '.join(missing)}, and nothing gives it (there are no fixtures)")


def _lines(value: Any) -> str:
    """Joins the lines of a text: some data sets hold a list of them."""
    return "\n".join(str(line) for line in value) if isinstance(value, list) else str(value)


def _same_output(output: bytes, expected: str) -> bool:
    """Tells whether outputs are the same line by line, white space at the ends of lines and of the whole aside."""
    found = output.decode("utf-8", errors="replace")
    return [line.rstrip() for line in found.rstrip().splitlines()] == [
        line.rstrip() for line in expected.rstrip().splitlines()
    ]
