"""Quartet on real data: a pretrained story model, human preference pairs, grade-school problems.

    QUARTET_REALDATA=DIR python benchmarks/realdata.py reward-model | story-ppo | story-grpo | story-rloo | gsm8k | all

DIR holds ``stories260K/`` (a TinyStories model as a Hugging Face directory), ``pandalm_human_pairs.jsonl``,
``gsm8k_train.jsonl`` and ``gsm8k_test.jsonl``. What is measured: docs/benchmarks.md. Every command
prints a Markdown table and appends it to ``--out``/figures.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from story_samples import Samples, measure, sample
from textstats import Interval, mean_interval, wilson

from quartet import RewardModelTrainer, load_recipe
from quartet.models.loading import packed_scalar_model
from quartet.train.engine import TrainEngine
from quartet.trainers.supervised import score_pairs

ROOT = Path(__file__).resolve().parents[1]
HELD_OUT_SHARE = 0.3
RESPONSES_PER_PROMPT = 8


def quartet(*arguments: str) -> None:
    """One ``quartet`` command; its output is shown, its failure is ours."""
    print("$ quartet", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "quartet.cli.main", *arguments], check=True)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def publish(
    out: Path, title: str, head: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> None:
    lines = [f"### {title}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    text = "\n".join([*lines, "", *notes]) + "\n"
    with open(out / "figures.md", "a", encoding="utf-8") as file:
        file.write(text + "\n")
    print(text)


# Reward model --------------------------------------------------------------------------------------------


def surplus(row: dict[str, Any]) -> int:
    """Characters by which the chosen answer is longer; a few answers in the file are numbers or null."""
    chosen, rejected = (len("" if row[side] is None else str(row[side])) for side in ("chosen", "rejected"))
    return chosen - rejected


def length_rule(rows: Sequence[dict[str, Any]]) -> tuple[str, Callable[[dict[str, Any]], bool]]:
    """Prefers the longer or the shorter answer, whichever is right more often on ``rows``; with its name.

    A tie counts as wrong, as it does for the reward model.
    """
    longer, shorter = sum(surplus(row) > 0 for row in rows), sum(surplus(row) < 0 for row in rows)
    sign = 1 if longer >= shorter else -1
    return "longer" if sign > 0 else "shorter", lambda row: sign * surplus(row) > 0


def line_of(place: str) -> int:
    """The line in ``file:line``."""
    return int(place.rpartition(":")[2])


def split_by_prompt(rows: Sequence[Any], fraction: float) -> tuple[list[Any], list[Any]]:
    """Training and held-out rows, both in the rows' order. Rows of one prompt go to the same side, or held-out figures
    would be measured on prompts seen in training."""
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(repr(row["prompt"]), []).append(index)
    order = list(groups)
    random.Random("held out 0").shuffle(order)
    wanted = max(1, round(fraction * len(rows)))
    held: set[int] = set()
    for name in order[:-1]:
        if len(held) >= wanted:
            break
        held.update(groups[name])
    train = [row for index, row in enumerate(rows) if index not in held]
    return train, [row for index, row in enumerate(rows) if index in held]


def reward_model(data: Path, out: Path, overrides: Sequence[str]) -> None:
    """Held-out accuracy on human pairs, beside a rule that only looks at lengths."""
    rows = read_jsonl(data / "pandalm_human_pairs.jsonl")
    train, held_out = split_by_prompt(rows, HELD_OUT_SHARE)
    recipe: Any = load_recipe(
        "reward-model",
        ROOT / "recipes" / "pandalm-reward-model.yaml",
        [
            f"model.path={data / 'stories260K'}",
            f"data.path={write_jsonl(out / 'pandalm' / 'train.jsonl', train)}",
            f"evaluation_data.path={write_jsonl(out / 'pandalm' / 'held_out.jsonl', held_out)}",
            "evaluation_data.overlong=skip",
            f"output_dir={out / 'pandalm' / 'run'}",
            *overrides,
        ],
    )
    trainer = RewardModelTrainer(recipe)
    result = trainer.train()
    assert trainer.worker.evaluation is not None, "the recipe names held-out pairs"
    engine = TrainEngine(packed_scalar_model(result.model), recipe.train, total_steps=1)
    accuracies = {}
    for name, pairs in (("training", trainer.worker.data), ("held-out", trainer.worker.evaluation)):
        chosen, rejected = score_pairs(engine, pairs)
        accuracies[name] = wilson(int((chosen > rejected).sum()), len(pairs))
    preferred, rule = length_rule(train)
    # Both are asked about the same pairs: those that fit into the model's context.
    scored = [held_out[line_of(item.place) - 1] for item in trainer.worker.evaluation.items]
    by_length = wilson(sum(rule(row) for row in scored), len(scored))
    publish(
        out,
        "Reward model on human pairs (PandaLM), body: stories260K",
        ["", "accuracy [95 % interval]"],
        [
            ["held-out pairs", accuracies["held-out"].percent()],
            [f"the {preferred} answer, held-out", by_length.percent()],
            ["training pairs", accuracies["training"].percent()],
        ],
        [
            f"{len(trainer.worker.data)} training and {len(trainer.worker.evaluation)} held-out pairs with no prompt "
            "in common, "
            f"{trainer.worker.steps} steps, {result.summary['stages'][0]['seconds']:.0f} s.",
            *(f"Data: {warning}." for warning in (*trainer.worker.data.warnings, *trainer.worker.evaluation.warnings)),
        ],
    )


# Stories -------------------------------------------------------------------------------------------------


def stories(data: Path, out: Path, algorithm: str, overrides: Sequence[str]) -> None:
    """The story model before and after reinforcement learning, on prompts whose heroes and openings it never met."""
    original, run = data / "stories260K", out / f"story-{algorithm}"
    prompts = read_jsonl(ROOT / "examples" / "story_prompts_held_out.jsonl")
    quartet(
        "rl",
        str(ROOT / "recipes" / f"story-{algorithm}.yaml"),
        f"actor.model.path={original}",
        f"output_dir={run}",
        *overrides,
    )
    before = sample(original, original, prompts, RESPONSES_PER_PROMPT)
    after = sample(run / "model", original, prompts, RESPONSES_PER_PROMPT)
    old, new = measure(before), measure(after)
    gain = paired_difference(before, after)
    seconds = json.loads((run / "summary.json").read_text(encoding="utf-8"))["stages"][0]["seconds"]
    publish(
        out,
        f"Stories by {algorithm.upper()}: before and after",
        ["held-out prompts", "before", "after"],
        [[name, old[name], new[name]] for name in old],
        [
            f"{len(prompts)} prompts x {RESPONSES_PER_PROMPT} stories, temperature 1, intervals over prompts. "
            f"Reward after - before, paired by prompt: {gain.number()}. Training: {seconds:.0f} s.",
            "",
            *(f"- {name}: {text}" for name, text in (("before", before.shown(0)), ("after", after.shown(0)))),
        ],
    )
    quartet("report", str(run))


def paired_difference(before: Samples, after: Samples) -> Interval:
    return mean_interval([b - a for a, b in zip(before.score_by_prompt(), after.score_by_prompt(), strict=True)])


# Grade-school problems -----------------------------------------------------------------------------------


def gsm8k(data: Path, out: Path, overrides: Sequence[str]) -> None:
    """A few steps of SFT and an evaluation on GSM8K with its own column names; long rows are left out and counted."""
    run = out / "gsm8k"
    quartet(
        "sft",
        str(ROOT / "recipes" / "gsm8k-sft.yaml"),
        f"model.path={data / 'stories260K'}",
        f"data.path={data / 'gsm8k_train.jsonl'}",
        f"output_dir={run / 'sft'}",
        "steps=8",
        "train.optim.lr=1e-3",
        *overrides,
    )
    quartet(
        "eval",
        str(ROOT / "recipes" / "gsm8k-eval.yaml"),
        f"model.path={run / 'sft' / 'model'}",
        f"data.path={data / 'gsm8k_test.jsonl'}",
        "data.limit=64",
        "sampling.max_new_tokens=64",
        f"output_dir={run / 'eval'}",
    )
    losses = [row["loss/sft"] for row in read_jsonl(run / "sft" / "metrics.jsonl")]
    summary = json.loads((run / "sft" / "summary.json").read_text(encoding="utf-8"))
    evaluation = json.loads((run / "eval" / "summary.json").read_text(encoding="utf-8"))["stages"][0]["metrics"]
    publish(
        out,
        "GSM8K through its own column names, body: stories260K",
        ["", ""],
        [
            ["training loss, first and last of 8 steps (nats/token)", f"{losses[0]:.3f}, {losses[-1]:.3f}"],
            ["exact match on 64 test problems", f"{evaluation['eval/final_number']:.3f}"],
        ],
        [f"Data: {warning}." for warning in summary["notes"]],
    )


COMMANDS: dict[str, Callable[[Path, Path, Sequence[str]], None]] = {
    "reward-model": reward_model,
    "story-ppo": lambda data, out, overrides: stories(data, out, "ppo", overrides),
    "story-grpo": lambda data, out, overrides: stories(data, out, "grpo", overrides),
    "story-rloo": lambda data, out, overrides: stories(data, out, "rloo", overrides),
    "gsm8k": gsm8k,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*COMMANDS, "all"])
    parser.add_argument("overrides", nargs="*", help="recipe overrides, e.g. steps=3")
    parser.add_argument("--out", type=Path, default=Path("runs/realdata"))
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of torch")
    options = parser.parse_args()
    if "QUARTET_REALDATA" not in os.environ:
        parser.error("set QUARTET_REALDATA to the folder of the data")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
        options.overrides.append(f"threads={options.threads}")
    out = options.out.resolve()
    os.chdir(ROOT)  # recipes name reward functions relative to it
    out.mkdir(parents=True, exist_ok=True)
    for name in COMMANDS if options.what == "all" else [options.what]:
        COMMANDS[name](Path(os.environ["QUARTET_REALDATA"]), out, options.overrides)


if __name__ == "__main__":
    main()
