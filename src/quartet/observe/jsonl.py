"""JSON Lines files that survive a kill: appended line by line, repaired and cut back on resume."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints
from uuid import uuid4

from pydantic import ConfigDict, TypeAdapter, ValidationError

from quartet.config.errors import UserError
from quartet.config.file_errors import read_file, write_error
from quartet.observe.digests import FileDigest, sync_directory

T = TypeVar("T")


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
        except (ValueError, RecursionError) as error:
            raise malformed(source, number, str(error)) from error
        if not isinstance(row, dict):
            raise malformed(source, number, f"a {type(row).__name__} instead of an object")
        rows.append(row)
    return rows


def malformed(source: Path, number: int, what: str) -> UserError:
    """The error for line ``number`` (from 1) of ``source``."""
    return UserError(
        "a file of the run is damaged",
        found=f"{source}, line {number}: {what}",
        remedy="restore the file from a copy, or delete that line",
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All complete rows of ``path``; UserError as in :func:`decode_lines`, or where it cannot be read."""
    return decode_lines(read_file(path), path)


def read_objects(path: Path, build: Callable[[dict[str, Any]], T]) -> list[T]:
    """The rows of ``path`` as objects; UserError, with the line, for one that ``build`` refuses.

    Args:
        build: raises ValueError, TypeError or KeyError for a row of another shape (``as_dataclass`` does).
    """
    found = []
    for number, row in enumerate(read_rows(path), start=1):
        try:
            found.append(build(row))
        except (ValueError, TypeError, KeyError) as error:
            raise malformed(path, number, str(error).partition("\n")[0]) from error
    return found


def as_dataclass(kind: type[T], row: Mapping[str, Any]) -> T:
    """``row`` as an instance of the dataclass ``kind``.

    Raises:
        ValueError: a field is unknown, or of another type (nothing is converted: "3" is no number).
        TypeError: one is missing.
    """
    types = _field_types(cast("Any", kind))
    values = {}
    for name, value in row.items():
        if name not in types:
            raise ValueError(f"unknown field {name!r:.60}")
        try:
            values[name] = types[name].validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{name}: {error.errors()[0]['msg']}") from error
    return kind(**values)


@cache
def _field_types(kind: Any) -> dict[str, TypeAdapter[Any]]:
    return {name: TypeAdapter(hint, config=ConfigDict(strict=True)) for name, hint in get_type_hints(kind).items()}


def begins_with(path: Path, written: FileDigest) -> bool:
    """Whether the file still begins with what had been written to it."""
    data = read_file(path)[: written.bytes] if path.exists() else b""
    return FileDigest(len(data), hashlib.sha256(data).hexdigest()) == written


def replace_atomically(path: Path, data: bytes) -> None:
    """Writes ``data`` to ``path``; a kill or a full disk leaves the old content or the new, no mixture.

    Several processes, also of several machines, may write one file at a time.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)  # the rename itself must survive a crash of the machine


def truncate_after(path: Path, step: int) -> int:
    """Drops the rows of steps after ``step`` and a half-written last line; a missing file stays missing.

    Rows without a step are kept. Used on resume, for ``metrics.jsonl`` and ``spans.jsonl`` alike.

    Returns:
        The number of complete rows dropped.

    Raises:
        UserError: the file cannot be read, or a row of it is damaged.
    """
    if not path.exists():
        return 0
    data = read_file(path)
    rows = decode_lines(data, path)
    for number, row in enumerate(rows, start=1):
        if type(row.get("step", 0)) is not int and row["step"] is not None:
            raise malformed(path, number, f"step {row['step']!r:.60}")
    kept = [row for row in rows if row.get("step") is None or row["step"] <= step]
    text = b"".join(encode_row(row) for row in kept)
    if text != data:
        replace_atomically(path, text)
    return len(rows) - len(kept)


class RowAppender:
    """Appends rows to a JSON Lines file, each flushed: a kill loses at most the row being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        data = read_file(path) if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:  # a kill cut the last line off
            replace_atomically(path, whole)
        self._state, self._bytes = hashlib.sha256(whole), len(whole)
        self._file = path.open("ab")

    def append(self, row: Mapping[str, Any]) -> None:
        """Raises UserError where the disk refuses the row."""
        data = encode_row(row)
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise write_error(self._path, error) from error
        self._state.update(data)
        self._bytes += len(data)

    def written(self) -> FileDigest:
        """Of all that is in the file by now."""
        return FileDigest(self._bytes, self._state.hexdigest())

    def close(self) -> None:
        self._file.close()
