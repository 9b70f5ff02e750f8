"""The GPU benchmark runs from end to end where there is no GPU, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "run.py"


def test_smoke_run_on_the_cpu_writes_every_part(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--smoke", "--device", "cpu", "--processes", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert found["smoke"]
    sharded, training, rollout, step = (found["parts"][part] for part in ("sharded", "training", "rollout", "step"))
    assert [tuple(row[size] for size in ("shard", "context", "tensor")) for row in sharded[::2]] == [
        (2, 1, 1), (1, 1, 2), (1, 2, 1),
    ]  # fmt: skip
    assert [(row["processes"], row["useful_tokens"]) for row in sharded] == [(2, 512)] * 6
    assert all(row["seconds"] > 0 and row["sent_bytes"] > 0 and row["mfu"] is None for row in sharded)
    assert [(row["layout"], row["fused"]) for row in training] == [
        ("sequences of 1024", False),
        ("prompt 512, 8 x 448", False),
        ("sequences of 1024", True),
        ("prompt 512, 8 x 448", True),
    ]
    assert all(row["seconds"] > 0 and row["useful_tokens"] == 256 for row in training)
    assert rollout[0]["engine"] and all(row["times_generate"] > 0 for row in rollout[0]["engine"])
    assert all(row["logprob_diff_max"] < 0.1 for row in step[0]["ours"])
    report = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "the figures mean nothing" in report
    assert all(
        heading in report
        for heading in ("## Training on several GPUs", "## Training\n", "## Rollout", "## Whole GRPO steps")
    )


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path)]
    environment = {"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr
