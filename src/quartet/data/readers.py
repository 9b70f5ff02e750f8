"""Rows from JSON, JSON Lines, CSV, TSV and Parquet files and from hub data sets, each with its place for messages."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from quartet.config.common import DataConfig, SourceConfig
from quartet.config.errors import UserError
from quartet.config.nearest import missing_file_error
from quartet.config.plugins import storage_for
from quartet.config.strict import is_url

Values = Iterator[tuple[int, dict[str, Any]]]
INSTALL = "pip install 'quartet-rl[data]'"
ROWS_KEY = "data"
"""Where a file that is one object has its rows."""
_LONGEST_CELL = 1 << 24


@dataclass(frozen=True)
class DataRow:
    """One row of a data file.

    Args:
        line: from 1; of documents, Parquet files and hub data the number of the row.
    """

    values: Mapping[str, Any]
    source: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.source}:{self.line}"


def format_places(places: Sequence[str], most: int = 5) -> str:
    """Writes ``a.jsonl:3, 17, 20, …`` for the first ``most`` places; the file is named once."""
    shown: list[str] = []
    last = None
    for place in places[:most]:
        source, _, line = place.rpartition(":")
        shown.append(line if source and source == last else place)
        last = source
    return ", ".join([*shown, *(["…"] if len(places) > most else [])])


def iter_rows(config: DataConfig | SourceConfig) -> Iterator[DataRow]:
    """Reads all rows (the first ``config.limit``) under the file's own column names; in pieces, but for JSON documents.

    A path with a known ending, or one that exists, is a file; anything else is the name of a hub data set.

    Raises:
        UserError: no such file, nothing in it, or a malformed row (file, line and an excerpt are named).
    """
    name = config.path
    if name is None:
        raise ValueError("the data have no path of their own")
    path = _located(name)
    reader = _READERS.get(_format_of(path))
    if path.is_file() and reader is None:
        raise UserError(
            "the data file's format is not known", found=name, remedy=f"use one of {', '.join(sorted(_READERS))}"
        )
    is_meant_as_path = reader is not None or (name.startswith((".", "/", "~")) and not path.exists())
    if is_meant_as_path and not path.is_file():
        raise missing_file_error("there is no such data file", path)
    if reader is None:
        found = _hub(str(path) if is_url(name) else name, config.config, config.split)
    else:
        _check_file_options(config)
        found = reader(path)
    is_empty = True
    for line, values in itertools.islice(found, config.limit):
        is_empty = False
        yield DataRow(values, name, line)
    if is_empty:
        raise UserError("the data file holds no rows", found=name, remedy="name a file with data in it")


def _check_file_options(config: DataConfig | SourceConfig) -> None:
    """Refuses for a single file what only data sets have."""
    for key, value, usual in (("config", config.config, None), ("split", config.split, "train")):
        if value != usual:
            raise UserError(
                f"a file has no {'configurations' if key == 'config' else 'splits'}",
                found=f"{config.path} with {key}: {value}",
                remedy=f"leave {key} out; `limit` takes only the first rows",
            )


# Files as text -------------------------------------------------------------------------------------------


def _located(name: str) -> Path:
    """Returns the path on this machine; of a URL, of the copy that is brought here once."""
    return storage_for(name).local_copy() if is_url(name) else Path(name).expanduser()


def _format_of(path: Path) -> str:
    """Returns the ending that says what a file holds, in lower case and without ``.gz``."""
    ending = path.suffix.lower()
    return Path(path.stem).suffix.lower() if ending == ".gz" else ending


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for its bytes, decompressed.

    Raises:
        UserError: it cannot be read, here or while it is being read.
    """
    try:
        with path.open("rb") as file:
            if path.suffix.lower() == ".gz":
                yield io.BufferedReader(gzip.GzipFile(fileobj=file), 1 << 20)
            else:
                yield file
    except (EOFError, zlib.error, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(
            "the data file cannot be read", found=f"{path}: {reason}", remedy="write the file again, or name another"
        ) from error


def _decoded(data: bytes, path: Path, line: int) -> str:
    """Decodes a line.

    Raises:
        UserError: it is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig" if line == 1 else "utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        raise UserError(
            "the data file is not UTF-8 text", found=f"{path}:{line}: {error.reason}", remedy="save it as UTF-8"
        ) from None


# JSON ----------------------------------------------------------------------------------------------------


def _parse_line(path: Path, line: int, text: str) -> dict[str, Any]:
    """Reads the row in one line of a JSON Lines file.

    Raises:
        UserError: it is not valid JSON, or not an object.
    """
    try:
        return _as_object(json.loads(text), path, line)
    except json.JSONDecodeError as error:
        raise _malformed(path, line, text, error) from None


def _malformed(path: Path, line: int, text: str, error: json.JSONDecodeError) -> UserError:
    found = f"{path}:{line}: {error.msg}: {_shortened(text)}"
    return UserError("a row is not valid JSON", found=found, remedy="mend or remove that row")


def _as_object(value: Any, path: Path, line: int) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    found = f"{path}:{line}: {_shortened(json.dumps(value))}"
    raise UserError("a row is not an object", found=found, remedy='write each row as {"column": value, …}')


def _shortened(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 60 else text[:57] + "…")


def _json(path: Path) -> Values:
    """Reads a document (an array of rows, or an object with them under ``data``), or JSON lines; both are common."""
    with _opened(path) as file:
        text = _decoded(file.read(), path, 1)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and not text.lstrip().startswith("["):
            yield from _json_lines(path)
            return
        if text.strip():
            raise _malformed(path, error.lineno, text.splitlines()[error.lineno - 1], error) from None
        value = []
    if isinstance(value, dict):
        rows = value.get(ROWS_KEY)
        value = rows if isinstance(rows, list) and all(isinstance(row, dict) for row in rows) else [value]
    if not isinstance(value, list):
        value = [value]
    yield from ((number, _as_object(row, path, number)) for number, row in enumerate(value, start=1))


def _json_lines(path: Path) -> Values:
    """Reads one object per line. Lines end with a line feed alone: JSON strings may hold characters such as U+2028."""
    with _opened(path) as file:
        for line, data in enumerate(file, start=1):
            if (text := _decoded(data, path, line)).strip():
                yield line, _parse_line(path, line, text)


# Tables --------------------------------------------------------------------------------------------------


def _csv(path: Path, delimiter: str = ",") -> Values:
    """Reads CSV with a header; a row that spans several lines has the number of its last."""
    limit = csv.field_size_limit(_LONGEST_CELL)
    try:
        with _opened(path) as file:
            lines = (_decoded(data, path, number) + "\n" for number, data in enumerate(file, start=1))
            reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
            try:
                reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
                for cells in reader:
                    if None in cells or None in cells.values():
                        raise UserError(
                            "a row does not have one cell per column",
                            found=f"{path}:{reader.line_num}: {_shortened(str(list(cells.values())))}",
                            remedy="mend that row (text with commas or line breaks needs quotes)",
                        )
                    yield reader.line_num, cells
            except csv.Error as error:
                found = f"{path}:{reader.reader.line_num}: {error}"
                raise UserError("the file is not valid CSV", found=found, remedy="mend or remove that row") from None
    finally:
        csv.field_size_limit(limit)


def _parquet(path: Path) -> Values:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError("Parquet files need pyarrow", found=str(path), remedy=INSTALL) from None
    try:
        # Else pyarrow has whole row groups in memory, or the whole file, and each of its threads keeps some of its own.
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 16) as file:
            batches = file.iter_batches(batch_size=1024, use_threads=False)
            yield from enumerate(itertools.chain.from_iterable(batch.to_pylist() for batch in batches), start=1)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(
            "the Parquet file cannot be read", found=f"{path}: {error}", remedy="write the file again"
        ) from error


def _hub(name: str, config: str | None, split: str) -> Values:
    """Reads a data set from the hub, or a directory that ``datasets`` understands."""
    try:
        import datasets
    except ImportError:
        raise UserError("hub data sets need the package datasets", found=name, remedy=INSTALL) from None
    options = {} if config is None else {"name": config}
    try:
        rows = datasets.load_dataset(name, split=split, **options)
    except (OSError, ValueError, RuntimeError, KeyError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        shown = f"{name!r}, split {split!r}" if config is None else f"{name!r}, config {config!r}, split {split!r}"
        raise UserError(
            "the data are neither a file here nor a data set that can be fetched",
            found=f"{shown}: {reason}",
            remedy="check name, config, split and network, or name a file ending in " + ", ".join(sorted(_READERS)),
        ) from error
    for column, feature in (rows.features or {}).items():
        if (encoded := _undecoded(feature, datasets)) != feature:
            rows = rows.cast_column(column, encoded)
    yield from ((number, dict(values)) for number, values in enumerate(rows, start=1))


def _undecoded(feature: Any, datasets: Any) -> Any:
    """Returns the type of a column whose pictures stay encoded."""
    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if hasattr(feature, "feature"):  # a list's
        return replace(feature, feature=_undecoded(feature.feature, datasets))
    if isinstance(feature, dict):
        return {name: _undecoded(inner, datasets) for name, inner in feature.items()}
    return feature


_READERS: dict[str, Callable[[Path], Values]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": partial(_csv, delimiter="\t"),
    ".parquet": _parquet,
}
