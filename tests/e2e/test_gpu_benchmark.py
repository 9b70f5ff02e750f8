"""The GPU benchmarks run from end to end where there is no GPU, on tiny models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


def test_the_quarter_hour_writes_every_part(tmp_path: Path) -> None:
    environment = {**os.environ, "SMOKE": "1", "PYTHON": sys.executable}
    command = ["bash", str(FOLDER / "quarter_hour.sh"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=environment)
    assert done.returncode == 0 and "failed" not in done.stdout, done.stdout + done.stderr
    assert "passed" in (tmp_path / "tests.txt").read_text() and "exit status 0" in (tmp_path / "tests.txt").read_text()
    found = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert found["smoke"]
    training, rollout, step, kernels = (found["parts"][part] for part in ("training", "rollout", "step", "kernels"))
    assert [(row["layout"], row["fused"]) for row in training] == [
        ("sequences of 1024", False),
        ("prompt 512, 8 x 448", False),
        ("sequences of 1024", True),
        ("prompt 512, 8 x 448", True),
    ]
    assert all(row["seconds"] > 0 and row["useful_tokens"] == 256 for row in training)
    assert rollout[0]["engine"] and all(row["times_generate"] > 0 for row in rollout[0]["engine"])
    assert [row["method"].split(":")[0] for row in step] in (["grpo", "ppo", "TRL"], ["grpo", "ppo", "TRL grpo"])
    assert all(row["logprob_diff_max"] < 0.1 and 0 < row["generate_s"] < row["seconds"] for row in step[:2])
    assert step[1]["update_critic_s"] > 0
    assert kernels[0]["work"] == "decode step" and all(row["seconds"] > 0 for row in kernels)
    report = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "the figures mean nothing" in report
    assert all(
        heading in report for heading in ("## Training\n", "## Rollout", "## Whole RL steps", "## Where the time goes")
    )
