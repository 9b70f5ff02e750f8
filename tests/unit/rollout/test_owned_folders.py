"""Folders of processes that were killed are removed by the next one, those of living ones never."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quartet.config.common import ModelConfig
from quartet.rollout import owned_folders
from quartet.rollout.owned_folders import OwnedFolder, remove_left
from quartet.trainers.engines import model_folder

CHILD = """
import sys
from pathlib import Path
from quartet.rollout.owned_folders import OwnedFolder
folder = OwnedFolder(Path(sys.argv[1]), sys.argv[2])
(folder.path / "model.safetensors").write_bytes(bytes(99))
print(folder.path, flush=True)
sys.stdin.read()
"""


@contextmanager
def owner(parent: Path, kind: str = "quartet-policy-") -> Iterator[tuple[Any, Path]]:
    """Another process with a folder."""
    command = [sys.executable, "-c", CHILD, str(parent), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield child, Path(child.stdout.readline().strip())
        finally:
            child.kill()


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "model").mkdir()
    other = tmp_path / "quartet-policy-without-an-owner"
    other.mkdir()
    with owner(tmp_path) as (killed, left), owner(tmp_path) as (_, held), owner(tmp_path, "weights_") as (_, weights):
        killed.kill()
        killed.wait()
        assert left.exists() and held.exists()
        with model_folder(ModelConfig(path=str(tmp_path / "model")), None, None) as path:  # type: ignore[arg-type]
            assert path == str(tmp_path / "model")
        assert not left.exists()
        assert held.exists() and weights.exists() and other.exists()
    left_ones = [held, weights]
    own = OwnedFolder(tmp_path, "weights_")
    assert [folder.exists() for folder in left_ones] == [True, False], "of its own kind alone"
    remove_left(tmp_path, "weights_")
    assert own.path.exists()
    own.remove()
    own.remove()
    assert not own.path.exists()


def test_those_of_other_machines_and_links_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(owned_folders, "_machine", lambda: b"elsewhere")
        with owner(tmp_path, "weights_") as (_, here):
            away = OwnedFolder(tmp_path, "weights_")
    aside = tmp_path / "aside"
    here.rename(aside)
    (tmp_path / "weights_link").symlink_to(aside)
    assert away._lock is not None
    owned_folders.os.close(away._lock)  # its process is gone
    remove_left(tmp_path, "weights_")
    assert away.path.exists() and aside.exists()
    monkeypatch.setattr(owned_folders, "_machine", lambda: b"elsewhere")
    remove_left(tmp_path, "weights_")
    assert not away.path.exists()
