"""For tests that run code in a sandbox: skipped where this machine has none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quartet.extras.sandbox.run import SandboxError, SandboxLimits, SolutionCheck, check_sandbox, judge


def _why_not() -> str:
    try:
        check_sandbox()
    except SandboxError as error:
        return f"this machine allows no sandbox: {error}"
    return ""


WHY_NOT = _why_not()
needs_sandbox = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def run_tests(source: str, tests: Sequence[SolutionCheck], limits: SandboxLimits) -> list[bool]:
    """Whether each of the tests that count passed."""
    return [not failure for failure in judge(source, tests, limits)]
