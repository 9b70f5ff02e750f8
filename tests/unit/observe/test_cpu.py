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


@pytest.mark.parametrize("first", [1, 16, 17])
def test_the_rows_from_which_bits_stay_are_measured(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, few_rows_differ(first))
    found = memory.bit_equality()
    assert found["products_repeat"]
    assert found["rows_keep_bits_from"] == first
    assert any("exact is refused" in text for text in found["remarks"]) == (first > 16)
    assert any("the canary's" in text for text in found["remarks"]) == (first > 16)
    assert any(f"fewer than {first} rows" in text for text in found["remarks"]) == (first > 1)


def test_products_that_do_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []

    def another(out: Tensor) -> Tensor:
        times.append(1)
        return out * (1 + 1e-6 * len(times))

    plant(monkeypatch, another)
    found = memory.bit_equality()
    assert not found["products_repeat"]
    assert any("no two runs are equal to the bit" in text for text in found["remarks"])


def test_a_runs_record_says_it(tmp_path: Path) -> None:
    recipe = SFTRecipe(log=LogConfig(tensorboard=False), steps=4)
    with RunDirectory(tmp_path / "run", recipe):
        pass
    record = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert record["processor"] == memory.processor()
    assert record["bit_equality"] == memory.bit_equality()


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
