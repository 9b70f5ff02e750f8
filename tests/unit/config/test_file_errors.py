"""Why a file could not be written or read: each cause has its own remedy."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from quartet.config import UserError
from quartet.config.errors import read_error, read_file, write_error
from quartet.observe.jsonl import RowAppender
from quartet.train.checkpoint import begin_checkpoint
from quartet.trainers.run import write_json
from quartet.trainers.run_files import writing

REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "quota",
    errno.EROFS: "read-only",
    errno.EACCES: "permission to write",
    errno.EPERM: "lsattr",
    errno.ENOENT: "missing",
    errno.EIO: "dmesg, copy",
}


def failure(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", REMEDIES)
def test_each_cause_has_its_own_remedy(number: int, tmp_path: Path) -> None:
    path = tmp_path / "run" / "model"
    error = write_error(path, failure(number))
    assert error.problem == f"{path} could not be written" and os.strerror(number) in error.found
    assert REMEDIES[number] in error.remedy
    assert [n for n, text in REMEDIES.items() if text in error.remedy] == [number]
    assert ("MiB free" in error.found) == (number == errno.ENOSPC)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (
            SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
            "free some space",
        ),
        (SafetensorError("I/O error: Read-only file system (os error 30)"), "read-only"),
        (RuntimeError("PytorchStreamWriter failed writing file data/0"), "see that there is space"),
    ],
)
def test_what_libraries_make_of_it(error: Exception, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        raise write_error(tmp_path, error)
    assert remedy in caught.value.remedy


def test_causes_that_every_machine_has(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "directory" / "run.json").mkdir(parents=True)
    for path, cause in {
        tmp_path / "missing" / "run.json": "missing",
        tmp_path / "file" / "run.json": "something else stands there",
        tmp_path / "directory" / "run.json": "something else stands there",
    }.items():
        with pytest.raises(UserError) as caught:
            write_json(path, {})
        assert cause in caught.value.remedy, caught.value
    with pytest.raises(UserError) as caught:
        begin_checkpoint(tmp_path / "file", 1)
    assert "something else stands there" in caught.value.remedy
    with pytest.raises(UserError) as caught, writing(tmp_path), open("/dev/full", "w") as full:
        full.write("x")
    assert "free some space" in caught.value.remedy


@pytest.mark.skipif(os.getuid() == 0, reason="the administrator may write everywhere")
def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError) as caught:
        write_json(tmp_path / "run.json", {})
    assert "permission to write" in caught.value.remedy


def test_a_row_that_the_disk_refuses(tmp_path: Path) -> None:
    rows = RowAppender(tmp_path / "metrics.jsonl")
    rows.close()
    rows._file = open("/dev/full", "ab")  # noqa: SIM115
    with pytest.raises(UserError, match=r"metrics\.jsonl could not be written") as caught:
        rows.append({"step": 1})
    assert "free some space" in caught.value.remedy


def test_reading(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, remedy in {
        tmp_path / "missing": "put it back from a copy",
        tmp_path: "a directory stands where a file must be",
        tmp_path / "pipe": "restore it from a copy",
    }.items():
        with pytest.raises(UserError, match="could not be read") as caught:
            read_file(path)
        assert remedy in caught.value.remedy
    assert "chmod" in read_error(tmp_path, failure(errno.EACCES)).remedy
