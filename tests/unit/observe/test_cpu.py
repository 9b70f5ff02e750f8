"""What a run's record says about its processor is measured, and a change of it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quartet.config.recipe import SFTRecipe
from quartet.config.run import LogConfig
from quartet.observe import memory
from quartet.trainers.run import RunDirectory


@pytest.fixture(autouse=True)
def measured_anew() -> Iterator[None]:
    memory._measured.cache_clear()
    yield
    memory._measured.cache_clear()


def plant(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """``change(out)`` is what a product gives for its true result ``out``."""
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, weight: change(linear(x.double(), weight.double()).float()))


def few_rows_differ(num_rows: int) -> Any:
    return lambda out: out * (1 + 1e-6) if len(out) < num_rows else out


def test_the_processor_is_torchs() -> None:
    found = memory.processor()
    assert found["capability"] == torch.backends.cpu.get_cpu_capability()
    assert found["threads"] == torch.get_num_threads() == 1
    assert found["torch"] == torch.__version__
    assert found["name"]
    if found["capability"] == "AVX512":
        assert {"avx2", "avx512f"} <= set(found["units"])


@pytest.mark.parametrize("first", [1, 4, 16, 17, 33])
def test_the_rows_from_which_bits_stay_are_measured(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, few_rows_differ(first))
    found = memory.bit_equality()
    assert found["products_repeat"]
    assert found["rows_keep_bits_from"] == first
    assert any("exact is refused" in text for text in found["remarks"]) == (first > 16)
    assert any("the canary's" in text for text in found["remarks"]) == (first > 16)
    assert any(f"fewer than {first} rows" in text for text in found["remarks"]) == (first > 1)


def test_rows_that_never_keep_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, few_rows_differ(500))
    found = memory.bit_equality()
    assert found["rows_keep_bits_from"] is None
    assert any("exact is refused" in text for text in found["remarks"])


def test_a_remainder_of_rows_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As two threads may have it: bits change where the rows do not divide by 4."""
    plant(monkeypatch, lambda out: out * (1 + 1e-6) if len(out) % 4 else out)
    assert memory.bit_equality()["rows_keep_bits_from"] is None


def test_products_that_do_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []

    def another(out: Tensor) -> Tensor:
        times.append(1)
        return out * (1 + 1e-6 * len(times))

    plant(monkeypatch, another)
    found = memory.bit_equality()
    assert not found["products_repeat"]
    assert any("no two runs are equal to the bit" in text for text in found["remarks"])


def test_what_is_measured_holds_for_the_number_of_threads() -> None:
    assert not any("needs threads: 1" in text for text in memory.bit_equality()["remarks"])
    torch.set_num_threads(2)
    assert any("needs threads: 1" in text for text in memory.bit_equality()["remarks"])


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
    assert record["bit_equality"] == memory.bit_equality()
    told: list[str] = []
    with RunDirectory(tmp_path / "run", recipe, resume=True, tell=told.append):
        assert told == []
    record["processor"]["name"] = "another one"
    path.write_text(json.dumps(record), encoding="utf-8")
    with RunDirectory(tmp_path / "run", recipe, resume=True, tell=told.append):
        pass
    assert len(told) == 1 and "another one → " in told[0]
    assert told[0] in json.loads(path.read_text(encoding="utf-8"))["remarks"]
