"""Rows that are read, checked and tokenised when they are drawn: those behind the first ``check_rows`` of a source.

They wait in a temporary file. Memory holds eight bytes per row. And batches that are prepared ahead of their use.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, chain
from typing import Any, BinaryIO, Generic, TypeVar, overload

from quartet.config.errors import UserError, describe_error
from quartet.data.formats import NoRowsLeft, ParsedRows
from quartet.data.readers import DataRow
from quartet.observe.process import end_thread_pool

T = TypeVar("T")
_IN_MEMORY = 4 << 20
"""Bytes that wait in memory to be written; few rows never reach the disk."""


class LazyRows(Sequence[T]):
    """A sequence that says how to get one of its objects."""

    @abstractmethod
    def _one(self, number: int) -> T: ...

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self._one(number) for number in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self._one(number)


class TempFileRows(LazyRows[T]):
    """Objects kept, pickled, in a temporary file that vanishes with the process.

    They may be read by several threads at a time, and by forked processes.
    """

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._offsets = array("Q", [0])
        self._waiting = bytearray()
        self._file: BinaryIO | None = None
        self._written = 0
        for item in items:
            self.append(item)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def append(self, item: T) -> None:
        """Adds an object.

        Raises:
            UserError: the temporary file cannot be written, or the object cannot be pickled.
        """
        data = _pickled(item)
        self._waiting += data
        self._offsets.append(self._offsets[-1] + len(data))
        if len(self._waiting) > _IN_MEMORY:
            self._write()

    def _write(self) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="quartet-rows-")  # noqa: SIM115 - held as long as the rows
            self._file.write(self._waiting)
            self._file.flush()
        except OSError as error:
            raise UserError(
                "rows cannot be kept in a temporary file",
                found=f"{error.strerror or error} in {tempfile.gettempdir()}",
                remedy="make room there, or set TMPDIR to a directory on a larger disk",
            ) from error
        self._written += len(self._waiting)
        self._waiting = bytearray()

    def _one(self, number: int) -> T:
        start, stop = self._offsets[number], self._offsets[number + 1]
        if self._file is None or start >= self._written:
            data = bytes(self._waiting[start - self._written : stop - self._written])
        else:
            data = os.pread(self._file.fileno(), stop - start, start)
        item: T = pickle.loads(data)
        return item


def _pickled(item: Any) -> bytes:
    try:
        return pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # objects of users may raise anything
        columns = getattr(item, "columns", None) or getattr(item, "values", None) or {}
        named = [repr(name) for name, value in columns.items() if not _can_be_pickled(value)]
        raise UserError(
            "a row of the data cannot be kept: it holds what is no plain data",
            found=f"{getattr(item, 'place', 'a row')}, {', '.join(named) or 'somewhere'}: {describe_error(error)}",
            remedy="keep text, numbers, lists and dicts in the columns, and make the rest from them where it is used",
        ) from error


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return False
    return True


class ConcatRows(LazyRows[T]):
    """Sequences one after the other."""

    def __init__(self, parts: Sequence[Sequence[T]]) -> None:
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def _one(self, number: int) -> T:
        part = bisect_right(self._ends, number)
        return self._parts[part][number - (self._ends[part - 1] if part else 0)]


class LazyExamples(LazyRows[T]):
    """What is made of rows when they are asked for; in the place of one that is left out stands the next that is not.

    Args:
        read: makes the item of a row and its number.

    Attributes:
        seen: token ids of the rows that were asked for.
    """

    def __init__(self, rows: LazyRows[DataRow], read: Callable[[DataRow, int], Any]) -> None:
        self.rows = rows
        self._read = read
        self.seen: set[int] = set()
        self._left_out = dict[int, str]()
        self._told: ParsedRows[T] = ParsedRows()

    def __len__(self) -> int:
        return len(self.rows)

    def _one(self, number: int) -> T:
        for other in chain(range(number, len(self)), range(number)):
            if other in self._left_out:
                continue
            row = self.rows[other]
            try:
                found = self._read(row, other)
            except NoRowsLeft as reason:
                self._left_out[other] = row.place
                self._told.skip(reason.reason, row.place)
                continue
            self.seen |= found.seen
            item: T = found.items[0]
            return item
        raise UserError("no row is left to use", found="; ".join(self.report()), remedy="use other data")

    def report(self) -> list[str]:
        """Returns what was left out of the rows that were asked for, in words."""
        return [f"when drawn: {line}" for line in self._told.report()]


class Prefetcher(Generic[T]):
    """``make(0)``, ``make(1)``, … prepared while the caller does other things.

    ``make`` is a pure function of its number, so it does not matter what was prepared and what was not: numbers may be
    skipped, and a number that was never prepared is made when it is asked for. At most ``ahead`` results wait, and one
    more is being used.

    Args:
        ahead: results prepared beyond the one asked for; 0 makes each when it is asked for, without a thread.
    """

    def __init__(self, make: Callable[[int], T], *, ahead: int) -> None:
        self._make = make
        self._ahead = ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch") if ahead else None
        self._waiting: dict[int, Future[T]] = {}

    def start(self, number: int) -> None:
        """Prepares ``number`` and what follows it; what is prepared beyond these is dropped."""
        if self._thread is None:
            return
        wanted = range(number, number + self._ahead)
        for other in [other for other in self._waiting if other not in wanted]:
            self._waiting.pop(other).cancel()
        for one in wanted:
            if one not in self._waiting:
                self._waiting[one] = self._thread.submit(self._made, one)

    def get(self, number: int) -> T:
        """Returns ``make(number)``; whatever it raised is raised here."""
        ready = self._waiting.pop(number, None)
        if self._thread is None:
            return self._make(number)
        if ready is None:
            self.start(number)
            ready = self._waiting.pop(number)
        self.start(number + 1)
        return ready.result()

    def _made(self, number: int) -> T:
        try:
            return self._make(number)
        finally:
            end_thread_pool()  # one that idles here slows down what computes elsewhere

    def close(self) -> None:
        """Waits for the one in preparation and forgets the others. May be called again."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._waiting.clear()
