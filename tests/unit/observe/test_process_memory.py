"""What the system says about memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quartet.observe import memory
from quartet.observe.memory import available_bytes, copy_fits, held_bytes


def test_what_is_available_is_between_nothing_and_the_whole_memory() -> None:
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    assert 0 < available_bytes() < 1024 * int(total.split()[1])


def test_what_is_taken_is_held() -> None:
    before = held_bytes(torch.device("cpu"))
    taken = torch.ones(16 * 2**20)
    assert held_bytes(torch.device("cpu")) - before >= 0.9 * taken.nbytes


def test_a_copy_may_take_a_quarter_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 400)
    assert copy_fits(100) and not copy_fits(101)

    def unknown() -> int:
        raise OSError("no such file")

    monkeypatch.setattr(memory, "available_bytes", unknown)
    assert copy_fits(10**15)
