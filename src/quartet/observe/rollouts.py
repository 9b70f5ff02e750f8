"""The rollout store: every response a run trained on, with all its per-token columns.

One gzip'd JSON Lines file per step, ``step_000012.jsonl.gz``, one record per line. Equal records of a step give equal
bytes. JSON has no NaN: floats that are not finite are written as strings (``"nan"``, ``"inf"``, ``"-inf"``).
"""

from __future__ import annotations

import gzip
import io
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

from quartet.config.errors import UserError, escape_control, read_file
from quartet.observe.files import dataclass_from_row, decode_lines, encode_row, replace_atomically
from quartet.observe.trackers import Row

_FILE_NAME = re.compile(r"step_([0-9]{6}|[1-9][0-9]{6,17})\.jsonl\.gz")


@dataclass(frozen=True)
class RolloutRecord:
    """One sequence (a response, or a run of turns with an environment) and what the step computed about its tokens.

    Attributes:
        sequence_id: unique within the step; the key by which columns were joined.
        prompt_id: the same for the same prompt at every step.
        response_index: place among the responses to this prompt.
        policy_version: version of the weights that sampled the first token; where later tokens of the step differ there
            is a column of that name, too (-1: not sampled).
        prompt_tokens, response_tokens: the decoded piece of each token, as many as there are ids.
        finish_reason: why generation ended (``stop``, ``length``, ...).
        rewards: value of each reward source, None where it does not apply.
        score: their combination, None where none applies.
        group: id of the group (all responses to one prompt in one step).
        columns: per-token floats by name (``old_logprobs``, ``advantages``, ...), one per response token. Tokens that
            an environment put there, and the policy only read, have ``observation_mask`` 1.
        trajectory_id: the trajectory this sequence belongs to; equal to ``sequence_id`` in single-turn runs.
        part: place of the sequence in its trajectory.
        pictures: keys of the pictures in it, 12 hex digits each, which name files below ``pictures`` beside the
            directory of the rollouts. A picture's first id has a piece of text, the others have none.
    """

    sequence_id: str
    prompt_id: str
    response_index: int
    policy_version: int
    prompt_ids: list[int]
    response_ids: list[int]
    prompt_tokens: list[str]
    response_tokens: list[str]
    prompt_text: str
    response_text: str
    finish_reason: str
    rewards: dict[str, float | None]
    score: float | None
    group: str
    columns: dict[str, list[float]] = field(default_factory=dict)
    trajectory_id: str = ""
    part: int = 0
    pictures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len(self.prompt_tokens) != len(self.prompt_ids):
            raise ValueError(f"{len(self.prompt_tokens)} prompt pieces for {len(self.prompt_ids)} ids")
        if len(self.response_tokens) != len(self.response_ids):
            raise ValueError(f"{len(self.response_tokens)} response pieces for {len(self.response_ids)} ids")
        for name, values in self.columns.items():
            if len(values) != len(self.response_ids):
                raise ValueError(f"column {name!r}: {len(values)} values for {len(self.response_ids)} tokens")
        if not self.trajectory_id:
            object.__setattr__(self, "trajectory_id", self.sequence_id)


def policy_token_ids(record: RolloutRecord) -> list[int]:
    """Returns the tokens of the response that the policy emitted."""
    observed = record.columns.get("observation_mask") or [0.0] * len(record.response_ids)
    return [token for token, mask in zip(record.response_ids, observed, strict=True) if not mask]


def _to_json(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(float(value))


def _from_json(value: float | str | None) -> float | None:
    return None if value is None else float(value)


def _encode(record: RolloutRecord) -> bytes:
    row = {field.name: getattr(record, field.name) for field in fields(record)}
    row["score"] = _to_json(record.score)
    row["rewards"] = {name: _to_json(value) for name, value in record.rewards.items()}
    row["columns"] = {name: [_to_json(v) for v in values] for name, values in record.columns.items()}
    return encode_row(row)


def _decode(row: Mapping[str, Any]) -> RolloutRecord:
    fields = dict(row)
    fields["score"] = _from_json(row["score"])
    fields["rewards"] = {name: _from_json(value) for name, value in row["rewards"].items()}
    fields["columns"] = {name: [float(v) for v in values] for name, values in row["columns"].items()}
    return dataclass_from_row(RolloutRecord, fields)


def rollouts_path(directory: Path, step: int) -> Path:
    return directory / f"{_name(step)}.gz"


def _name(step: int) -> str:
    return f"step_{step:06d}.jsonl"


def write_rollout_step(directory: Path, step: int, records: Sequence[RolloutRecord]) -> Path:
    """Writes (or replaces) the file of ``step``, complete or not at all, and returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    # No time, so that equal records give equal bytes.
    with gzip.GzipFile(filename=_name(step), mode="wb", fileobj=buffer, compresslevel=1, mtime=0) as file:
        for record in records:
            file.write(_encode(record))
    path = rollouts_path(directory, step)
    replace_atomically(path, buffer.getvalue())
    return path


def read_rollout_step(directory: Path, step: int) -> list[RolloutRecord]:
    """Reads the records of one step, in the order written, without broken lines.

    Raises:
        UserError: there is no file for the step, or it cannot be unpacked.
    """
    path = rollouts_path(directory, step)
    if not path.exists():
        known = list_rollout_steps(directory)
        held = f"{len(known)} steps, {known[0]} to {known[-1]}" if known else "no steps"
        raise UserError(
            f"no rollouts of step {step}",
            found=f"{directory} holds {held}",
            remedy="choose one of those steps",
        )
    try:
        return decode_lines(gzip.decompress(read_file(path)), path, _decode)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            "a rollout file is damaged",
            found=f"{path}: {error}",
            remedy="delete the file; the run and the report do without it",
        ) from error


def rollout_rows(directory: Path, step: int, num: int) -> list[Row]:
    """Returns the first ``num`` sequences of a step for people to read; none where its file is gone. Advantages are
    means over the tokens that are trained on.
    """
    path = rollouts_path(directory, step)
    if not path.is_file():
        return []
    with gzip.open(path) as file:
        records = decode_lines(b"".join(islice(file, num)), path, _decode)
    return [
        {
            "prompt": escape_control(record.prompt_text),
            "response": escape_control(record.response_text),
            "finish_reason": record.finish_reason,
            "tokens": len(record.response_ids),
            "policy_version": record.policy_version,
            **{f"reward/{name}": value for name, value in record.rewards.items()},
            "score": record.score,
            "advantage": _mean_advantage(record.columns),
        }
        for record in records
    ]


def _mean_advantage(columns: Mapping[str, list[float]]) -> float | None:
    values = columns.get("advantages", [])
    mask = columns.get("loss_mask", [1.0] * len(values))
    trained = [value for value, is_trained in zip(values, mask, strict=True) if is_trained]
    return math.fsum(trained) / len(trained) if trained else None


def list_rollout_steps(directory: Path) -> list[int]:
    """Returns the steps with a file, ascending; empty where the directory is missing."""
    if not directory.is_dir():
        return []
    return sorted(int(match[1]) for path in directory.iterdir() if (match := _FILE_NAME.fullmatch(path.name)))


def truncate_rollouts_after(directory: Path, step: int) -> list[int]:
    """Deletes the files of steps after ``step`` and half-written ones; returns the steps deleted."""
    if not directory.is_dir():
        return []
    dropped = [s for s in list_rollout_steps(directory) if s > step]
    for path in [*directory.glob("*.tmp"), *(rollouts_path(directory, s) for s in dropped)]:
        path.unlink()
    return dropped
