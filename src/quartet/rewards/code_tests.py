"""Reward for code: what of its tests the completion's program passes."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from quartet.config.errors import UserError
from quartet.config.printable import printable
from quartet.config.rewards import CodeReward, Isolation
from quartet.rewards.sandbox.run import SandboxError, SandboxLimits, SolutionCheck, check_sandbox, judge, run_program
from quartet.rewards.source import Columns, RewardError, RewardSource, Scores, Threads
from quartet.text.examples import PromptText

# White space before and behind the language stands in one place each: a long run of it is read once.
_FENCED = re.compile(r"```[ \t]*(?:py(?:thon3?)?[ \t]*)?\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)


_REMEDIES: dict[Isolation, str] = {
    "namespaces": "allow unprivileged user namespaces (in a container: the seccomp profile and /proc unmasked, or "
    "--privileged; Linux 5.14 or newer); or score code by a server with type: http; or set isolation: process, which "
    "keeps less from the code: see docs/rewards.md",
    "process": "score code by a server with type: http, or on another machine",
}


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
            isolation=config.isolation,
        )
        try:
            self._tool = check_sandbox(config.isolation)
        except SandboxError as error:
            raise UserError(
                f"the reward {self.name!r} needs a sandbox that this machine does not allow",
                found=str(error),
                remedy=_REMEDIES[config.isolation],
            ) from error
        self._threads = Threads(config.concurrency, self.name)
        self._num_refused, self._first_refused = 0, ""

    async def score(self, prompts: Sequence[PromptText], completions: Sequence[str], columns: Columns) -> Scores:
        pairs = zip(completions, columns[self.column], strict=True)
        return [await self._threads.run(self._score, completion, value) for completion, value in pairs]

    def _score(self, completion: str, value: Any) -> float | None:
        if value is None:
            return None
        try:
            tests = read_tests(value)
        except ValueError as error:
            raise RewardError(
                f"the reward {self.name!r} cannot read the tests of a sample",
                found=f"{error}: {value!r:.300}",
                remedy=f"give the column {self.column!r} asserts, or pairs of input and output",
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
        """What makes the sandbox, and how many tests failed because what crossed could not be judged."""
        found = [f"code runs in a sandbox made by {self._tool}"]
        if self._num_refused:
            first = printable(self._first_refused)
            found.append(f"{self._num_refused} tests failed unjudged (docs/rewards.md); the first because {first}")
        return [f"reward {self.name!r}: {warning}" for warning in found]

    def close(self) -> None:
        self._threads.close()


def extract_code(completion: str) -> str:
    """The last fenced block that is marked as Python or not at all; the whole text where there is none."""
    blocks = _FENCED.findall(completion)
    return str(blocks[-1]) if blocks else completion


def read_tests(value: Any) -> Tests:
    """Tests of a data row: Python source, a list of it (each one test), pairs ``{"input", "output"}``, two lists
    ``{"inputs", "outputs"}``, or JSON of any of these.

    In one piece of source every ``assert`` at the top counts as a test.

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
        tests = _statements(value)
    elif isinstance(value, Sequence) and value and all(isinstance(item, str) for item in value):
        tests = [SolutionCheck(item) for item in value if _statements(item)]
    elif isinstance(value, Sequence) and all(isinstance(i, Mapping) and {"input", "output"} <= set(i) for i in value):
        tests = [Case(_lines(item["input"]), _lines(item["output"])) for item in value]
    else:
        raise ValueError("neither Python nor pairs of input and output")
    if not tests or not any(isinstance(test, Case) or test.counts for test in tests):
        raise ValueError("there is no test in it")
    return tests


def _statements(source: str) -> list[SolutionCheck]:
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise ValueError(f"not Python (line {error.lineno}: {error.msg})") from None
    except (RecursionError, MemoryError):
        raise ValueError("Python that is nested too deeply") from None
    pieces = [SolutionCheck(ast.unparse(node), isinstance(node, ast.Assert)) for node in body]
    if not any(piece.counts for piece in pieces):
        # For example one call of a function that holds the asserts.
        return [SolutionCheck(source)] if pieces else []
    return pieces


def _lines(value: Any) -> str:
    """Some data sets hold a list of lines."""
    return "\n".join(str(line) for line in value) if isinstance(value, list) else str(value)


def _same_output(output: bytes, expected: str) -> bool:
    """Line by line, white space at the ends of lines and of the whole aside."""
    found = output.decode("utf-8", errors="replace")
    return [line.rstrip() for line in found.rstrip().splitlines()] == [
        line.rstrip() for line in expected.rstrip().splitlines()
    ]
