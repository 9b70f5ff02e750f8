"""Compressed files, documents and broken rows: read, or refused by file and line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quartet.config.common import DataConfig
from quartet.config.errors import UserError
from quartet.data.readers import iter_rows

ROWS = [{"prompt": "a", "n": 1}, {"prompt": "ü", "n": None}]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()


def write(path: Path, data: bytes) -> DataConfig:
    path.write_bytes(data)
    return DataConfig(path=str(path))


def refused(config: DataConfig) -> UserError:
    """The error of a file that is refused."""
    with pytest.raises(UserError) as caught:
        list(iter_rows(config))
    return caught.value


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize(
    ("name", "data", "lines"),
    [
        ("r.jsonl", LINES, [1, 2]),
        ("r.ndjson", b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n"), [1, 2]),
        ("r.json", json.dumps(ROWS).encode(), [1, 2]),
        ("r.json", json.dumps({"version": {"data": 1}, "data": ROWS, "x": []}, indent=1).encode(), [1, 2]),
        ("r.json", LINES, [1, 2]),
        ("r.csv", "prompt,n\na,1\nü,".encode(), [2, 3]),
    ],
)
def test_files_as_published(tmp_path: Path, ending: str, name: str, data: bytes, lines: list[int]) -> None:
    config = write(tmp_path / f"{name}{ending}", gzip.compress(data) if ending else data)
    rows = list(iter_rows(config))
    assert [row.line for row in rows] == lines
    expected = ROWS if "csv" not in name else [{"prompt": "a", "n": "1"}, {"prompt": "ü", "n": ""}]
    assert [dict(row.values) for row in rows] == expected


@pytest.mark.parametrize("damage", [lambda b: b[:-6], lambda b: b"no" + b, lambda b: b[:12] + b"\xff" * 9 + b[21:]])
def test_damaged_compressed_files(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    data = gzip.compress(b"".join(b'{"prompt": "%d"}\n' % n for n in range(99)))
    error = refused(write(tmp_path / "r.jsonl.gz", damage(data)))
    assert "cannot be read" in error.problem and "r.jsonl.gz" in error.found


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write(tmp_path / "r.jsonl", LINES)

    def forbid(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", forbid)
    with pytest.raises(UserError, match="Permission denied"):
        list(iter_rows(config))


@pytest.mark.parametrize(
    ("row", "found"),
    [
        (b'{"a": "nul \x00 byte"}', "Invalid control character"),
        (b'{"a": "unended', "Unterminated string"),
    ],
)
@pytest.mark.parametrize("name", ["r.jsonl", "r.json"])
def test_rows_that_are_no_json(tmp_path: Path, name: str, row: bytes, found: str) -> None:
    data = b'{"a": 1}\n' + row + b"\n" if name == "r.jsonl" else b'[{"a": 1},\n' + row + b"]"
    error = refused(write(tmp_path / name, data))
    assert f"{name}:2: " in error.found and found in error.found and len(error.found) < 300


@pytest.mark.parametrize("mark", ["utf-16", "utf-32", "latin-1"])
def test_other_encodings(tmp_path: Path, mark: str) -> None:
    assert "UTF-8" in refused(write(tmp_path / "r.jsonl", LINES.decode().replace("a", "ä").encode(mark))).problem


def test_files_have_no_splits(tmp_path: Path) -> None:
    path = str(tmp_path / "r.jsonl")
    write(tmp_path / "r.jsonl", LINES)
    for option in ({"split": "test"}, {"split": "train[:1]"}, {"config": "main"}):
        assert "a file has no" in refused(DataConfig(path=path, **option)).problem  # type: ignore[arg-type]
