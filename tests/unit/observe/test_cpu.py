"""What a run's record says of the machine, and what memory is held."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quartet.config.recipe import SFTRecipe
from quartet.config.run import LogConfig
from quartet.observe import memory
from quartet.trainers.run import RunDirectory


def test_a_runs_record_says_what_computed_it(tmp_path: Path) -> None:
    recipe = SFTRecipe(log=LogConfig(tensorboard=False), steps=4)
    with RunDirectory(tmp_path / "run", recipe):
        pass
    record = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert record["processor"] == memory.describe_processor()


def test_what_is_taken_is_held() -> None:
    before = memory.held_bytes(torch.device("cpu"))
    taken = torch.ones(16 * 2**20)
    assert memory.held_bytes(torch.device("cpu")) - before >= 0.9 * taken.nbytes


def test_a_copy_may_take_a_quarter_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 400)
    assert memory.copy_fits(100) and not memory.copy_fits(101)

    def unknown() -> int:
        raise OSError("no such file")

    monkeypatch.setattr(memory, "available_bytes", unknown)
    assert memory.copy_fits(10**15)
