"""What an evaluation has already, sample by sample, so that a killed one goes on where it was.

``finished/answers.jsonl`` in the run directory, ``against.jsonl`` for the other model and ``verdicts.jsonl`` for a
judge's comparisons hold, after a first line that says what they are about, one line per thing that took work::

    {"sample": "eval.3.0", "token_ids": [7, 8, 2], "finish_reason": "stop", "text_end": null}
    {"sample": "eval.3.0", "rewards": {"numeric": 1.0, "judge": null}}
    {"sample": "eval.3.0", "preference": 0.5}

Each line ends with ``"digest"``, sixteen digits of the SHA-256 of the line without it.

A score that failed, and a pair without a verdict, is not kept: it is asked for again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quartet.config import UserError
from quartet.observe.jsonl import RowAppender, encode_row, malformed, read_rows
from quartet.rollout.protocol import Completion, FinishReason
from quartet.trainers.run import writing

_DIGEST = "digest"
"""Key of a line's digest: what a line says decides what an evaluation finds."""


def _digest(row: Mapping[str, Any]) -> str:
    return hashlib.sha256(encode_row(row)).hexdigest()[:16]


def _checked(path: Path, number: int, row: dict[str, Any]) -> dict[str, Any]:
    if row.pop(_DIGEST, None) != _digest(row):
        raise malformed(path, number, "it does not agree with its own digest")
    return row


class Finished:
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
        # Lines of earlier versions carry no digest of their own.
        is_checked = bool(rows) and rows[0].keys() != {"about"}
        if is_checked:
            rows = [_checked(path, number, row) for number, row in enumerate(rows, start=1)]
        if rows and rows[0].get("about") != digest:
            raise UserError(
                "what is to be evaluated has changed since the evaluation began",
                found=f"{path} is about other prompts or answers",
                remedy="give it the same data, or choose another output_dir",
            )
        for number, row in enumerate(rows[1:], start=2):
            try:
                self._take(row)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise malformed(path, number, str(error)) from error
        with writing(path):
            self._rows = RowAppender(path)
            self._is_checked = is_checked or not rows
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
            self.rewards[sample] = {name: math.nan if v is None else v for name, v in row["rewards"].items()}
        if "preference" in row:
            self.preferences[sample] = row["preference"]

    def keep_completions(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            self._keep(
                completion.request_id,
                token_ids=completion.token_ids,
                finish_reason=completion.finish_reason.value,
                text_end=completion.text_end,
            )

    def keep_rewards(self, sample: str, rewards: Mapping[str, float]) -> None:
        """NaN where a source does not apply."""
        self._keep(sample, rewards={name: None if math.isnan(value) else value for name, value in rewards.items()})

    def keep_preference(self, sample: str, preference: float) -> None:
        self._keep(sample, preference=preference)

    def _keep(self, sample: str, **values: Any) -> None:
        row = {"sample": sample, **values}
        self._append(row)
        self._take(row)

    def _append(self, row: dict[str, Any]) -> None:
        with writing(self.path):
            self._rows.append({**row, _DIGEST: _digest(row)} if self._is_checked else row)

    def close(self) -> None:
        self._rows.close()
