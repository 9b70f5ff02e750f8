"""Training curves against the recorded ones: equal floats on the recorded kind of machine, close ones elsewhere."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ELSEWHERE = 1e-4
"""Absolute and relative difference allowed where torch or the processor is another one: ten times the largest that was
seen between AVX2 and SSE4 kernels (1.0e-5, in a gradient's norm; between an Intel processor with AVX-512 and an AMD one
without, of the curves that were there then, 9.2e-6)."""


def _recorder() -> Any:
    name = "quartet_make_golden"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("make_golden.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


make_golden = _recorder()
RECORDED = json.loads(make_golden.PATH.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def one_thread_for_equal_sums() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_run_is_recorded() -> None:
    assert RECORDED["curves"].keys() == make_golden.RUNS.keys()
    assert all(len(curve) >= 4 for curve in RECORDED["curves"].values())


@pytest.mark.parametrize("name", list(make_golden.RUNS))
def test_the_curve_is_the_recorded_one(name: str) -> None:
    found, expected = make_golden.curve(name), RECORDED["curves"][name]
    assert [sorted(row) for row in found] == [sorted(row) for row in expected]
    here = make_golden.describe_processor()
    if here == RECORDED["processor"]:
        assert found == expected
        return
    warnings.warn(f"recorded on {RECORDED['processor']}, run on {here}: compared within {ELSEWHERE}", stacklevel=1)
    same_figures(name, found, expected)


def same_figures(name: str, found: Any, expected: Any) -> None:
    """Within ``ELSEWHERE``."""
    for step, (row, recorded) in enumerate(zip(found, expected, strict=True)):
        for key, value in recorded.items():
            assert math.isclose(row[key], value, rel_tol=ELSEWHERE, abs_tol=ELSEWHERE), (name, step, key)


def test_a_change_of_the_computation_shows_elsewhere_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding moves figures by about 1e-5 at most; a learning rate that is wrong by a hundredth is told from it."""
    former = make_golden.TRAIN
    optim = former.optim.model_copy(update={"lr": former.optim.lr * 1.01})
    monkeypatch.setattr(make_golden, "TRAIN", former.model_copy(update={"optim": optim}))
    for name in ("sft", "reward-model"):
        with pytest.raises(AssertionError):
            same_figures(name, make_golden.curve(name), RECORDED["curves"][name])
