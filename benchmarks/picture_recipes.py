"""The recipes of docs/pictures.md over seeds: greedy accuracy on held-out pictures after SFT and after GRPO, and the
number of pictures that went through the tower.

    python benchmarks/picture_recipes.py [--seeds 0 1 2] [--shuffled none all rl] [--threads 1]

Each row takes about three and a half minutes. ``--shuffled all`` gives each question another one's picture in all
files, ``rl`` in those of GRPO alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common import arguments, markdown, write_results

from quartet.observe.trackers import read_metrics

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def train(folder: Path, seed: int, shuffled: str, threads: int, settings: list[str]) -> dict[str, float]:
    """Runs the commands of the page in a folder."""

    def quartet(*words: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run(
            (sys.executable, "-m", "quartet", *words), cwd=folder, env=environment, check=True, stdout=sys.stderr
        )

    quartet("pictures", "pictures", "--seed", str(seed), *(["--shuffled"] if shuffled == "all" else []))
    quartet("sft", str(RECIPES / "sft-pictures.yaml"), *settings)
    if shuffled == "rl":
        shutil.rmtree(folder / "pictures")
        quartet("pictures", "pictures", "--seed", str(seed), "--shuffled")
    quartet("rl", str(RECIPES / "rl-pictures.yaml"), *settings)
    steps = list(read_metrics(folder / "runs" / "rl-pictures" / "metrics.jsonl"))
    scores = [step["eval/exact_match"] for step in steps if "eval/exact_match" in step]
    return {"sft": scores[0], "grpo": scores[-1], "computed": sum(step.get("pictures/computed", 0) for step in steps)}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--shuffled", choices=("none", "all", "rl"), nargs="+", default=["none"])
    parser.set_defaults(threads=1)
    args = parser.parse_args()
    settings = ["steps=2"] if args.smoke else []
    found = []
    for shuffled in args.shuffled:
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as folder:
                result = train(Path(folder), seed, shuffled, args.threads, [f"seed={seed}", *settings])
            found.append({"shuffled": shuffled, "seed": seed, **result})
    rows = [
        (row["shuffled"], str(row["seed"]), f"{row['sft']:.1%}", f"{row['grpo']:.1%}", f"{row['computed']:.0f}")
        for row in found
    ]
    sys.stdout.write(markdown(("shuffled", "seed", "after SFT", "after GRPO", "pictures computed"), rows) + "\n")
    write_results(args, {"rows": found})


if __name__ == "__main__":
    main()
