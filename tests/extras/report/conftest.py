"""A synthetic run with everything a report shows, hostile model output included."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from quartet.observe.rollouts import RolloutRecord, write_rollout_step
from quartet.observe.spans import SpanRecorder
from quartet.observe.trackers import JsonlTracker

HOSTILE = [
    "</script><img src=x onerror=\"document.title='owned'\">",
    "<!--<script>",
    "\"quotes' & `ticks` ${x}",
    "\u202egnp.exe\u202c",
    "שלום עליכם",
    "emoji 🎻 ",
    "null\x00 bell\x07 esc\x1b[31m",
    "lone \ud83d surrogate",
    "{{ script }} {{ data }}",
    "\u2028line\u2029separators\n\ttab",
]


def make_record(
    step: int, prompt: int, index: int, pieces: list[str], prompt_text: str, quality: float, rng: random.Random
) -> RolloutRecord:
    """A record whose columns hang together as those of a PPO step do."""
    n = len(pieces)
    rollout = [-abs(rng.gauss(0, 0.5)) for _ in range(n)]
    old = [x + rng.gauss(0, 1e-5) for x in rollout]
    ref = [x - rng.gauss(0.05 * quality, 0.15) for x in old]
    score = round(quality + rng.gauss(0, 0.6), 4)
    kl = [o - r for o, r in zip(old, ref, strict=True)]
    token_rewards = [-0.05 * k for k in kl]
    token_rewards[-1] += score
    values = [score * (i + 1) / n * 0.8 + rng.gauss(0, 0.15) for i in range(n)]
    returns = [sum(token_rewards[i:]) for i in range(n)]
    advantages = [r - v for r, v in zip(returns, values, strict=True)]
    columns = {
        "rollout_logprobs": rollout,
        "old_logprobs": old,
        "ref_logprobs": ref,
        "kl": kl,
        "values": values,
        "advantages": advantages,
        "token_rewards": token_rewards,
        "loss_mask": [0.0 if piece.startswith("[") else 1.0 for piece in pieces],
    }
    return RolloutRecord(
        sequence_id=f"{step}-{prompt}-{index}",
        prompt_id=f"p{prompt}",
        response_index=index,
        policy_version=step,
        prompt_ids=list(range(len(prompt_text))),
        response_ids=[100 + i for i in range(n)],
        prompt_tokens=list(prompt_text),
        response_tokens=pieces,
        prompt_text=prompt_text,
        response_text="".join(pieces),
        finish_reason="stop" if index else "length",
        rewards={"reward_model": score, "style": None},
        score=score,
        group=f"{step}-{prompt}",
        columns=columns,
    )


def _addition(prompt: int, step: int, steps: int, rng: random.Random) -> tuple[str, list[str], float]:
    a, b = 17 + 13 * prompt, 28 + 9 * prompt
    careful = rng.random() < 0.2 + 0.7 * step / steps
    carry = (a % 10 + b % 10) // 10 if careful else 0
    ones = a % 10 + b % 10
    tens = a // 10 + b // 10 + carry
    text = f"{a % 10}+{b % 10}={ones};{a // 10}+{b // 10}+{carry}={tens};{tens}{ones % 10}"
    return f"{a}+{b}=", [*text, "</s>"], 1.4 if careful else -0.8


def _write_rl(path: Path, steps: int, rng: random.Random, hostile: bool) -> None:
    path.mkdir()
    now = 1_700_000_300.0
    tracker = JsonlTracker(path / "metrics.jsonl", clock=lambda: now)
    clock_now = [now]
    recorder = SpanRecorder(path / "spans.jsonl", clock=lambda: clock_now[0])

    def spend(name: str, at: float, length: float, role: str, mode: str, chunk: int | None, tokens: int) -> None:
        clock_now[0] = at
        with recorder.span(name, step=step, role=role, mode=mode, chunk=chunk, tokens=tokens):
            clock_now[0] = at + length

    for step in range(1, steps + 1):
        x = step / steps
        noise = lambda scale: rng.gauss(0, scale)  # noqa: E731
        metrics = {
            "reward/score_mean": -0.8 + 2.1 * x**0.6 + noise(0.08),
            "kl/ref": 0.002 + 0.05 * x + noise(0.002),
            "policy/entropy": 0.62 - 0.35 * x + noise(0.01),
            "policy/grad_norm": float("nan") if step == 7 else 1.1 + noise(0.2),
            "critic/explained_variance": 0.1 + 0.75 * x**0.4 + noise(0.04),
            "time/generate_s": 1.8,
        }
        if step % 5 == 0 or step == 1:
            metrics["eval/exact_match"] = min(0.97, 0.36 + 0.55 * x**0.7 + noise(0.01))
        tracker.log(step, metrics)
        for chunk in range(4):
            at = now + 0.45 * chunk
            spend("generate", at, 0.44, "actor", "generate", chunk, 2_300)
            spend("ref_logprobs", at + 0.5, 0.13, "reference", "forward", chunk, 2_300)
        spend("train_actor", now + 2.5, 0.8 + noise(0.05), "actor", "train", None, 9_200)
        spend("train_critic", now + 3.36, 0.7 + noise(0.05), "critic", "train", None, 9_200)
        spend("publish", now + 4.2, 0.05, "actor", "train", None, 0)
        now += 4.4
        records = []
        for prompt in [(step * 3 + k) % 12 for k in range(6)]:
            for index in range(4):
                text, pieces, quality = _addition(prompt, step, steps, rng)
                if hostile and prompt == 0 and index == 0:
                    pieces = HOSTILE
                elif prompt == 1 and index == 1:
                    pieces = ["[tool", " output]", *pieces]
                records.append(make_record(step, prompt, index, pieces, text, quality, rng))
        write_rollout_step(path / "rollouts", step, records)
    tracker.close()
    recorder.close()


def _write_supervised(path: Path, names: dict[str, tuple[float, float]], start: float, rng: random.Random) -> None:
    path.mkdir()
    now = [start]
    tracker = JsonlTracker(path / "metrics.jsonl", clock=lambda: now[0])
    recorder = SpanRecorder(path / "spans.jsonl", clock=lambda: now[0])
    for step in range(1, 101):
        with recorder.span("train_step", step=step, role="model", mode="train", tokens=4_000):
            now[0] += 0.3
        fade = math.exp(-step / 25)
        row = {name: end + (begin - end) * fade + rng.gauss(0, 0.01) for name, (begin, end) in names.items()}
        tracker.log(step, {**row, "optim/lr": 1e-3 * (1 - step / 120), "optim/grad_norm": 1 + rng.gauss(0, 0.1)})
    tracker.close()
    recorder.close()


@pytest.fixture
def make_run() -> Callable[..., Path]:
    """``make_run(path, steps=20, hostile=True)`` writes a whole quickstart-like run into ``path``."""
    return write_run


def write_run(path: Path, steps: int = 20, hostile: bool = True) -> Path:
    rng = random.Random(5)
    path.mkdir(parents=True)
    run = {
        "job": "quickstart",
        "name": "quickstart 2026-03-01",
        "created": "2026-03-01T10:15:00",
        "status": "done",
        "versions": {"python": "3.11.9", "quartet-rl": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"},
    }
    (path / "run.json").write_text(json.dumps(run))
    (path / "recipe.yaml").write_text("job: rl\nactor:\n  optim:\n    lr: 3.0e-5\nalgorithm:\n  type: ppo\n")
    fault, right = "7+8=15;4+3+0=7;75", "7+8=15;4+3+1=8;85"
    summary = {
        "headline": [
            {"label": "exact match, greedy", "before": 0.41, "after": 0.93, "unit": "fraction"},
            {"label": "whole run", "after": 171.3, "unit": "s"},
        ],
        "stages": [
            {"name": "sft", "seconds": 38.2, "metrics": {"exact_match": 0.41, "loss": 0.212}},
            {"name": "rl", "seconds": 95.1, "metrics": {"exact_match": 0.93, "kl": 0.052}},
        ],
        "examples": [
            {"prompt": "47+38=", "sft": fault, "rl": right, "verdict": "good"},
        ],
        "seed": 0,
        "versions": run["versions"],
    }
    (path / "summary.json").write_text(json.dumps(summary))
    _write_supervised(path / "sft", {"loss/sft": (3.4, 0.21), "sft/perplexity": (30.0, 1.2)}, 1_700_000_000.0, rng)
    pairs = {"loss/reward_model": (0.69, 0.22), "reward_model/accuracy": (0.5, 0.95)}
    _write_supervised(path / "reward_model", pairs, 1_700_000_100.0, rng)
    _write_rl(path / "rl", steps, rng, hostile)
    return path
