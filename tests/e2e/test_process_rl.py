"""From step-labelled rows to a process reward model to a policy that has learned from nothing else."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quartet.extras.process_rewards.data import split_steps
from quartet.observe.rollouts import list_rollout_steps, read_rollout_step
from quartet.observe.trackers import read_metrics

RIGHT = "789"
"""A step is right where it ends in one of these."""


def labelled_rows(seed: int, num: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    rows = []
    for _ in range(num):
        steps = [
            "".join(draw.choice("123456789+=") for _ in range(draw.randint(1, 5))) for _ in range(draw.randint(1, 3))
        ]
        steps = [step + draw.choice("123456777888999") for step in steps]
        labels = [step[-1] in RIGHT for step in steps]
        # Prompts as in training: 47+85=
        rows.append({"prompt": f"{draw.randint(11, 99)}+{draw.randint(1, 99)}=", "steps": steps, "labels": labels})
    return rows


def share_right(texts: Sequence[str]) -> float:
    """By the rule itself, of which the policy sees only what the model made of it."""
    steps = [step.text for text in texts for step in split_steps(text, ";")]
    return sum(step[-1:] in tuple(RIGHT) for step in steps) / len(steps)


@pytest.fixture(scope="module")
def trained(world_of_session: Any, processes: Any) -> Path:
    """The world with ``runs/prm``, made by the command line."""
    path = world_of_session.path
    for name, seed, num in (("steps.jsonl", 0, 400), ("steps_held_out.jsonl", 1, 60)):
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in labelled_rows(seed, num)), encoding="utf-8")
    recipe = {
        "threads": 1,
        "output_dir": "runs/prm",
        "model": {"path": "model"},
        "data": {"path": "steps.jsonl"},
        "evaluation_data": {"path": "steps_held_out.jsonl"},
        "separator": ";",
        "evaluate_every_steps": 60,
        "train": {"optim": {"lr": 5e-3, "warmup_steps": 5, "schedule": "cosine"}},
        "steps": 60,
        "answers_per_step": 32,
    }
    world_of_session.recipe("prm", recipe)
    log = path / "prm.log"
    assert processes.run("process-reward", "prm.yaml", cwd=path, output=log) == 0, log.read_text()
    return path


def rl_recipe(algorithm: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "threads": 1,
        "actor": {"model": {"path": "model"}, "train": {"optim": {"lr": 1e-2}}},
        "critic": {"train": {"optim": {"lr": 1e-2}}},
        "algorithm": algorithm,
        "data": {"path": "prompts.jsonl"},
        "rewards": [{"type": "process_model", "path": "runs/prm/model", "combine": {"name": "min"}}],
        "rollout": {"sampling": {"max_new_tokens": 7}},
        "steps": 25,
        "prompts_per_step": 12,
        "responses_per_prompt": 4,
        "log": {"tensorboard": False},
        **changes,
    }


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "ppo", "kl": {"coef": 0.0}},
        {"name": "grpo"},
    ],
    ids=lambda algorithm: algorithm["name"],
)
def test_a_process_reward_alone_raises_the_score(
    trained: Path, world: Any, quartet: Callable[..., Any], algorithm: dict[str, Any]
) -> None:
    name = f"process-{algorithm['name']}"
    world.recipe(name, rl_recipe(algorithm, output_dir=f"runs/{name}"))
    outcome = quartet("rl", f"{name}.yaml")
    assert outcome.status == 0, outcome.err
    rows = read_metrics(trained / "runs" / name / "metrics.jsonl")
    scores = [row["reward/score_mean"] for row in rows if "reward/score_mean" in row]
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.3, scores
    rollouts = trained / "runs" / name / "rollouts"
    steps = list_rollout_steps(rollouts)
    first, last = ([r.response_text for r in read_rollout_step(rollouts, step)] for step in (steps[0], steps[-1]))
    assert share_right(last) > share_right(first) + 0.3, "by the rule, not only by its model"
    record = read_rollout_step(rollouts, steps[0])[0]
    scored = [t for t, value in enumerate(record.columns["step_score/process_reward"]) if value == value]
    assert len(scored) == len(split_steps(record.response_text, ";")) and scored[-1] <= len(record.response_ids) - 1


def test_a_killed_run_with_a_process_reward_ends_the_same(
    trained: Path, world: Any, processes: Any, same_run: Callable[[Path, Path], None]
) -> None:
    log = trained / "process-killed.log"
    world.recipe("process-short", rl_recipe({"name": "ppo"}, steps=5, minibatches=2, checkpoint={"every_steps": 2}))
    runs = {name: ["rl", "process-short.yaml", f"output_dir=runs/{name}"] for name in ("p-whole", "p-killed")}
    assert processes.run(*runs["p-whole"], cwd=trained, output=log) == 0, log.read_text()
    assert processes.run(*runs["p-killed"], cwd=trained, output=log, kill=("log", 4)) == -signal.SIGKILL
    assert processes.run(*runs["p-killed"], "--resume", cwd=trained, output=log) == 0, log.read_text()
    same_run(trained / "runs/p-whole", trained / "runs/p-killed")
