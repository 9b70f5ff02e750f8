"""Training and scoring on an accelerator without contents: everything lies where it should, and nothing waits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "fake_accelerator.py"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """In a process of its own: the device's name belongs to the whole process."""
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["case"]: row for row in rows}


def test_forward_backward_and_optimizer_stay_on_the_device_and_never_wait(found: dict[str, Any]) -> None:
    clean = {name for name, row in found.items() if row["error"] is None}
    assert {"train grpo fp32", "train grpo bf16", "train sft bf16", "train value", "score bf16"} <= clean
    assert clean == found.keys(), {name: row["error"] for name, row in found.items() if row["error"]}


def test_only_results_are_copied_back(found: dict[str, Any]) -> None:
    """Of updates nothing: their norm and figures aside, which the program leaves out."""
    for name, row in found.items():
        columns = {"score fp32": 2, "score bf16": 2, "score sequences": 1, "score steps": 1}.get(name, 0)
        assert len(row["copies"]) == columns, row
        assert all("values.to(batch.device)" in line for line in row["copies"])
