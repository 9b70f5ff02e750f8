"""Reward for code: what of its tests the completion's program passes."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from quartet.config.errors import UserError, printable
from quartet.extras.sandbox.child import PYTEST_NAMES, is_check
from quartet.extras.sandbox.config import CodeReward
from quartet.extras.sandbox.run import (
    NothingTested,
    SandboxError,
    SandboxLimits,
    SolutionCheck,
    check_sandbox,
    judge,
    run_program,
)
from quartet.rewards.source import Columns, RewardError, RewardSource, Scores, Threads
from quartet.text.examples import PromptText

# A fence at the start of its line, in a list as well, or backticks behind text. White space before and behind the
# language stands in one place each: a long run of it is read once.
_FENCED = re.compile(
    r"(?:^(?P<indent>[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?)(?P<fence>`{3,}|~{3,})|(?<!`)(?P<inline>`{3,}))"
    r"[ \t]*(?:(?P<language>[\w+#.-]+)[ \t]*)?\r?\n(?P<body>.*?)(?:(?P=fence)|(?P=inline))",
    re.DOTALL | re.MULTILINE,
)
_PYTHON = re.compile(r"py(thon3?)?", re.IGNORECASE)


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
        self._limits = SandboxLimits(
            wall_s=config.timeout_s,
            output_bytes=config.output_kb << 10,
            cpu_s=config.cpu_s,
            memory_bytes=config.memory_mb << 20,
            disk_bytes=config.disk_mb << 20,
            processes=config.processes,
        )
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
        self._threads = Threads(config.concurrency, self.name)
        self._num_refused, self._first_refused = 0, ""

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
            raise self._unusable(error, value) from error
        try:
            passed = self._passed(extract_code(completion), tests)
        except NothingTested as error:
            raise self._unusable(error, value) from error
        except SandboxError as error:
            raise RewardError(
                f"the reward {self.name!r} could not set up its sandbox",
                found=str(error),
                remedy="the machine may be out of processes or memory; lower its concurrency and resume the run",
            ) from error
        return float(all(passed)) if self._all else sum(passed) / len(passed)

    def _unusable(self, error: Exception, value: Any) -> RewardError:
        return RewardError(
            f"the reward {self.name!r} cannot use the tests of a sample",
            found=f"{error}: {value!r:.300}",
            remedy=f"give the column {self.column!r} a form of docs/rewards.md: asserts, functions of pytest, "
            "classes of unittest, check(candidate) with a column entry_point, pairs of input and output",
        )

    def _passed(self, code: str, tests: Tests) -> list[bool]:
        if isinstance(tests[0], SolutionCheck):
            verdicts = judge(code, [test for test in tests if isinstance(test, SolutionCheck)], self._limits)
            for verdict in verdicts:
                self._num_refused += verdict.is_refused
                self._first_refused = self._first_refused or (verdict.reason if verdict.is_refused else "")
            return [verdict.passed for verdict in verdicts]
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

    def warnings(self) -> list[str]:
        """Tells how many tests failed because what crossed could not be judged."""
        if not self._num_refused:
            return []
        first = printable(self._first_refused)
        told = f"{self._num_refused} tests failed unjudged (docs/rewards.md); the first because {first}"
        return [f"reward {self.name!r}: {told}"]

    def close(self) -> None:
        self._threads.close()


def extract_code(completion: str) -> str:
    """Returns the last fenced block that is marked as Python or not at all, without its fence's indentation; the whole
    text where there is none.
    """
    code = completion
    for block in _FENCED.finditer(completion):
        if _PYTHON.fullmatch(block["language"] or "py"):
            code = block["body"]
            first = re.match(r"\s*?([ \t]*)\S", code)
            if width := min(len(block["indent"] or ""), len(first[1]) if first else 0):
                code = re.sub(rf"^[ \t]{{1,{width}}}", "", code, flags=re.MULTILINE)
    return code


def read_tests(value: Any, entry_point: str | None = None) -> Tests:
    """Reads the tests of a data row: Python source, a list of it (each one test), pairs ``{"input", "output"}``, two
    lists ``{"inputs", "outputs"}``, or JSON of any of these.

    In one piece of source every top-level statement with an ``assert`` counts as a test, every pytest function, every
    method of a unittest class, and ``check(candidate)``, which is called with what ``entry_point`` names.

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
        tests = _SourceTests([value], entry_point).each()
    elif isinstance(value, Sequence) and value and all(isinstance(item, str) for item in value):
        tests = _SourceTests(value, entry_point).listed()
    elif isinstance(value, Sequence) and all(isinstance(i, Mapping) and {"input", "output"} <= set(i) for i in value):
        tests = [Case(_lines(item["input"]), _lines(item["output"])) for item in value]
    else:
        raise ValueError("neither Python nor pairs of input and output")
    if not tests or not any(isinstance(test, Case) or test.counts for test in tests):
        raise ValueError("there is no test in it")
    return tests


