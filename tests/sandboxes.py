"""Marks tests that run code in a sandbox: skipped where this machine has none."""

from __future__ import annotations

import pytest

from quartet.extras.sandbox.run import SandboxError, check_sandbox


def _why_not() -> str:
    try:
        check_sandbox()
    except SandboxError as error:
        return f"this machine allows no sandbox: {error}"
    return ""


WHY_NOT = _why_not()
needs_sandbox = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
