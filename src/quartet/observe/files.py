"""A run's files: JSON Lines that survive a kill, digests, and whether the run goes on.

Rows are appended one by one, repaired and cut back on resume, and read while the run writes them. Other files show by
a SHA-256, made while they are written, whether they are as they were.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar, cast, get_type_hints
from uuid import uuid4

from pydantic import ConfigDict, TypeAdapter, ValidationError

from quartet.config.errors import UserError, read_error, read_file, write_error

_DIGEST = "sha256"
_BUFFER = 2**20
"""torch.save writes some forty times per tensor, a few bytes each but for the contents."""


@dataclass(frozen=True)
class FileDigest:
    """Size in bytes and SHA-256 (hex) of a file's content."""

    bytes: int
    sha256: str


class DigestingFile:
    """A file open for writing that digests what passes through, so that nothing is read a second time.

    Only for writers that go from the beginning to the end, as ``torch.save`` does: there is no ``seek``.

    Attributes:
        error: what the system said when a write failed; some libraries report it as something else.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._state = hashlib.sha256()
        self._bytes = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        try:
            # Buffered or opened without buffer: all of it, or an error.
            view = memoryview(data).cast("B")
            done = 0
            while done < len(view):
                done += self._file.write(view[done:])
        except OSError as error:
            self.error = error
            raise
        self._state.update(view)
        self._bytes += len(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def tell(self) -> int:
        """Counts the bytes written so far."""
        return self._bytes

    def close(self) -> None:
        """Does nothing: the file is closed by the code that opened it."""

    def digest(self) -> FileDigest:
        """Returns the digest of what was written so far."""
        return FileDigest(self._bytes, self._state.hexdigest())


@contextmanager
def digested_file(path: Path) -> Iterator[DigestingFile]:
    """Opens a new file to write to, synced at the end; its digest is made on the way.

    Raises:
        OSError: it could not be written, also where the writer took that for something else.
    """
    with open(path, "wb", _BUFFER) as file:
        digesting = DigestingFile(file)
        try:
            yield digesting
            file.flush()
            os.fsync(file.fileno())
        except RuntimeError as error:
            # torch.save reports what failed as an error of its zip writer.
            if digesting.error is not None:
                raise digesting.error from error
            raise


def fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_file(path: Path) -> FileDigest:
    """Makes the digest of a file that is there already: reads it once.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        state = hashlib.file_digest(file, "sha256")
        return FileDigest(file.tell(), state.hexdigest())


def digest_files(directory: Path) -> dict[str, FileDigest]:
    """Makes the digest of every file below ``directory``, by its path in there; OSError where one cannot be read."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): digest_file(path) for path in files}


def find_changed_file(directory: Path, written: Mapping[str, FileDigest]) -> str | None:
    """Finds the first file that is not as it was written, None where all are; more files than those do no harm."""
    for name, digest in written.items():
        try:
            if digest_file(directory / name) != digest:
                return name
        except OSError:
            return name
    return None


def seal_json(value: Mapping[str, Any]) -> bytes:
    """Writes ``value`` as JSON text with a last key ``sha256``, the digest of the text without it."""
    if _DIGEST in value:
        raise ValueError(f"the key {_DIGEST!r} is the seal's own")
    return _text({**value, _DIGEST: hashlib.sha256(_text(value)).hexdigest()})


def unseal_json(data: bytes) -> dict[str, Any]:
    """Returns what :func:`seal` was given.

    Raises:
        ValueError: ``data`` is not, byte for byte, what it returned.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON text ({str(error)[:100]})") from error
    if not isinstance(value, dict):
        raise ValueError(f"holds a {type(value).__name__} instead of an object")
    if _DIGEST not in value:
        raise ValueError("has no digest of its own")
    digest = value.pop(_DIGEST)
    if digest != hashlib.sha256(_text(value)).hexdigest() or seal_json(value) != data:
        raise ValueError("does not agree with its own digest")
    return value


