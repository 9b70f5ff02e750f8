"""JSON Lines files that survive a kill: appended line by line, repaired and cut back on resume."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints
from uuid import uuid4

from pydantic import ConfigDict, TypeAdapter, ValidationError

from quartet.config.errors import UserError, read_file, write_error
from quartet.observe.digests import sync_directory

T = TypeVar("T")
_log = logging.getLogger(__name__)


def encode_row(row: Mapping[str, Any]) -> bytes:
    """One line: ASCII only, so that lone surrogates in a model's output survive; NaN is a ValueError."""
    return json.dumps(row, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def parse_lines(data: bytes, build: Callable[[dict[str, Any]], T], first: int = 1) -> tuple[list[T], list[str]]:
    """Makes objects of the rows in ``data``; a last line without its line feed (cut off by a kill) is left out.

    Args:
        build: raises ValueError, TypeError, KeyError, … for a row of another shape (``as_dataclass`` does).
        first: number of the first line.

    Returns:
        The objects, and for each broken line, which is left out, its number and what is wrong with it.
    """
    objects, broken = [], []
    for number, line in enumerate(data.split(b"\n")[:-1], start=first):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"a {type(row).__name__} instead of an object")
            objects.append(build(row))
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            text = str(error).partition("\n")[0]
            broken.append(f"line {number}: {text}")
    return objects, broken


def decode_lines(data: bytes, source: Path, build: Callable[[dict[str, Any]], T]) -> list[T]:
    """The objects of :func:`parse_lines`; how many lines of ``source`` are broken is logged."""
    objects, broken = parse_lines(data, build)
    if broken:
        _log.warning("%s: %d broken lines are left out (%s)", source, len(broken), broken[0])
    return objects


def read_objects(path: Path, build: Callable[[dict[str, Any]], T]) -> list[T]:
    """The rows of ``path`` as objects, without broken ones; UserError where it cannot be read."""
    return decode_lines(read_file(path), path, build)


def read_whole(path: Path, build: Callable[[dict[str, Any]], T]) -> list[T]:
    """As :func:`read_objects`, of a file that decides what is computed: UserError for a broken line."""
    objects, broken = parse_lines(read_file(path), build)
    if broken:
        remedy = "restore the file from a copy, or delete that line"
        raise UserError("a file of the run is damaged", found=f"{path}, {broken[0]}", remedy=remedy)
    return objects


def read_rows(path: Path) -> list[dict[str, Any]]:
    """As :func:`read_objects`."""
    return read_objects(path, dict)


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
    """Drops the rows of steps after ``step``, broken lines and a half-written last one; a missing file stays missing.

    Rows without a step are kept. Used on resume, for ``metrics.jsonl`` and ``spans.jsonl`` alike.

    Returns:
        The number of complete rows dropped.
    """
    if not path.exists():
        return 0
    data = read_file(path)
    rows = decode_lines(data, path, _with_step)
    kept = [row for row in rows if row.get("step") is None or row["step"] <= step]
    text = b"".join(encode_row(row) for row in kept)
    if text != data:
        replace_atomically(path, text)
    return len(rows) - len(kept)


def _with_step(row: dict[str, Any]) -> dict[str, Any]:
    if row.get("step") is not None and type(row["step"]) is not int:
        raise ValueError(f"step {row['step']!r:.60}")
    return row


class RowAppender:
    """Appends rows to a JSON Lines file, each flushed: a kill loses at most the row being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        data = read_file(path) if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:  # a kill cut the last line off
            replace_atomically(path, whole)
        self._file = path.open("ab")

    def append(self, row: Mapping[str, Any]) -> None:
        """Raises UserError where the disk refuses the row."""
        data = encode_row(row)
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise write_error(self._path, error) from error

    def close(self) -> None:
        self._file.close()
