"""The quickstart over seeds: exact match before and after, reward-model accuracy, seconds.

    python benchmarks/quickstart.py --seeds 10 11 12 13 14 --out runs/quickstart-seeds [--control] [--threads 2]

Prints one Markdown row per seed as it ends and appends it to ``<out>/table.md``. A seed whose directory is there
already is resumed, or only reported when it is finished. ``--control`` shuffles the scores within each batch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from quartet.extras.quickstart.run import Quickstart
from quartet.observe.progress import Progress
from quartet.observe.trackers import read_metrics

HEAD = (
    "| seed | SFT greedy / 0.5 / 1.0 | PPO greedy / 0.5 / 1.0 | gain | good / same / bad | reward model | KL | "
    "gradient norm | seconds |\n|---|---|---|---|---|---|---|---|---|\n"
)


def row(path: Path, summary: Mapping[str, Any]) -> str:
    match, gsb = summary["exact_match"], summary["good_same_bad"]
    stages = {stage["name"]: stage["metrics"] for stage in summary["stages"]}
    steps = [step for step in read_metrics(path / "rl" / "metrics.jsonl") if "policy/grad_norm" in step]
    late = steps[len(steps) // 2 :]
    norm = sum(step["policy/grad_norm"] for step in late) / len(late)
    kl = sum(step["kl/ref"] for step in late) / len(late)

    def percent(values: Mapping[str, float]) -> str:
        return " / ".join(f"{100 * value:.1f}" for value in values.values())

    cells = [
        str(summary["seed"]),
        percent(match["sft"]),
        percent(match["ppo"]),
        f"{100 * match['gain']:+.1f}",
        f"{gsb['good']} / {gsb['same']} / {gsb['bad']}",
        f"{100 * stages['reward_model']['eval/accuracy']:.1f}",
        f"{kl:.3f}",
        f"{norm:.2f}",
        f"{summary['seconds']:.0f}",
    ]
    return "| " + " | ".join(cells) + " |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    table = arguments.out / "table.md"
    sys.stdout.write(HEAD)
    for seed in arguments.seeds:
        path = arguments.out / f"seed{seed}{'-control' if arguments.control else ''}"
        with Progress(interval_s=60.0) as progress:
            quickstart = Quickstart(seed, path, resume=True, progress=progress, shuffle_scores=arguments.control)
            line = row(path, quickstart.run().summary)
        sys.stdout.write(line)
        sys.stdout.flush()
        with open(table, "a", encoding="utf-8") as file:
            file.write(line)


if __name__ == "__main__":
    main()
