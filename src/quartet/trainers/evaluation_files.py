"""Answers on disk, and what an evaluation has finished, so that a killed one goes on where it was.

``answers.jsonl`` and ``evaluations/step_00000050.jsonl`` hold one line per sample::

    {"prompt_id": "p0", "sample": 0, "prompt": "1+2=", "completion": "3", "finish_reason": "stop", "length": 2,
     "rewards": {"exact_match": 1.0, "judge": null}}

``finished/answers.jsonl`` in the run directory, ``against.jsonl`` for the other model and ``verdicts.jsonl`` for a
judge's comparisons hold, after a first line that says what they are about, one line per thing that took work::

    {"sample": "eval.3.0", "token_ids": [7, 8, 2], "finish_reason": "stop", "text_end": null}
    {"sample": "eval.3.0", "rewards": {"numeric": 1.0, "judge": null}}
    {"sample": "eval.3.0", "preference": 0.5}

A score that failed, and a pair without a verdict, is not kept: it is asked for again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from quartet.config import UserError
from quartet.config.errors import printable
from quartet.config.nearest import missing_file
from quartet.data.datasets import PromptItem
from quartet.observe.files import RowAppender, as_dataclass, read_rows, read_whole, replace_atomically
from quartet.observe.trackers import Row
from quartet.rollout.protocol import Completion, FinishReason
from quartet.text.examples import PromptText
from quartet.trainers.run_files import writing

_FILE_NAME = re.compile(r"step_(\d{8})\.jsonl")


@dataclass(frozen=True)
class Answer:
    """One sample of a prompt and its scores by reward source (NaN: does not apply). ``length`` is in tokens."""

    prompt_id: str
    sample: int
    prompt: PromptText
    completion: str
    finish_reason: str
    length: int
    rewards: Mapping[str, float]


_KEYS = {field.name for field in fields(Answer)}
_REQUIRED = _KEYS - {"length", "rewards"}


def or_null(value: float) -> float | None:
    """None for NaN, which JSON does not have."""
    return None if math.isnan(value) else value


def nulls_for_nan(rewards: Mapping[str, float]) -> dict[str, float | None]:
    return {name: or_null(value) for name, value in rewards.items()}


def _nan_for_nulls(rewards: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in rewards.items()}


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes JSON lines, whole or not at all; text is not escaped, except lone surrogates."""
    text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_atomically(path, text.encode("utf-8", errors="backslashreplace"))


def write_answers(path: Path, answers: Sequence[Answer]) -> None:
    write_rows(path, [{**vars(answer), "rewards": nulls_for_nan(answer.rewards)} for answer in answers])


def read_answers(path: Path) -> list[Answer]:
    """The answers of an evaluation.

    Raises:
        UserError: no such file, or one that no evaluation has written.
    """
    if not path.is_file():
        raise missing_file("there is no such file of answers", path)

    def answer(row: dict[str, Any]) -> Answer:
        if not row.keys() >= _REQUIRED:
            raise UserError(
                "the file holds no answers of an evaluation",
                found=f"a line of {path} has no {', '.join(sorted(_REQUIRED - row.keys()))}",
                remedy="name the answers.jsonl that quartet eval has written, or a model directory",
            )
        values = {"length": 0} | {name: row[name] for name in _KEYS & row.keys()}
        return as_dataclass(Answer, {**values, "rewards": _nan_for_nulls(row.get("rewards", {}))})

    return read_whole(path, answer)


def as_text(prompt: PromptText) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def answer_rows(path: Path, num: int) -> list[Row]:
    """The first ``num`` answers of a file for people to read; none where it is gone."""
    answers = read_answers(path)[:num] if path.is_file() else []
    return [
        {
            "prompt": printable(as_text(answer.prompt)),
            "response": printable(answer.completion),
            "finish_reason": answer.finish_reason,
            "tokens": answer.length,
            **{f"reward/{name}": or_null(value) for name, value in answer.rewards.items()},
        }
        for answer in answers
    ]