_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class _SourceTests:
    """What the tests in Python sources are, which share one namespace.

    Raises:
        ValueError: they are not Python, or need what the sandbox does not have.
    """

    def __init__(self, sources: Sequence[str], entry_point: str | None) -> None:
        self._bodies = [_parsed(source) for source in sources]
        nodes = [node for body in self._bodies for statement in body for node in ast.walk(statement)]
        _check_modules(nodes)
        if not any(map(is_check, nodes)):
            raise ValueError("there is no test in it: no assert, no call named so, no branch that raises")
        self._entry_point = entry_point
        self._called = {
            node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        self._classes = {node.name: node for body in self._bodies for node in body if isinstance(node, ast.ClassDef)}
        # What checks when it is called: it holds a check, or calls another that does.
        functions = [node for body in self._bodies for node in body if isinstance(node, _Function)]
        self._helpers: set[str] = set()
        while more := {f.name for f in functions if self._checks(f)} - self._helpers:
            self._helpers |= more

    def each(self) -> list[SolutionCheck]:
        """Returns every test of the one source; the source itself where nothing in it is one by itself."""
        (body,) = self._bodies
        called = [call for node in body for call in self._calls(node)]
        if not called and not any(isinstance(node, ast.Assert) for node in body):
            return [SolutionCheck(_text(body), any(map(self._is_test, body)))]
        pieces = [(ast.unparse(node), self._is_test(node)) for node in body]
        # A test function that the source calls itself is one test all the same.
        found = [SolutionCheck(text, counts and text not in called) for text, counts in pieces]
        return found + [SolutionCheck(call) for call in called]

    def listed(self) -> list[SolutionCheck]:
        """Returns every source, which is a test if there is one in it."""
        found = []
        for body in self._bodies:
            called = [call for node in body for call in self._calls(node)]
            found.append(
                SolutionCheck("\n".join([_text(body), *called]), bool(called) or any(map(self._is_test, body)))
            )
        return found

    def _checks(self, node: ast.AST) -> bool:
        return any(
            is_check(part)
            or (isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id in self._helpers)
            for part in ast.walk(node)
        )

    def _is_test(self, statement: ast.stmt) -> bool:
        """Tells whether a statement is a test: not what only defines something."""
        return not isinstance(statement, _Function | ast.ClassDef) and self._checks(statement)

    def _calls(self, node: ast.stmt) -> list[str]:
        """Writes source that runs the tests that a definition at the top is, each by itself: as pytest, unittest and
        HumanEval do.
        """
        if isinstance(node, _Function):
            if node.name == "check" and "check" not in self._called and len(node.args.args) == 1:
                return [f"check({self._checked_name()})"]
            if not node.name.startswith("test") or (node.name in self._called and node.args.args):
                return []
            _check_arguments(node, node.args.args)
            return [f"{node.name}()"]
        if not isinstance(node, ast.ClassDef):
            return []
        lineage = self._lineage(node)
        methods = {n.name: n for c in reversed(lineage) for n in c.body if isinstance(n, _Function)}
        tests = [method for name, method in methods.items() if name.startswith("test")]
        if any(ast.unparse(base).endswith("TestCase") for c in lineage for base in c.bases):
            case = "import unittest\nunittest.TestSuite([{}({!r})]).debug()"
            return [case.format(node.name, method.name) for method in tests]
        if not node.name.startswith("Test") or "__init__" in methods:
            return []
        for method in tests:
            _check_arguments(method, method.args.args[1:])
        before = [_set_up(methods[name]) for name in ("setup_class", "setup_method") if name in methods]
        return ["\n".join([f"case = {node.name}()", *before, f"case.{method.name}()"]) for method in tests]

    def _lineage(self, node: ast.ClassDef) -> list[ast.ClassDef]:
        """Returns the class and those that it inherits from, as far as they are in the sources."""
        found = [node]
        for known in found:
            names = [base.id for base in known.bases if isinstance(base, ast.Name)]
            found += [self._classes[n] for n in names if n in self._classes and self._classes[n] not in found]
        return found

    def _checked_name(self) -> str:
        with contextlib.suppress(SyntaxError, TypeError, ValueError):
            return ast.unparse(ast.parse(self._entry_point or "", mode="eval"))
        raise ValueError(
            f"check(candidate) is never called, and the column entry_point, which names what to check, has "
            f"{self._entry_point!r}"
        )


def _parsed(source: str) -> list[ast.stmt]:
    """Returns the statements of a source of tests: those that run it as a program in their place, without the calls
    that start a framework.
    """
    try:
        body = ast.parse(source).body
        _text(body)
    except SyntaxError as error:
        raise ValueError(f"not Python (line {error.lineno}: {error.msg})") from None
    except (RecursionError, MemoryError):
        raise ValueError("Python that is nested too deeply") from None
    found = []
    for node in body:
        is_main = isinstance(node, ast.If) and ast.unparse(node.test) in _IF_MAIN
        found += node.body if isinstance(node, ast.If) and is_main else [node]
    return [node for node in found if not _STARTS_FRAMEWORK.search(ast.unparse(node)) or isinstance(node, _COMPOUND)]


_NOT_RUN = ("unittest.skip", "unittest.expectedFailure", "setup_module", "setup_function", "setUpModule")
_IF_MAIN = ("__name__ == '__main__'", "'__main__' == __name__")
_STARTS_FRAMEWORK = re.compile(r"\b(unittest|pytest)\.main\(")
_COMPOUND = (ast.If, ast.For, ast.While, ast.Try, ast.With, _Function, ast.ClassDef)


def _text(body: list[ast.stmt]) -> str:
    return ast.unparse(ast.Module(body, type_ignores=[]))


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
        if name.startswith("pytest.") and not name.startswith(PYTEST_NAMES) and name != "pytest.mark":
            raise ValueError(f"it uses {name}; of pytest the sandbox has {', '.join(PYTEST_NAMES)}")


def _check_arguments(function: _Function, arguments: Sequence[ast.arg]) -> None:
    """Raises ``ValueError`` where a test cannot be called by its name alone."""
    if isinstance(function, ast.AsyncFunctionDef):
        raise ValueError(f"{function.name} is async, which pytest needs a plugin for")
    given = {word for mark in function.decorator_list for word in re.findall(r"\w+", ast.unparse(mark))}
    missing = [a.arg for a in arguments[: len(arguments) - len(function.args.defaults)] if a.arg not in given]
    if missing:
        raise ValueError(f"{function.name} takes {', '.join(missing)}, and nothing gives it (there are no fixtures)")


def _set_up(method: _Function) -> str:
    """Writes the call of pytest's set-up, which may take the class or the method that it is for."""
    takes = len(method.args.args) - (not any(ast.unparse(mark) == "staticmethod" for mark in method.decorator_list))
    return f"case.{method.name}({'None' * takes})"


def _lines(value: Any) -> str:
    """Joins the lines of a text: some data sets hold a list of them."""
    return "\n".join(str(line) for line in value) if isinstance(value, list) else str(value)


def _same_output(output: bytes, expected: str) -> bool:
    """Tells whether outputs are the same line by line, white space at the ends of lines and of the whole aside."""
    found = output.decode("utf-8", errors="replace")
    return [line.rstrip() for line in found.rstrip().splitlines()] == [
        line.rstrip() for line in expected.rstrip().splitlines()
    ]
