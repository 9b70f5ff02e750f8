"""What the report says about reward hacking: every alarm of a stage, and the prompts that show the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from quartet.observe.jsonl import read_objects
from quartet.observe.report.samples import Limits, compact

_EXAMPLES = TypeAdapter(list[dict[str, str | float | None]], config=ConfigDict(strict=True))


def read_alarms(path: Path) -> list[dict[str, Any]]:
    """The rows of ``alarms.jsonl``; UserError for a damaged one."""
    return read_objects(path, _checked)


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    if type(row["step"]) is not int or not isinstance(row["text"], str):
        raise ValueError("no whole step, or no text")
    return {**row, "examples": _EXAMPLES.validate_python(row["examples"])}


def show_alarms(rows: Sequence[Mapping[str, Any]], limits: Limits) -> dict[str, Any] | None:
    """The rows of ``alarms.jsonl`` as the page shows them; None without any."""
    if not rows:
        return None
    last = rows[-1]
    return {
        "text": str(last["text"]),
        "steps": [int(row["step"]) for row in rows],
        "examples": [_example(example, limits) for example in last["examples"]],
    }


def _example(example: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    return {
        name: value[: limits.echo_characters] if isinstance(value, str) else compact(value)
        for name, value in example.items()
    }
