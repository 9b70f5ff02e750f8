"""JSON Lines files that survive a kill: appended line by line, repaired and cut back on resume."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quartet.config.errors import UserError


def encode_row(row: Mapping[str, Any]) -> bytes:
    """One line: ASCII only, so that lone surrogates in a model's output survive; NaN is a ValueError."""
    return json.dumps(row, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def decode_lines(data: bytes, source: Path) -> list[dict[str, Any]]:
    """The rows in ``data``; a last line without its line feed (cut off by a kill) is left out.

    Raises:
        UserError: a complete line is not a JSON object.
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise _malformed(source, number, str(error)) from error
        if not isinstance(row, dict):
            raise _malformed(source, number, f"a {type(row).__name__} instead of an object")
        rows.append(row)
    return rows


def _malformed(source: Path, number: int, what: str) -> UserError:
    return UserError(
        "a file of the run is damaged",
        found=f"{source}, line {number}: {what}",
        remedy="restore the file from a copy, or delete that line",
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All complete rows of ``path``; UserError as in :func:`decode_lines`."""
    return decode_lines(path.read_bytes(), path)


def replace_atomically(path: Path, data: bytes) -> None:
    """Writes ``data`` to ``path``; a kill or a full disk leaves the old content or the new, no mixture."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the rename itself must survive a crash of the machine
    finally:
        os.close(directory)


def truncate_after(path: Path, step: int) -> int:
    """Drops the rows of steps after ``step`` and a half-written last line; a missing file stays missing.

    Rows without a step are kept. Used on resume, for ``metrics.jsonl`` and ``spans.jsonl`` alike.

    Returns:
        The number of complete rows dropped.
    """
    if not path.exists():
        return 0
    data = path.read_bytes()
    rows = decode_lines(data, path)
    kept = [row for row in rows if row.get("step") is None or row["step"] <= step]
    text = b"".join(encode_row(row) for row in kept)
    if text != data:
        replace_atomically(path, text)
    return len(rows) - len(kept)


class RowAppender:
    """Appends rows to a JSON Lines file, each flushed: a kill loses at most the row being written."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _drop_half_line(path)
        self._file = path.open("ab")

    def append(self, row: Mapping[str, Any]) -> None:
        self._file.write(encode_row(row))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _drop_half_line(path: Path) -> None:
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        replace_atomically(path, data[: data.rfind(b"\n") + 1])
