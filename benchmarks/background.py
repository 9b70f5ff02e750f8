"""Checkpoints and rollouts written in the background, against the same run that waits for them.

    python benchmarks/background.py [--cases tiny/sft small/sft tiny/rl] [--steps 8] [--folder DIR]

A case is model/job. Every step saves a checkpoint (fp32 weights and both Adam moments), and in RL its rollouts. A run
waits at most for the checkpoint before it, so that a step takes the longer of computing and writing and not their sum,
as far as the two do not share cores. Runs of both kinds take turns; a step's seconds are those from row to row of
``metrics.jsonl``, the median of all runs; *held up* are those in which the run itself copies, waits or writes, which
others on the machine disturb less. ``--folder`` says which disk is written to.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import arguments, build_model, build_tokenizer, markdown, write_results

import quartet
from quartet.observe.files import read_rows
from quartet.observe.spans import BACKGROUND, read_spans, seconds_by_name

CASES = ("tiny/sft", "small/sft", "tiny/rl")
PROMPT, RESPONSE, ROWS = 64, 192, 8
SPANS = ("checkpoint_snapshot", "checkpoint_wait", "checkpoint", "write_rollouts")


def texts(vocab_size: int, num: int, length: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(f"w{draw.randrange(3, vocab_size)}" for _ in range(length)) for _ in range(num)]


def constant(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion) % 7) for completion in completions]


def run(case: str, path: Path, *, background: bool, steps: int, threads: int, smoke: bool) -> dict[str, Any]:
    """One run; seconds per step and, by name, those of the spans that have to do with writing."""
    name, job = case.split("/")
    model = build_model(name)
    vocab = int(model.config.vocab_size)
    prompt, response, rows = (4, 4, 2) if smoke else (PROMPT, RESPONSE, ROWS)
    train = quartet.TrainConfig(optim=quartet.OptimConfig(lr=1e-6))
    common: dict[str, Any] = {
        "output_dir": str(path),
        "threads": threads,
        "steps": steps,
        "checkpoint": quartet.CheckpointConfig(every_steps=1, background=background),
    }
    prompts = texts(vocab, rows, prompt, 0)
    objects: dict[str, Any] = {"model": model, "tokenizer": build_tokenizer(vocab)}
    trainer: Any
    if job == "sft":
        answers = texts(vocab, rows, response, 1)
        data = [{"prompt": p, "completion": f" {a}"} for p, a in zip(prompts, answers, strict=True)]
        recipe: Any = quartet.SFTRecipe(train=train, examples_per_step=rows, **common)
        trainer = quartet.SFTTrainer(recipe, rows=data, **objects)
    else:
        recipe = quartet.RLRecipe(
            actor=quartet.ActorConfig(train=train),
            algorithm=quartet.GRPO(kl=quartet.KLConfig(coef=0.0)),
            rollout={"sampling": {"max_new_tokens": response}},  # type: ignore[arg-type]
            prompts_per_step=rows,
            responses_per_prompt=4,
            **common,
        )
        trainer = quartet.RLTrainer(recipe, prompts=prompts, rewards=[constant], **objects)
    trainer.train()
    times = [row["time_s"] for row in read_rows(path / "metrics.jsonl") if row["step"] > 0]
    found = read_spans(path / "spans.jsonl")
    spans = seconds_by_name(found)
    saved = path / "checkpoints" / f"step_{steps:08d}"
    return {
        "seconds": [later - earlier for earlier, later in pairwise(times)],
        "spans": {name: spans[name] / steps for name in SPANS if name in spans},
        "held_up_s": sum(s.seconds for s in found if s.name in SPANS and s.mode != BACKGROUND) / steps,
        "bytes": sum(file.stat().st_size for file in saved.rglob("*") if file.is_file()),
    }


def measure(case: str, args: Any) -> dict[str, Any]:
    steps = 3 if args.smoke else args.steps
    sides: dict[str, list[dict[str, Any]]] = {"at once": [], "background": []}
    for _ in range(args.repeats):
        for side, runs in sides.items():
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                background = side == "background"
                path = Path(folder) / "run"
                runs.append(run(case, path, background=background, steps=steps, threads=args.threads, smoke=args.smoke))
    return {
        "case": case,
        "sides": {
            side: {
                "seconds": statistics.median(s for run in runs for s in run["seconds"]),
                "spans": {
                    name: statistics.median(run["spans"][name] for run in runs)
                    for name in set.intersection(*(set(run["spans"]) for run in runs))
                },
                "held_up_s": statistics.median(run["held_up_s"] for run in runs),
                "bytes": runs[0]["bytes"],
            }
            for side, runs in sides.items()
        },
    }


def table(parts: Sequence[dict[str, Any]]) -> str:
    rows = []
    for part in parts:
        at_once = part["sides"]["at once"]["seconds"]
        for side, found in part["sides"].items():
            spans = [f"{found['spans'][n]:.3f}" if n in found["spans"] else "" for n in SPANS]
            rows.append(
                [
                    part["case"],
                    side,
                    f"{found['bytes'] / 2**20:.0f}",
                    f"{found['seconds']:.3f}",
                    f"{1 / found['seconds']:.2f}",
                    f"{at_once / found['seconds']:.2f}",
                    f"{found['held_up_s']:.3f}",
                    *spans,
                ]
            )
    head = ["case", "written", "MiB", "s/step", "steps/s", "over at once", "s held up"]
    return markdown([*head, "s copying", "s waiting", "s checkpoint", "s rollouts"], rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="CASE")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="where runs are written; the system's temporary folder")
    args = parser.parse_args()
    parts = []
    for case in args.cases:
        parts.append(measure(case, args))
        write_results(args, {"background": parts})
    print(table(parts))


if __name__ == "__main__":
    main()
