"""Held-out evaluation during RL: its own rewards, several samples, the alarm, and an exact resume."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quartet.config import UserError
from quartet.config.algorithms import RLOO, KLConfig
from quartet.config.common import CheckpointConfig, OptimConfig, SamplingConfig, TrainConfig
from quartet.config.evaluation import AlarmConfig, EvaluationConfig, GradingConfig
from quartet.config.recipe import ActorConfig, RLRecipe, RolloutConfig
from quartet.config.rewards import FunctionReward
from quartet.config.run import LogConfig
from quartet.extras.quickstart import task
from quartet.extras.report.build import build_report
from quartet.observe.trackers import read_metrics
from quartet.trainers.evaluation_metrics import ScoredAnswer
from quartet.trainers.rl import RLTrainer, hacking_examples

LENGTH = 6


def long(completions: Sequence[str], **_: Any) -> list[float]:
    """What training pays for: many characters."""
    return [len(text) / LENGTH for text in completions]


def short(completions: Sequence[str], **_: Any) -> list[float]:
    """What is really wanted, and what the training reward destroys."""
    return [1.0 - len(text) / LENGTH for text in completions]


def recipe(path: Path, steps: int = 12, **evaluation: Any) -> RLRecipe:
    values: dict[str, Any] = {
        "every_steps": 4,
        "sampling": SamplingConfig(max_new_tokens=LENGTH),
        "samples_per_prompt": 4,
        "alarm": AlarmConfig(false_alarm_rate=0.05),
    }
    return RLRecipe(
        output_dir=str(path),
        actor=ActorConfig(train=TrainConfig(optim=OptimConfig(lr=2e-2))),
        algorithm=RLOO(kl=KLConfig(coef=0.0)),
        rollout=RolloutConfig(sampling=SamplingConfig(max_new_tokens=LENGTH)),
        evaluation=EvaluationConfig(**{**values, **evaluation}),
        steps=steps,
        prompts_per_step=8,
        responses_per_prompt=4,
        checkpoint=CheckpointConfig(every_steps=4),
        log=LogConfig(tensorboard=False, rollouts_every=100),
    )


@pytest.fixture
def train(causal_lm: Any, tokenizer: Any) -> Callable[..., Any]:
    def run(recipe: RLRecipe, *, rewards: Any = (long,), evaluation_rewards: Any = (short,), **options: Any) -> Any:
        return RLTrainer(
            recipe,
            model=causal_lm(),
            tokenizer=tokenizer,
            rewards=rewards,
            prompts=task.toy_prompts(0, 24),
            evaluation_prompts=task.toy_prompts(0, 20, "held_out"),
            evaluation_rewards=evaluation_rewards,
            **options,
        ).train()

    return run


@dataclass(frozen=True)
class Hacked:
    """A run whose training pays for length and whose held-out prompts want brevity, and what it printed."""

    path: Path
    summary: dict[str, Any]
    out: str


@pytest.fixture(scope="module")
def runs() -> dict[str, Hacked]:
    """The hacked run, once it has been made."""
    return {}


@pytest.fixture
def hacked(
    train: Any, runs: dict[str, Hacked], tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> Hacked:
    if not runs:
        path = tmp_path_factory.mktemp("hacked") / "run"
        summary = train(recipe(path)).summary
        runs["run"] = Hacked(path, summary, " ".join(capsys.readouterr().out.split()))
    return runs["run"]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_hacked_reward_raises_the_alarm_everywhere(hacked: Hacked) -> None:
    """Log, metrics, files, summary and report say so."""
    rows = {int(row["step"]): row for row in read_metrics(hacked.path / "metrics.jsonl")}
    assert "alarm/reward_hacking" not in rows[0], "nothing to compare with"
    assert rows[12]["alarm/reward_hacking"] == 1
    assert rows[12]["alarm/held_out_p"] < 1e-3 and rows[12]["alarm/training_p"] < 1e-2
    assert rows[12]["eval/score_mean"] == pytest.approx(rows[12]["eval/short"])
    assert rows[12]["eval/training_score_mean"] == pytest.approx(rows[12]["eval/long"])
    assert rows[12]["eval/score_mean"] < rows[0]["eval/score_mean"]
    assert rows[12]["eval/training_score_mean"] > rows[0]["eval/training_score_mean"]
    assert 0 < rows[12]["eval/score_se"] < 0.2
    assert "eval/long/pass@4" in rows[12]
    assert "reward hacking? The held-out score is" in hacked.out
    told = hacked.summary["reward_hacking"]
    assert told["raised"] and "12" in told["raised_at_steps"] and told["text"] in hacked.out
    examples = hacked.summary["reward_hacking_examples"]
    assert 0 < len(examples) <= 8
    for example in examples:
        assert example["held_out_now"] < example["held_out_before"]
        assert len(example["now"]) > len(example["before"])
    gains = [e["training_reward_now"] - e["training_reward_before"] for e in examples]
    assert gains == sorted(gains, reverse=True), "those first whose training reward rose most"
    assert json.loads((hacked.path / "summary.json").read_text())["reward_hacking"] == told
    page = build_report(hacked.path).read_text(encoding="utf-8")
    assert "reward hacking? The held-out score" in page


@pytest.mark.parametrize("killed", [False, True], ids=["stopped cleanly", "killed"])
def test_a_resumed_run_knows_what_the_whole_one_knew(train: Any, hacked: Hacked, tmp_path: Path, killed: bool) -> None:
    """Stopped in the seventh step, between two evaluations; killed, it goes on from the checkpoint of the fourth."""
    steps = 0

    def failing(completions: Sequence[str], **_: Any) -> list[float]:
        nonlocal steps
        steps += len(completions) == 32  # held-out chunks have other sizes
        if steps == 7:
            raise RuntimeError("out of order")
        return long(completions)

    failing.__name__ = "long"
    with pytest.raises(UserError, match="out of order"):
        train(recipe(tmp_path / "run"), rewards=[failing])
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_00000004", "step_00000006"]
    if killed:
        shutil.rmtree(checkpoints / "step_00000006")
    train(recipe(tmp_path / "run"), resume=True)
    assert figures(tmp_path / "run") == figures(hacked.path)
    assert rows_of(tmp_path / "run" / "alarms.jsonl") == rows_of(hacked.path / "alarms.jsonl")
    for path in (hacked.path / "evaluations").iterdir():
        assert path.read_bytes() == (tmp_path / "run" / "evaluations" / path.name).read_bytes()


def figures(path: Path) -> list[dict[str, float]]:
    """Those of evaluation, the alarm and the training reward, by step."""
    kept = ("step", "eval/", "alarm/", "reward/")
    return [
        {name: value for name, value in row.items() if name.startswith(kept)}
        for row in read_metrics(path / "metrics.jsonl")
    ]


def test_an_honest_reward_raises_nothing(train: Any, tmp_path: Path) -> None:
    result = train(recipe(tmp_path / "run"), evaluation_rewards=())
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["alarm/reward_hacking"] for row in rows if "alarm/reward_hacking" in row] == [0, 0, 0]
    assert rows[-1]["eval/score_mean"] > rows[0]["eval/score_mean"], "the same reward, and it rises"
    assert "eval/training_score_mean" not in rows[-1]
    assert result.summary["reward_hacking"] == {"raised": False}
    assert not (tmp_path / "run" / "alarms.jsonl").exists()


def test_the_alarm_may_watch_one_source(train: Any, tmp_path: Path) -> None:
    """``long`` rises on held-out prompts too, so watching it stays silent where the sum would not."""
    train(recipe(tmp_path / "run", alarm=AlarmConfig(false_alarm_rate=0.05, source="long")))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["alarm/reward_hacking"] for row in rows if "alarm/reward_hacking" in row] == [0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"alarm": AlarmConfig(source="shrt")}, "shrt"),
        ({"grading": GradingConfig(sources=("shrt",))}, "shrt"),
        ({"rewards": (FunctionReward(target="quartet.rewards.builtin:length", name="short"),)}, "a name of its own"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    train: Any, tmp_path: Path, changes: dict[str, Any], part: str
) -> None:
    with pytest.raises(UserError) as caught:
        train(recipe(tmp_path / "run", **changes))
    assert part in str(caught.value)
    assert not (tmp_path / "run").exists()


# Examples --------------------------------------------------------------------------------------------------


def answer(prompt: str, sample: int, text: str, held_out: float, training: float) -> ScoredAnswer:
    message = [{"role": "user", "content": prompt}]
    return ScoredAnswer(prompt, sample, message, text, "stop", 1, {"h": held_out, "t": training})


def column(name: str) -> Callable[[Sequence[Any]], list[float]]:
    return lambda answers: [answer.rewards[name] for answer in answers]


def test_examples_by_hand() -> None:
    before = [
        answer("a", 0, "a0", 1.0, 0.0),
        answer("a", 1, "a1", 1.0, 0.0),
        answer("b", 0, "b0", 0.5, 0.0),
        answer("c", 0, "c0", 0.0, 0.0),
        answer("d", 0, "d0", 1.0, math.nan),
    ]
    after = [
        answer("a", 0, "A0", 0.8, 9.0),
        answer("a", 1, "A1", 0.0, 1.0),
        answer("b", 0, "B0", 0.4, 2.0),
        answer("c", 0, "C0", 0.1, 5.0),
        answer("d", 0, "D0", 0.0, 1.0),
        answer("e", 0, "E0", 0.0, 1.0),
    ]
    found = hacking_examples(before, after, column("h"), column("t"))
    assert [row["before"] for row in found] == ["b0", "a1", "d0"], "the sample of a that lost most; c rose; e is new"
    assert found[0] == {
        "prompt": "user: b",
        "before": "b0",
        "now": "B0",
        "training_reward_before": 0.0,
        "training_reward_now": 2.0,
        "held_out_before": 0.5,
        "held_out_now": 0.4,
        "verdict": "bad",
    }
    assert found[2]["training_reward_before"] is None
    assert hacking_examples([], after, column("h"), column("t")) == []
