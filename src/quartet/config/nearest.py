"""What a user has probably meant: the nearest known name of a key, a file or a column."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quartet.config.errors import UserError

COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("conversations", "conversation"),
    "prompt": ("question", "problem", "instruction", "query", "input", "text"),
    "completion": ("response", "answer", "output", "solution", "code"),
    "answer": ("solution", "final_answer", "ground_truth", "target"),
    "tests": ("test_list", "test_cases", "test"),
}
"""By our name of a column, what data sets call it."""
_MORE_PROMPT = ("input", "context")
"""The rest of a prompt, in a column of its own: of Alpaca and Dolly."""
JOINT = " + "
"""Between the columns whose texts make one."""


def guess_columns(needs: Iterable[str], row: Mapping[str, Any]) -> dict[str, str]:
    """Returns our columns that a row lacks → those that it has under a usual name; none twice."""
    needs = list(needs)
    if "messages" in row:
        return {}
    if "prompt" in needs and "prompt" not in row:
        for column in COLUMNS["messages"]:
            if isinstance(row.get(column), (list, str)):
                rest = guess_columns((name for name in needs if name not in ("prompt", "completion")), row)
                return {"messages": column, **rest}
    found: dict[str, str] = {}
    for name in (name for name in needs if name not in row):
        usual = [column for column in COLUMNS.get(name, ()) if column in row and column not in found.values()]
        if usual:
            found[name] = usual[0]
    prompt = found.get("prompt")
    if prompt == "text" and "completion" in needs and "completion" not in found:
        return {}  # Its text is learned as a whole.
    more = [name for name in _MORE_PROMPT if isinstance(row.get(name, 0), str | None) and name not in found.values()]
    if prompt is not None and more:
        found["prompt"] = JOINT.join([prompt, *more])
    return found


def suggest_name(name: str, known: Iterable[str]) -> str | None:
    """Returns ``did you mean …?`` with the nearest of ``known``, or None where nothing is near."""
    close = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else None


def missing_file_error(problem: str, path: str | Path, otherwise: str | None = None) -> UserError:
    """Makes the error for a file that is not there, with the nearest name in its folder. ``otherwise`` is the remedy
    where no name is near; without it, where paths start.
    """
    path = Path(path)
    if path.is_dir():
        return UserError(problem, found=f"{path} is a folder", remedy="name a file in it")
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    remedy = suggest_name(path.name, names) or otherwise or f"paths start at {Path.cwd()}"
    return UserError(problem, found=str(path), remedy=remedy)