def matched(stored: Sequence[Answer], items: Sequence[PromptItem]) -> dict[str, list[Answer]]:
    """The stored samples of each prompt that has any, by prompt id.

    Raises:
        UserError: no prompt has any, or an id stands for another prompt.
    """
    by_id = {item.prompt_id: item for item in items}
    found: dict[str, list[Answer]] = {}
    for answer in stored:
        item = by_id.get(answer.prompt_id)
        if item is None:
            continue
        if item.prompt != answer.prompt:
            raise _other_prompts(f"{answer.prompt_id} is {answer.prompt!r:.60} there and {item.prompt!r:.60} here")
        found.setdefault(answer.prompt_id, []).append(answer)
    if not found:
        raise _other_prompts(f"none of {len(items)} prompts among {len(stored)} answers")
    return found


def _other_prompts(found: str) -> UserError:
    return UserError(
        "the stored answers are to other prompts", found=found, remedy="compare evaluations of the same data"
    )


# One file per evaluation of a run --------------------------------------------------------------------------


def evaluation_path(directory: Path, step: int) -> Path:
    return directory / f"step_{step:08d}.jsonl"


def drop_after(directory: Path, step: int) -> None:
    """Deletes the files of evaluations after ``step`` complete steps."""
    for path in directory.glob("step_*.jsonl"):
        match = _FILE_NAME.fullmatch(path.name)
        if match and int(match[1]) > step:
            path.unlink()


# What is finished ------------------------------------------------------------------------------------------


class EvaluationCache:
    """One file of finished work, read when made; what is kept is in the file when the call returns.

    Args:
        about: JSON values that decide what the samples are: prompts, answers.

    Raises:
        UserError: the file is about something else.
    """

    def __init__(self, path: Path, about: Any) -> None:
        self.path = path
        self.completions: dict[str, Completion] = {}
        self.rewards: dict[str, dict[str, float]] = {}
        self.preferences: dict[str, float] = {}
        digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()
        rows = read_rows(path) if path.is_file() else []
        if rows and "about" not in rows[0]:
            raise UserError(
                "what an evaluation has finished does not say what it is about",
                found=f"{path}: its first line is broken",
                remedy="delete the file: its work is done again",
            )
        if rows and rows[0]["about"] != digest:
            raise UserError(
                "what is to be evaluated has changed since the evaluation began",
                found=f"{path} is about other prompts or answers",
                remedy="give it the same data, or choose another output_dir",
            )
        for row in rows[1:]:
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):  # then it is done again
                self._take(row)
        with writing(path):
            self._rows = RowAppender(path)
            if not rows:
                self._append({"about": digest})

    def _take(self, row: Mapping[str, Any]) -> None:
        sample = str(row["sample"])
        if "token_ids" in row:
            ids = tuple(row["token_ids"])
            zeros = (0.0,) * len(ids), (0,) * len(ids)  # log-probabilities and versions, which nothing here reads
            self.completions[sample] = Completion(
                sample, sample, ids, *zeros, FinishReason(row["finish_reason"]), row["text_end"]
            )
        if "rewards" in row:
            self.rewards[sample] = _nan_for_nulls(row["rewards"])
        if "preference" in row:
            self.preferences[sample] = row["preference"]

    def keep_completions(self, completions: Sequence[Completion]) -> None:
        for one in completions:
            reason = one.finish_reason.value
            self._keep(one.request_id, token_ids=one.token_ids, finish_reason=reason, text_end=one.text_end)

    def keep_rewards(self, sample: str, rewards: Mapping[str, float]) -> None:
        """Keeps the scores of ``sample``, NaN where a source does not apply."""
        self._keep(sample, rewards=nulls_for_nan(rewards))

    def keep_preference(self, sample: str, preference: float) -> None:
        self._keep(sample, preference=preference)

    def _keep(self, sample: str, **values: Any) -> None:
        row = {"sample": sample, **values}
        self._append(row)
        self._take(row)

    def _append(self, row: dict[str, Any]) -> None:
        with writing(self.path):
            self._rows.append(row)

    def close(self) -> None:
        self._rows.close()
