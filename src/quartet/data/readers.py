"""Rows from JSON, JSON Lines, CSV, TSV and Parquet files and from hub data sets, each with its place for messages."""

from __future__ import annotations

import csv
import io
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quartet.config.addresses import is_url
from quartet.config.common import DataConfig, SourceConfig
from quartet.config.errors import UserError
from quartet.config.nearest import missing_file
from quartet.data.files import (
    INSTALL,
    MAX_ROW_BYTES,
    check_blank,
    format_of,
    located,
    numbered_lines,
    opened,
    too_long,
    whole_text,
)
from quartet.data.json_rows import check_orientation, document_rows, is_one_document, parse_line, shortened_row

Values = Iterator[tuple[int, dict[str, Any]]]
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}


@dataclass(frozen=True)
class Row:
    """One row of a data file; ``line`` counts from 1 (rows of Parquet and hub data have no line, but a
    number).
    """

    values: Mapping[str, Any]
    source: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.source}:{self.line}"


def shown_places(places: Sequence[str], most: int = 5) -> str:
    """``a.jsonl:3, 17, 20, …`` for the first ``most`` places; the file is named once."""
    shown: list[str] = []
    last = None
    for place in places[:most]:
        source, _, line = place.rpartition(":")
        shown.append(line if source and source == last else place)
        last = source
    return ", ".join([*shown, *(["…"] if len(places) > most else [])])


def iter_rows(config: DataConfig | SourceConfig) -> Iterator[Row]:
    """All rows (the first ``config.limit``) under the file's own column names; read in pieces, but for JSON documents.

    A path with a known ending, or one that exists, is a file; anything else is the name of a hub data set.

    Raises:
        UserError: no such file, nothing in it, or a malformed row (file, line and an excerpt are named).
    """
    name = config.path
    if name is None:
        raise ValueError("the data have no path of their own")
    path = located(name)
    reader = _READERS.get(format_of(path))
    if path.is_file() and reader is None:
        raise UserError(
            "the data file's format is not known", found=name, remedy=f"use one of {', '.join(sorted(_READERS))}"
        )
    is_meant_as_path = reader is not None or (name.startswith((".", "/", "~")) and not path.exists())
    if is_meant_as_path and not path.is_file():
        raise missing_file("there is no such data file", path)
    if reader is None:
        found = _hub(str(path) if is_url(name) else name, config.config, config.split)
    else:
        _check_file_options(config)
        found = reader(path)
    is_empty = True
    for line, values in itertools.islice(found, config.limit):
        is_empty = False
        yield Row(values, name, line)
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


def _json(path: Path) -> Values:
    """A document, or JSON lines; both are common under this ending."""
    text = whole_text(path)
    if is_one_document(path, text):
        return document_rows(path, text)
    return _json_lines(path)


def _json_lines(path: Path) -> Values:
    """One object per line; some write an array under this ending too."""
    is_first = True
    for line, text in numbered_lines(path):
        if not text.strip():
            continue
        if is_first and text.lstrip().startswith("["):
            yield from document_rows(path, whole_text(path))
            return
        row = parse_line(path, line, text)
        if is_first:
            check_orientation(path, row)
        is_first = False
        yield line, row


def _csv(path: Path, delimiter: str = ",") -> Values:
    """CSV with a header; a row that spans several lines has the number of its first."""
    header: list[str] | None = None
    line, blank, limit = 1, 0, csv.field_size_limit(MAX_ROW_BYTES)
    try:
        with opened(path) as file:
            reader = csv.reader(io.TextIOWrapper(file, "utf-8-sig", newline=""), delimiter=delimiter, strict=True)
            for cells in reader:
                first, line = line, reader.line_num + 1
                blank = 0 if cells else blank + 1
                if not cells:
                    check_blank(blank, path, first)
                    continue
                if header is not None:
                    yield first, _cells(path, first, header, cells)
                    continue
                header = [cell.strip() for cell in cells]
                _check_separator(path, first, header, delimiter)
                if not all(header) or len(set(header)) != len(header):
                    raise UserError(
                        "the header does not name every column once",
                        found=f"{path}:{first}: {header[:20]}",
                        remedy="give each column a name of its own in the first line",
                    )
    except UnicodeDecodeError:
        deque(numbered_lines(path), maxlen=0)  # for its error, which names the line
        raise
    except csv.Error as error:
        raise UserError(
            "the file is not valid CSV", found=f"{path}:{line}: {error}", remedy="mend or remove that row"
        ) from None
    finally:
        csv.field_size_limit(limit)


