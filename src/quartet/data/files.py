"""Data files as text: plain or compressed, UTF-8, with bounds that hostile files meet early."""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from quartet.config.addresses import is_url
from quartet.config.errors import UserError
from quartet.config.plugins import storage

INSTALL = "pip install 'quartet-rl[data]'"
COMPRESSIONS = (".gz", ".zst")
MAX_ROW_BYTES = 1 << 24
"""Longest row of a text file: 16 MiB, several million tokens."""
_MAX_BLANK_LINES = 1_000_000
_MAX_EXPANSION = 200
"""Text shrinks by a factor of 3 to 20, and rarely by more than 50."""
_UNSUSPICIOUS_BYTES = 1 << 28
"""Expanded size from which on the expansion counts."""


def located(name: str) -> Path:
    """The path on this machine; of a URL, of the copy that is brought here once."""
    return storage(name).local_copy() if is_url(name) else Path(name).expanduser()


def format_of(path: Path) -> str:
    """The ending that says what a file holds, in lower case and without that of its compression (``.jsonl``)."""
    ending = path.suffix.lower()
    return Path(path.stem).suffix.lower() if ending in COMPRESSIONS else ending


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed.

    Raises:
        UserError: it cannot be read, here or while it is being read, or it has changed until it was read to its end.
    """
    try:
        with path.open("rb") as file, _unchanged(path):
            if path.suffix.lower() not in COMPRESSIONS:
                yield file
                return
            expand: Any = gzip.GzipFile(fileobj=file) if path.suffix.lower() == ".gz" else _zstd(path, file)
            with io.BufferedReader(_Expanded(path, expand), 1 << 20) as stream:
                yield stream
    except (EOFError, zlib.error, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(
            "the data file cannot be read", found=f"{path}: {reason}", remedy="write the file again, or name another"
        ) from error


@contextlib.contextmanager
def _unchanged(path: Path) -> Iterator[None]:
    """Refuses a file that grows or shrinks while it is read: each process would see other rows."""
    before = path.stat().st_size
    yield
    if (after := path.stat().st_size) != before:
        raise UserError(
            "the data file changed while it was read",
            found=f"{path}: {before:,} bytes at first, {after:,} at the end",
            remedy="wait until it is written, or name a copy of it",
        )


def _zstd(path: Path, file: BinaryIO) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UserError("files compressed with zstd need pyarrow", found=str(path), remedy=INSTALL) from None
    return pyarrow.CompressedInputStream(file, "zstd")


class _Expanded(io.RawIOBase):
    """Counts what a compressed file expands to: a bomb of kilobytes can fill any memory."""

    def __init__(self, path: Path, stream: Any) -> None:
        self._path = path
        self._stream = stream
        self._compressed = path.stat().st_size
        self._expanded = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._expanded += len(data)
        if self._expanded > max(_UNSUSPICIOUS_BYTES, _MAX_EXPANSION * self._compressed):
            raise UserError(
                "a compressed data file expands beyond measure",
                found=f"{self._path}: {self._compressed:,} bytes become more than {self._expanded:,}",
                remedy="unpack it yourself if it is meant to, and name the unpacked file",
            )
        return len(data)


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Every line with its number from 1, without line feed and byte order mark, one after the other.

    Lines end with a line feed alone: JSON strings may hold characters such as U+2028.

    Raises:
        UserError: a line is not UTF-8 or longer than ``MAX_ROW_BYTES``.
    """
    with opened(path) as file:
        for line, data in raw_lines(file, path):
            yield line, decoded(data, path, line)


def raw_lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """Every line with its number from 1 and its line feed.

    Raises:
        UserError: one is longer than ``MAX_ROW_BYTES``, or too many in a row are blank.
    """
    blank = 0
    for line in itertools.count(1):
        data = file.readline(MAX_ROW_BYTES + 1)
        if not data:
            return
        if len(data) > MAX_ROW_BYTES:
            raise too_long(path, line)
        blank = blank + 1 if data.isspace() else 0
        check_blank(blank, path, line)
        yield line, data


def check_blank(num_lines: int, path: Path, line: int) -> None:
    """Refuses a file of nothing but line feeds, of which gigabytes fit into a small compressed one."""
    if num_lines > _MAX_BLANK_LINES:
        raise UserError(
            "the data file holds nothing but blank lines for long",
            found=f"{path}:{line}: {num_lines:,} of them without a row",
            remedy="write the file again, or remove them",
        )


def decoded(data: bytes, path: Path, line: int) -> str:
    """The text of a line."""
    try:
        return data.decode("utf-8-sig" if line == 1 else "utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, line, error) from None


def whole_text(path: Path) -> str:
    """The file's text without a byte order mark.

    Raises:
        UserError: it is not UTF-8.
    """
    with opened(path) as file:
        data = file.read()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, data.count(b"\n", 0, error.start) + 1, error) from None


def too_long(path: Path, line: int) -> UserError:
    return UserError(
        "a row is too long to be one",
        found=f"{path}:{line}: more than {MAX_ROW_BYTES >> 20} MiB",
        remedy="write one row per line (or quote and close its cells), or cut the row",
    )


def _not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> UserError:
    return UserError(
        "the data file is not UTF-8 text", found=f"{path}:{line}: {error.reason}", remedy="save it as UTF-8"
    )
