"""Answers on disk: one JSON line per sample, in ``answers.jsonl`` and in ``evaluations/step_00000050.jsonl``.

::

    {"prompt_id": "p0", "sample": 0, "prompt": "1+2=", "completion": "3", "finish_reason": "stop", "length": 2,
     "rewards": {"exact_match": 1.0, "judge": null}}
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.config import UserError
from quartet.config.nearest import missing_file
from quartet.data.datasets import PromptItem
from quartet.observe.jsonl import as_dataclass, malformed, read_rows, replace_atomically
from quartet.text.examples import PromptText
from quartet.trainers.evaluation import Answer

_FILE_NAME = re.compile(r"step_(\d{8})\.jsonl")
_KEYS = {"prompt_id", "sample", "prompt", "completion", "finish_reason"}


@dataclass(frozen=True)
class StoredAnswer:
    """What a line holds; a reward that did not apply is NaN."""

    prompt_id: str
    sample: int
    prompt: PromptText
    text: str
    finish_reason: str
    rewards: Mapping[str, float]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Whole or not at all. Readable in any language; a lone surrogate is written as JSON's own escape."""
    text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_atomically(path, text.encode("utf-8", errors="backslashreplace"))


def write_answers(path: Path, answers: Sequence[Answer]) -> None:
    write_rows(
        path,
        [
            {
                "prompt_id": answer.item.prompt_id,
                "sample": answer.sample,
                "prompt": answer.item.prompt,
                "completion": answer.text,
                "finish_reason": answer.finish_reason,
                "length": answer.length,
                "rewards": {name: None if math.isnan(v) else v for name, v in answer.rewards.items()},
            }
            for answer in answers
        ],
    )


def read_answers(path: Path) -> list[StoredAnswer]:
    """The answers of an evaluation.

    Raises:
        UserError: no such file, or one that no evaluation has written.
    """
    if not path.is_file():
        raise missing_file("there is no such file of answers", path)
    found = []
    for number, row in enumerate(read_rows(path), start=1):
        if not row.keys() >= _KEYS:
            raise UserError(
                "the file holds no answers of an evaluation",
                found=f"{path}:{number} has no {', '.join(sorted(_KEYS - row.keys()))}",
                remedy="name the answers.jsonl that quartet eval has written, or a model directory",
            )
        values = {name: row[name] for name in _KEYS - {"completion"}} | {"text": row["completion"]}
        try:
            rewards = {name: math.nan if v is None else v for name, v in row.get("rewards", {}).items()}
            found.append(as_dataclass(StoredAnswer, {**values, "rewards": rewards}))
        except (ValueError, TypeError, AttributeError) as error:
            raise malformed(path, number, str(error)) from error
    return found


def matched(stored: Sequence[StoredAnswer], items: Sequence[PromptItem]) -> dict[str, list[StoredAnswer]]:
    """The stored samples of each prompt that has any, by prompt id.

    Raises:
        UserError: no prompt has any, or an id stands for another prompt.
    """
    by_id = {item.prompt_id: item for item in items}
    found: dict[str, list[StoredAnswer]] = {}
    for answer in stored:
        item = by_id.get(answer.prompt_id)
        if item is None:
            continue
        if item.prompt != answer.prompt:
            raise UserError(
                "the stored answers are to other prompts",
                found=f"{answer.prompt_id} is {_excerpt(answer.prompt)} there and {_excerpt(item.prompt)} here",
                remedy="compare evaluations of the same data",
            )
        found.setdefault(answer.prompt_id, []).append(answer)
    if not found:
        raise UserError(
            "the stored answers are to other prompts",
            found=f"none of {len(items)} prompts among {len(stored)} answers",
            remedy="compare evaluations of the same data",
        )
    return found


# One file per evaluation of a run --------------------------------------------------------------------------


def step_path(directory: Path, step: int) -> Path:
    return directory / f"step_{step:08d}.jsonl"


def drop_after(directory: Path, step: int) -> None:
    """Deletes the files of evaluations after ``step`` complete steps."""
    for path in directory.glob("step_*.jsonl"):
        match = _FILE_NAME.fullmatch(path.name)
        if match and int(match[1]) > step:
            path.unlink()


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