def _check_separator(path: Path, line: int, header: list[str], delimiter: str) -> None:
    """Refuses a header that another separator would cut, and its own does not."""
    other = next((mark for mark in _SEPARATORS if len(header) == 1 and mark in header[0]), None)
    if other is not None:
        raise UserError(
            f"the file's cells are separated by {_SEPARATORS[other]}",
            found=f"{path}:{line}: {shortened_row(header[0])}",
            remedy=f"write it with {_SEPARATORS[delimiter]}, or as JSON lines: "
            f"pd.read_csv({path.name!r}, sep={other!r}).to_json('rows.jsonl', orient='records', lines=True)",
        )


def _cells(path: Path, line: int, header: list[str], cells: list[str]) -> dict[str, str]:
    if len(cells) != len(header):
        raise UserError(
            "a row does not have one cell per column",
            found=f"{path}:{line}: {len(cells)} for {len(header)} columns: {shortened_row(str(cells[:20]))}",
            remedy="mend that row (text with commas or line breaks needs quotes)",
        )
    return dict(zip(header, cells, strict=True))


def _parquet(path: Path) -> Values:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError("Parquet files need pyarrow", found=str(path), remedy=INSTALL) from None
    try:
        # Else pyarrow has whole row groups in memory, or the whole file, and each of its threads keeps some of its own.
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 16) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024, use_threads=False):
                for values in batch.to_pylist():
                    number += 1
                    if any(isinstance(value, (str, bytes)) and len(value) > MAX_ROW_BYTES for value in values.values()):
                        raise too_long(path, number)
                    yield number, values
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(
            "the Parquet file cannot be read", found=f"{path}: {error}", remedy="write the file again"
        ) from error


def _hub(name: str, config: str | None, split: str) -> Values:
    """A data set from the hub, or a directory that ``datasets`` understands."""
    try:
        import datasets
    except ImportError:
        raise UserError("hub data sets need the package datasets", found=name, remedy=INSTALL) from None
    options = {} if config is None else {"name": config}
    try:
        folder = Path(name).expanduser()
        if any((folder / file).is_file() for file in ("state.json", "dataset_dict.json")):
            rows = _saved(datasets.load_from_disk(str(folder)), name, split)
        else:
            rows = datasets.load_dataset(name, split=split, **options)
    except (OSError, ValueError, RuntimeError, KeyError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        shown = f"{name!r}, split {split!r}" if config is None else f"{name!r}, config {config!r}, split {split!r}"
        raise UserError(
            "the data are neither a file here nor a data set that can be fetched",
            found=f"{shown}: {reason}",
            remedy="check name, config, split and network, or name a file ending in " + ", ".join(sorted(_READERS)),
        ) from error
    yield from ((number, dict(values)) for number, values in enumerate(rows, start=1))


def _saved(found: Any, name: str, split: str) -> Any:
    """The rows of what ``save_to_disk`` has written: of one split by its name, or of a data set without splits."""
    splits = found if isinstance(found, dict) else {"train": found}
    if split not in splits:
        raise UserError(
            "a data set of save_to_disk has no such split",
            found=f"{name}: {', '.join(splits)}; asked for {split}",
            remedy="name one of these as split; limit takes only the first rows of it",
        )
    return splits[split]


_READERS: dict[str, Callable[[Path], Values]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": partial(_csv, delimiter="\t"),
    ".parquet": _parquet,
}
