"""Recipes of `quartet init` run when their paths are filled in: one stage after the other, at one step each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STAGES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("sft", (), ("model.path=model", "examples_per_step=4", "steps=1")),
    ("reward-model", (), ("pairs_per_step=4", "steps=1")),
    ("preference", ("--method", "simpo"), ("pairs_per_step=4", "steps=1")),
    ("rl", (), ("prompts_per_step=4", "steps=1", "rollout.sampling.max_new_tokens=6")),
    ("eval", ("--reward", "model"), ("sampling.max_new_tokens=6",)),
)
"""Job, what `init` is asked, and what is changed: only the first model is filled in, and sizes."""


def test_the_recipes_run_one_after_the_other(
    world: Any, quartet: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("demonstrations.jsonl", "pairs.jsonl", "prompts.jsonl", "held_out.jsonl"):
        shutil.copy(world.path / name, tmp_path)
    shutil.copytree(world.path / "model", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    for job, asked, changes in STAGES:
        (tmp_path / f"{job}.yaml").write_text(quartet("init", job, *asked).out, encoding="utf-8")
        outcome = quartet(job, f"{job}.yaml", "threads=1", *changes)
        assert outcome.status == 0, (job, outcome.err)
    assert (tmp_path / "runs/rl/model/config.json").is_file() and (tmp_path / "runs/eval/answers.jsonl").is_file()


@pytest.mark.parametrize(
    ("job", "change", "made_by"),
    [
        ("sft", "model.path=runs/sft/model", "sft"),
        ("rl", "actor.model.path=runs/sft/model", "sft"),
        ("rl", "rewards.0.path=runs/reward-model/model", "reward-model"),
        ("rl", "critic.path=runs/rl-ppo/critic", "rl"),
    ],
)
def test_a_missing_stage_is_named_with_its_command(
    world: Any, quartet: Callable[..., Any], tmp_path: Path, job: str, change: str, made_by: str
) -> None:
    asked = ("--reward", "model") if job != "sft" else ()
    (tmp_path / "recipe.yaml").write_text(quartet("init", job, *asked).out, encoding="utf-8")
    here = {"sft": ["model.path=model"], "rl": ["actor.model.path=model", "rewards.0.path=reward_model"]}
    there = here.get(job, ["model.path=model", "rewards.0.path=reward_model"])
    outcome = quartet(job, tmp_path / "recipe.yaml", *there, f"output_dir={tmp_path / 'run'}", change)
    assert outcome.status == 2 and f"quartet {made_by} " in outcome.err.partition("do: ")[2], outcome.err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_generate_and_report_name_the_stage_too(world: Any, quartet: Callable[..., Any]) -> None:
    outcome = quartet("generate", "--model", "runs/sft/model", "--prompt", "1+1=")
    assert outcome.status == 2 and "make it first with quartet sft " in outcome.err
    outcome = quartet("report", "runs/rl-ppo-7")
    assert outcome.status == 2 and "make it first with quartet rl " in outcome.err