def _text(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode("ascii") + b"\n"


T = TypeVar("T")
_log = logging.getLogger(__name__)


def encode_row(row: Mapping[str, Any]) -> bytes:
    """Makes one line: ASCII only, so that lone surrogates in a model's output survive; NaN is a ValueError."""
    return json.dumps(row, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def parse_lines(data: bytes, build: Callable[[dict[str, Any]], T], first: int = 1) -> tuple[list[T], list[str]]:
    """Makes objects of the rows in ``data``; a last line without its line feed (cut off by a kill) is left out.

    Args:
        build: raises ValueError, TypeError, KeyError, … for a row of another shape (``dataclass_from_row`` does).
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
    """Returns the objects of :func:`parse_lines`; how many lines of ``source`` are broken is logged."""
    objects, broken = parse_lines(data, build)
    if broken:
        _log.warning("%s: %d broken lines are left out (%s)", source, len(broken), broken[0])
    return objects


def read_objects(path: Path, build: Callable[[dict[str, Any]], T]) -> list[T]:
    """Reads the rows of ``path`` as objects, without broken ones; UserError where it cannot be read."""
    return decode_lines(read_file(path), path, build)


def read_objects_strictly(path: Path, build: Callable[[dict[str, Any]], T]) -> list[T]:
    """Reads a file that decides what is computed, as :func:`read_objects`: UserError for a broken line."""
    objects, broken = parse_lines(read_file(path), build)
    if broken:
        remedy = "restore the file from a copy, or delete that line"
        raise UserError("a file of the run is damaged", found=f"{path}, {broken[0]}", remedy=remedy)
    return objects


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads rows as plain dictionaries, as :func:`read_objects`."""
    return read_objects(path, dict)


def dataclass_from_row(kind: type[T], row: Mapping[str, Any]) -> T:
    """Makes ``row`` an instance of the dataclass ``kind``.

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
    fsync_directory(path.parent)  # the rename itself must survive a crash of the machine


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


LOCK = ".lock"
ENDED = "ended without a word (killed?)"
"""Status of a run whose process is gone and could not say so."""


def run_status(run_dir: Path, info: Mapping[str, Any]) -> Any:
    """Returns the status in ``run.json``; ``ENDED`` where that is ``running`` and no process holds the run's lock."""
    status = info.get("status")
    return ENDED if status == "running" and not _may_be_held(run_dir / LOCK) else status


def _may_be_held(lock: Path) -> bool:
    """Tells whether a process may hold the lock: False where it is certain that none does."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return True  # none, or not ours to look at
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


class FileTail(Generic[T]):
    """The rows of a JSON Lines file as they come.

    A last line without its line feed waits until that is there. A file that is missing has no rows yet, and one that is
    gone none any more. What a resumed run cuts back is read again from its beginning.

    Args:
        build: makes a row's object, as of ``parse_lines``.

    Attributes:
        restarted: the last ``poll`` began again from the beginning.
        trouble: what could not be read first, in the report's words; None where all could.
    """

    def __init__(self, path: Path, build: Callable[[dict[str, Any]], T]) -> None:
        self._path, self._build = path, build
        self._inode = self._offset = self._lines = 0
        self.restarted = False
        self.trouble: str | None = None

    def poll(self) -> list[T]:
        """Returns the complete rows since the last call. Lines that are damaged, or of another version, are
        left out.
        """
        self.restarted = False
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if self._inode and (status.st_ino != self._inode or status.st_size < self._offset):
                    self.restarted, self._offset, self._lines, self.trouble = True, 0, 0, None
                self._inode = status.st_ino
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            refused = read_error(self._path, error)
            self.trouble = self.trouble or f"{refused.problem}: {refused.found}"
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        rows, broken = parse_lines(whole, self._build, self._lines + 1)
        self._lines += whole.count(b"\n")
        if broken:
            self.trouble = self.trouble or f"a file of the run is damaged: {self._path}, {broken[0]}"
        return rows
