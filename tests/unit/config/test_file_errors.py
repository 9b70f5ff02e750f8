"""Why a file could not be written or read."""

from __future__ import annotations

from pathlib import Path

import pytest

from quartet.config import UserError
from quartet.config.errors import read_file
from quartet.observe.files import RowAppender
from quartet.train.checkpoint import begin_checkpoint
from quartet.trainers.run import write_json
from quartet.trainers.run_files import naming_write_errors


def test_a_row_that_the_disk_refuses(tmp_path: Path) -> None:
    rows = RowAppender(tmp_path / "metrics.jsonl")
    rows.close()
    rows._file = open("/dev/full", "ab")  # noqa: SIM115
    with pytest.raises(UserError, match=r"metrics\.jsonl could not be written") as caught:
        rows.append({"step": 1})
    assert "No space left" in caught.value.found and "--resume" in caught.value.remedy


def test_what_stands_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run\.json could not be written"):
        write_json(tmp_path / "file" / "run.json", {})
    with pytest.raises(UserError, match="could not be written"):
        begin_checkpoint(tmp_path / "file", 1)
    with pytest.raises(UserError, match="No space left"), naming_write_errors(tmp_path), open("/dev/full", "w") as full:
        full.write("x")


def test_reading(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(UserError, match="could not be read"):
            read_file(path)
