"""Demonstrations that stay on disk until a batch needs them.

The file is gone through once at the start, row by row: every row is checked and tokenised, so that a row that cannot
be used stops the run before it begins. What is kept of a row is where it stands. A batch reads its rows again and
tokenises them, so memory holds a few numbers per row and the batches in use, however large the file is.
"""

from __future__ import annotations

import pickle
import tempfile
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from quartet.batch.ragged import RaggedBatch
from quartet.config.common import DataConfig, SourceConfig
from quartet.config.errors import UserError
from quartet.data.datasets import Overlength, SFTData, SFTItem, TokenLimit
from quartet.data.fields import AS_GIVEN, TOOLS_TOLD, Reading, placed
from quartet.data.files import decoded, opened, raw_lines
from quartet.data.formats import Parsed, demonstrations
from quartet.data.json_rows import parse_line
from quartet.data.order import draws
from quartet.data.readers import Row, check_file_options, iter_rows, no_rows
from quartet.text.examples import Example
from quartet.text.templates import template_warnings
from quartet.text.tokenizer import TextCodec

_LINES = {".jsonl", ".ndjson"}
BYTES_PER_TOKEN = 9
"""Of a tokenised batch: an id of 8 bytes and a mask of one."""


def stored_rows(config: DataConfig) -> StoredRows:
    """The rows of a recipe's data: a JSON Lines file where it stands; any other is first copied, row by row.

    Raises:
        UserError: the data are mixed from several sources.
    """
    if len(config.parts) != 1:
        raise UserError(
            "rows that stay on disk come from one file or data set",
            found=f"{len(config.sources)} sources",
            remedy="put them into one file",
        )
    (source,) = config.parts
    path = Path(str(source.path)).expanduser()
    if path.suffix.lower() in _LINES and path.is_file() and not _is_array(path):
        check_file_options(source)
        return JsonLinesRows(path, source)
    return SpooledRows(source)


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        while (head := file.read(4096)) and not (text := head.lstrip(b"\xef\xbb\xbf \t\r\n")):
            pass
        return bool(head) and text.startswith(b"[")


class JsonLinesRows:
    """A JSON Lines file, read line by line: 16 bytes of memory per row."""

    def __init__(self, path: Path, config: SourceConfig) -> None:
        self._path = path
        self._config = config
        self._file: BinaryIO | None = path.open("rb")
        self._offsets = array("Q")
        self._lines = array("Q")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def scan(self) -> Iterator[Row]:
        offset = 0
        with opened(self._path) as file:
            for line, data in raw_lines(file, self._path):
                if not data.isspace() and decoded(data, self._path, line).strip():
                    self._offsets.append(offset)
                    self._lines.append(line)
                    yield self._row(data, line)
                    if len(self._offsets) == self._config.limit:
                        return
                offset += len(data)

    def read(self, number: int) -> Row:
        if self._file is None:
            with opened(self._path):  # for its error
                self._file = self._path.open("rb")
        self._file.seek(self._offsets[number])
        return self._row(self._file.readline(), self._lines[number])

    def _row(self, data: bytes, line: int) -> Row:
        return Row(parse_line(self._path, line, decoded(data, self._path, line)), str(self._config.path), line)


class SpooledRows:
    """Rows of any other format, kept in a temporary file that vanishes with the process: 8 bytes of memory per row.

    A pickled copy goes through the source again when it is first read.
    """

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self._file: BinaryIO | None = None
        self._offsets = array("Q")

    def __reduce__(self) -> tuple[type[SpooledRows], tuple[Any, ...]]:
        return SpooledRows, (self._config,)

    def scan(self) -> Iterator[Row]:
        self._file = tempfile.TemporaryFile(prefix="quartet-rows-")  # noqa: SIM115 - held as long as the rows
        for row in iter_rows(self._config):
            self._offsets.append(self._file.tell())
            pickle.dump(row, self._file)
            yield row

    def read(self, number: int) -> Row:
        if self._file is None:
            deque(self.scan(), maxlen=0)
        assert self._file is not None
        self._file.seek(self._offsets[number])
        row: Row = pickle.load(self._file)
        return row


class ListedRows:
    """Rows that Python code holds."""

    def __init__(self, rows: Sequence[Mapping[str, object]], source: str) -> None:
        self._rows = rows
        self._source = source

    def scan(self) -> Iterator[Row]:
        return map(self.read, range(len(self._rows)))

    def read(self, number: int) -> Row:
        return Row(self._rows[number], self._source, number + 1)


StoredRows: TypeAlias = JsonLinesRows | SpooledRows | ListedRows
"""Rows that can be gone through once and then be read by their number, from 0.

A pickled copy can be read at once, in a process that finds the data where they are here.
"""


class LazyDemonstrations:
    """Demonstrations by number; ``batch`` is a function of its arguments alone.

    Args:
        rows: goes through all of them.
        limit: longer sequences are an error, or left out and counted.
        source: names the data, for messages.

    Attributes:
        longest: tokens of the longest sequence.
        warnings: what was left out or converted, in words.

    Raises:
        UserError: no rows, or one that cannot be used; its place is named.
    """

    def __init__(
        self, rows: StoredRows, codec: TextCodec, limit: TokenLimit, reading: Reading = AS_GIVEN, source: str = "data"
    ) -> None:
        self._rows, self._codec, self._reading = rows, codec, reading
        self._kept = array("Q")
        self.longest = 0
        told: Parsed[Example] = Parsed()
        too_long, num_rows = Overlength(limit), 0
        for row in rows.scan():
            parsed = demonstrations([row], reading)
            for note in parsed.notes:
                told.count(told.notes, note, row.place)
            with placed(row.place):
                length = SFTItem.of(parsed.items[0], codec).num_tokens
            if too_long.fits(row.place, length):
                self._kept.append(num_rows)
                self.longest = max(self.longest, length)
            num_rows += 1
        if not num_rows:
            raise no_rows(source)
        remarks = template_warnings(codec.tokenizer, has_tools=True) if TOOLS_TOLD in told.notes else []
        self.warnings = (*told.report(), *too_long.warning(num_rows, "sequence"), *remarks)

    def __len__(self) -> int:
        return len(self._kept)

    def batch(self, number: int, size: int, seed: int) -> RaggedBatch:
        """Batch ``number``: ``size`` sequences with token field ``loss_mask`` (bool). Every row once per epoch."""
        drawn = draws(seed, number, len(self), size)
        items = tuple(self._item(index) for index, _ in drawn)
        return SFTData(items).select(range(len(items)), [f"row{index}@{epoch}" for index, epoch in drawn])

    def _item(self, index: int) -> SFTItem:
        (example,) = demonstrations([self._rows.read(self._kept[index])], self._reading).items
        return SFTItem.of(example, self._codec)

    def most_batch_bytes(self, size: int) -> int:
        """What a tokenised batch of ``size`` sequences takes at most."""
        return size * self.longest * BYTES_PER_TOKEN
