"""What a run's record says about its processor is told where it has changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quartet.config.recipe import SFTRecipe
from quartet.config.run import LogConfig
from quartet.observe import memory
from quartet.trainers.run import RunDirectory


def test_changes_name_what_changed() -> None:
    now = memory.record()
    assert memory.processor_changes(now, now) == []
    assert memory.processor_changes({}, now) == []
    before = {"processor": {**now["processor"], "capability": "AVX7", "threads": 9}}
    (text,) = memory.processor_changes(before, now)
    assert f"capability AVX7 → {now['processor']['capability']}" in text and "threads 9 → 1" in text
    assert "name" not in text


def test_a_runs_record_says_it_and_a_resumed_run_is_told(tmp_path: Path) -> None:
    recipe = SFTRecipe(log=LogConfig(tensorboard=False), steps=4)
    with RunDirectory(tmp_path / "run", recipe):
        pass
    path = tmp_path / "run" / "run.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["processor"] == memory.processor()
    told: list[str] = []
    with RunDirectory(tmp_path / "run", recipe, resume=True, tell=told.append):
        assert told == []
    record["processor"]["name"] = "another one"
    path.write_text(json.dumps(record), encoding="utf-8")
    with RunDirectory(tmp_path / "run", recipe, resume=True, tell=told.append):
        pass
    assert len(told) == 1 and "another one → " in told[0]
    assert told[0] in json.loads(path.read_text(encoding="utf-8"))["remarks"]


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
