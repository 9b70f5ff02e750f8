"""What a step in one process holds at most, in multiples of the weights; measured from outside, by the benchmark."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_an_update_holds_no_copy_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, moments and gradients are 4; activations of 16 answers, logits and free memory between are 1.9 to 2.2.
    With the rollout engine's copies the peak is at 6.9 to 7.1. Pages of libraries are not counted: a torch that was
    built with CUDA maps more of them.
    """
    results = tmp_path / "results.json"
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("QUARTET_BENCH_ROOT", str(tmp_path))
    benchmark, sides = importlib.import_module("one_process_memory"), importlib.import_module("sides")
    # Here and not in a process of its own, which would import everything for it; what is measured has one.
    with torch.random.fork_rng(devices=[]):
        benchmark.save("smoke", str(sides.work_folder("models") / "smoke"))
    command = ["--smoke", "--threads", "1", "--steps", "2", "--foreground", "--json", str(results)]
    monkeypatch.setattr(sys, "argv", [benchmark.__file__, *command])
    benchmark.main()
    found = json.loads(results.read_text(encoding="utf-8"))
    stages = {stage["name"]: stage for stage in found["stages"]}  # of the last step, where names repeat
    weights = stages["backward"]["parts"]["parameters"]
    assert weights > 100 * 2**20
    parts = stages["backward"]["parts"]
    assert parts["gradients"] == weights
    assert 2 * weights <= parts["moments"] < 2.01 * weights
    assert parts["copies for decoding"] == 0 < stages["between steps"]["parts"]["copies for decoding"]
    above = found["peak_anonymous_bytes"] - stages["import"]["end_anonymous_bytes"]
    assert above < 6.6 * weights, f"{above / weights:.2f} times the weights, during {found['peak_during']}"
