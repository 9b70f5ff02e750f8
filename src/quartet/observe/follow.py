"""Reads a run's files while the run writes them: only what is new, and never half a line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from quartet.config.errors import read_error, refuse_pipe
from quartet.observe.jsonl import parse_lines
from quartet.observe.spans import Span, span_of_row
from quartet.observe.trackers import metrics_of_row

T = TypeVar("T")


class Tail(Generic[T]):
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
        """The complete rows since the last call. Lines that are damaged, or of another version, are left out."""
        self.restarted = False
        try:
            refuse_pipe(self._path)
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


class StageTails:
    """The metrics and spans of one stage of a run as they come."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.metrics: Tail[dict[str, float]] = Tail(directory / "metrics.jsonl", metrics_of_row)
        self.spans: Tail[Span] = Tail(directory / "spans.jsonl", span_of_row)

    @property
    def restarted(self) -> bool:
        return self.metrics.restarted or self.spans.restarted

    @property
    def troubles(self) -> list[str]:
        return [tail.trouble for tail in (self.metrics, self.spans) if tail.trouble is not None]
