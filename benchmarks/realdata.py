"""Quartet on real data: a pretrained story model, human preference pairs, grade-school problems.

    QUARTET_REALDATA=DIR python benchmarks/realdata.py reward-model | story-ppo | story-grpo | story-rloo | gsm8k | all

DIR holds ``stories260K/`` (a TinyStories model as a Hugging Face directory), ``pandalm_human_pairs.jsonl``,
``gsm8k_train.jsonl`` and ``gsm8k_test.jsonl``. Run from the repository's root. What is measured: docs/realdata.md. Every
command prints a Markdown table and appends it to ``--out``/figures.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from story_samples import Samples, measure, sample
from textstats import Interval, mean_interval, wilson

from quartet import RewardModelTrainer, load_recipe
from quartet.data.order import split_held_out
from quartet.trainers.reward_model import score_pairs

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


def publish(out: Path, title: str, head: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    lines = [f"### {title}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    text = "\n".join([*lines, "", *notes]) + "\n"
    with open(out / "figures.md", "a", encoding="utf-8") as file:
        file.write(text + "\n")
    print(text)


# Reward model --------------------------------------------------------------------------------------------


def length_rule(rows: Sequence[dict[str, Any]]) -> Callable[[dict[str, Any]], bool]:
    """Prefers the longer or the shorter answer (by characters), whichever is right more often on ``rows``.

    A tie counts as wrong, as it does for the reward model.
    """
    longer = sum(len(row["chosen"]) > len(row["rejected"]) for row in rows)
    shorter = sum(len(row["chosen"]) < len(row["rejected"]) for row in rows)
    sign = 1 if longer >= shorter else -1
    return lambda row: sign * (len(row["chosen"]) - len(row["rejected"])) > 0


def reward_model(data: Path, out: Path, overrides: Sequence[str]) -> None:
    """Held-out accuracy on human pairs, beside a rule that only looks at lengths."""
    rows = read_jsonl(data / "pandalm_human_pairs.jsonl")
    train, held_out = split_held_out(rows, HELD_OUT_SHARE, seed=0, key=lambda row: row["prompt"])
    recipe = load_recipe(
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
    trainer = RewardModelTrainer(recipe)  # type: ignore[arg-type]
    result = trainer.train()
    assert trainer.evaluation is not None, "the recipe names held-out pairs"
    accuracies = {}
    for name, pairs in (("training", trainer.data), ("held-out", trainer.evaluation)):
        chosen, rejected = score_pairs(trainer.engine, pairs)
        accuracies[name] = wilson(int((chosen > rejected).sum()), len(pairs))
    kept = {(item.prompt_ids, item.chosen_ids, item.rejected_ids) for item in trainer.evaluation.items}
    rule = length_rule(train)
    scored = [row for row in held_out if trainer.codec_ids(row) in kept] if hasattr(trainer, "codec_ids") else held_out
    by_length = wilson(sum(rule(row) for row in scored), len(scored))
    publish(
        out,
        "Reward model on human pairs (PandaLM), body: stories260K",
        ["", "accuracy [95 % interval]"],
        [
            ["held-out pairs", accuracies["held-out"].percent()],
            ["length alone, held-out", by_length.percent()],
            ["training pairs", accuracies["training"].percent()],
        ],
        [
            f"{len(trainer.data)} training and {len(trainer.evaluation)} held-out pairs with no prompt in common, "
            f"{trainer.steps} steps, {result.summary['stages'][0]['seconds']:.0f} s.",
            *(f"Data: {remark}." for remark in (*trainer.data.remarks, *trainer.evaluation.remarks)),
        ],
    )
