"""Rows that are read, checked and tokenised when they are drawn: those behind the first ``check_rows`` of a source.

They stay where they are (JSON Lines), or in a temporary file (any other format). Memory holds 16 bytes per row.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from array import array
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from quartet.config.common import SourceConfig
from quartet.config.errors import UserError
from quartet.data.files import decoded, located, opened, raw_lines
from quartet.data.formats import NothingLeft, Parsed
from quartet.data.json_rows import parse_line
from quartet.data.readers import Row
from quartet.data.spool import Rows, Spool

T = TypeVar("T")
_LINES = {".jsonl", ".ndjson"}


def remaining_rows(source: SourceConfig | None, rows: Iterator[Row], first: int) -> Rows[Row]:
    """The rows that ``rows`` would still give, by number; what is malformed in JSON Lines is found when it is drawn.

    Args:
        source: of the rows; None where Python code passes them.
        first: rows that ``rows`` has given already.
    """
    head = list(islice(rows, 1))
    if not head or source is None:
        return Spool(chain(head, rows))
    path = located(str(source.path))
    if path.suffix.lower() in _LINES and path.is_file() and not _is_array(path):
        return JsonLines(path, source, first)
    return Spool(chain(head, rows))


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        while (head := file.read(4096)) and not (text := head.lstrip(b"\xef\xbb\xbf \t\r\n")):
            pass
        return bool(head) and text.startswith(b"[")


class JsonLines(Rows[Row]):
    """The rows of a JSON Lines file from number ``first`` on, each read where it stands.

    Raises:
        UserError: a row is read of a file that has been written to since.
    """

    def __init__(self, path: Path, source: SourceConfig, first: int) -> None:
        self._path, self._source = path, source
        self._offsets, self._sizes, self._lines = array("Q"), array("I"), array("I")
        self._digest = hashlib.sha256()
        offset = number = 0
        with opened(path) as file:
            self._file = os.fdopen(os.dup(file.fileno()), "rb")
            self._state = self._state_now()
            for line, data in raw_lines(file, path):
                if data[:1] == b"{" or decoded(data, path, line).strip():  # as checked rows: Unicode's spaces, too
                    if number == source.limit:
                        break
                    number += 1
                    if number > first:
                        self._offsets.append(offset)
                        self._sizes.append(len(data))
                        self._lines.append(line)
                        self._digest.update(data)
                offset += len(data)

    @property
    def digest(self) -> bytes:
        """SHA-256 of the rows as they stand there."""
        return self._digest.digest()

    def _state_now(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def __len__(self) -> int:
        return len(self._offsets)

    def _one(self, number: int) -> Row:
        if (now := self._state_now()) != self._state:
            raise UserError(
                "the data file was written to while the run reads from it",
                found=f"{self._path}: {self._state[0]:,} bytes when it began, {now[0]:,} now",
                remedy="put the file back as it was and go on with --resume; let new rows go to another file",
            )
        line = self._lines[number]
        data = os.pread(self._file.fileno(), self._sizes[number], self._offsets[number])
        values = parse_line(self._path, line, decoded(data, self._path, line))
        return Row(values, str(self._source.path), line)


class Unchecked(Rows[T]):
    """What is made of rows when they are asked for; in the place of one that is left out stands the next that is not.

    Args:
        read: makes the item of a row and its number.

    Attributes:
        seen: token ids of the rows that were asked for.
    """

    def __init__(self, rows: Rows[Row], read: Callable[[Row, int], Any]) -> None:
        self.rows = rows
        self._read = read
        self.seen: set[int] = set()
        self._left_out = dict[int, str]()
        self._told: Parsed[T] = Parsed()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def digest(self) -> bytes:
        """SHA-256 of the rows in their order, wherever they stand and whatever is made of them."""
        if isinstance(self.rows, JsonLines):
            return self.rows.digest
        state, data = hashlib.sha256(), io.BytesIO()
        pickler = pickle.Pickler(data, pickle.HIGHEST_PROTOCOL)
        pickler.fast = True  # equal rows alike, whether or not equal values in them are one object
        for row in self.rows:
            pickler.dump(row.values)
            state.update(data.getvalue())
            data.seek(0)
            data.truncate()
        return state.digest()

    def _one(self, number: int) -> T:
        for other in chain(range(number, len(self)), range(number)):
            if other in self._left_out:
                continue
            row = self.rows[other]
            try:
                found = self._read(row, other)
            except NothingLeft as reason:
                self._left_out[other] = row.place
                self._told.count(self._told.skipped, reason.reason, row.place)
                continue
            self.seen |= found.seen
            item: T = found.items[0]
            return item
        raise UserError("no row is left to use", found="; ".join(self.report()), remedy="use other data")

    def report(self) -> list[str]:
        """What was left out of the rows that were asked for, in words."""
        return [f"when drawn: {line}" for line in self._told.report()]
