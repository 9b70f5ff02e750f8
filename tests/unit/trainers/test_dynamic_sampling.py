"""Groups without variance are replaced: which ones, what it costs, what the metrics say, where it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from breaking import fails_at, same_weights, untimed_rows
from quartet.config import UserError
from quartet.config.algorithms import GRPO, DynamicSamplingConfig, KLConfig
from quartet.config.common import CheckpointConfig, SamplingConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.recipe import RolloutConfig
from quartet.observe.rollouts import RolloutRecord, read_rollout_step
from quartet.trainers.rl import RLTrainer

STEPS, PROMPTS, RESPONSES = 3, 4, 2


def parity(completions: list[str], **_: Any) -> list[float]:
    """Half of all pairs of random responses agree."""
    return [float(sum(map(ord, text)) % 2) for text in completions]


VALUES: dict[str, Any] = {
    "algorithm": GRPO(dynamic_sampling=DynamicSamplingConfig(max_prompts_factor=10.0)),
    "steps": STEPS,
    "prompts_per_step": PROMPTS,
    "responses_per_prompt": RESPONSES,
    "chunk_size": 2,
    "checkpoint": CheckpointConfig(every_steps=1),
}


@pytest.fixture
def trainer(tiny_rl: Callable[..., RLTrainer]) -> Callable[..., RLTrainer]:
    def make(path: Path, reward: Callable[..., Any] = parity, **changes: Any) -> RLTrainer:
        return tiny_rl(path, reward, **{**VALUES, **changes})

    return make


def same_run(one: RLTrainer, other: RLTrainer) -> None:
    assert same_weights(one.roles.actor.packed.model, other.roles.actor.packed.model)
    left, right = (
        [{k.replace("waiting", "parity"): v for k, v in row.items()} for row in untimed_rows(t.path)]
        for t in (one, other)
    )
    assert left == right
    for step in range(1, STEPS + 1):
        assert [record.response_ids for record in records(one.path, step)] == [
            record.response_ids for record in records(other.path, step)
        ]


def records(path: Path, step: int) -> list[RolloutRecord]:
    return read_rollout_step(path / "rollouts", step)


def test_every_group_of_a_step_has_variance_and_the_rest_is_counted(
    tmp_path: Path, trainer: Callable[..., RLTrainer]
) -> None:
    scored: list[int] = []

    def counted(completions: list[str], **_: Any) -> list[float]:
        scored.append(len(completions))
        return parity(completions)

    trainer(tmp_path / "run", counted).train()
    rows, begin = untimed_rows(tmp_path / "run")[1:], 0
    assert any(row["groups/rejected_frac"] > 0 for row in rows), "or nothing is tested here"
    for step, row in enumerate(rows, start=1):
        groups: dict[int, list[float | None]] = {}
        for record in records(tmp_path / "run", step):
            groups.setdefault(int(record.group), []).append(record.score)
        assert len(groups) == PROMPTS and all(len(set(scores)) == 2 for scores in groups.values())
        assert list(groups) == sorted(groups) and min(groups) >= begin
        assert row["groups/sampled"] == max(groups) + 1 - begin, "the stream stops with the last group it needs"
        assert row["groups/rejected_frac"] == (row["groups/sampled"] - PROMPTS) / row["groups/sampled"]
        assert row["groups/zero_variance"] == 0.0
        assert row["reward/score_mean"] == 0.5
        begin = max(groups) + 1
    assert sum(scored) == begin * RESPONSES, "every response is scored once"
    assert set(scored) == {RESPONSES}, "a group at a time"


def test_the_mean_score_of_what_was_sampled_is_not_that_of_what_was_kept(
    tmp_path: Path, trainer: Callable[..., RLTrainer]
) -> None:
    scores: list[float] = []

    def rare(completions: list[str], **_: Any) -> list[float]:
        found = [float(sum(map(ord, text)) % 4 == 0) for text in completions]
        scores.extend(found)
        return found

    trainer(tmp_path / "run", rare, steps=1).train()
    row = untimed_rows(tmp_path / "run")[-1]
    assert row["reward/sampled_score_mean"] == pytest.approx(sum(scores) / len(scores))
    assert row["reward/sampled_score_mean"] != row["reward/score_mean"]


@pytest.mark.parametrize("broken", [5, 12])
def test_a_run_that_stops_and_goes_on_ends_with_the_same_bits(
    broken: int, tmp_path: Path, trainer: Callable[..., RLTrainer]
) -> None:
    """The reward fails in the middle of a step, some of whose groups are rejected already."""
    whole = trainer(tmp_path / "whole")
    whole.train()
    with pytest.raises(UserError, match="server is gone"):
        trainer(tmp_path / "run", fails_at(broken, parity)).train()
    resumed = trainer(tmp_path / "run", resume=True)
    resumed.train()
    same_run(resumed, whole)


def test_at_the_bound_the_run_stops_before_the_update(tmp_path: Path, trainer: Callable[..., RLTrainer]) -> None:
    used = trainer(
        tmp_path / "run",
        lambda completions: [1.0] * len(completions),
        algorithm=GRPO(dynamic_sampling=DynamicSamplingConfig(max_prompts_factor=2.5)),
    )
    before = {name: values.clone() for name, values in used.roles.actor.packed.model.state_dict().items()}
    with pytest.raises(UserError) as raised:
        used.train()
    assert "10 groups tried, 0 with variance, 4 needed" in raised.value.found
    assert "max_prompts_factor=2.5" in raised.value.found
    assert used.roles.actor.num_updates == 0
    assert all(torch.equal(v, before[name]) for name, v in used.roles.actor.packed.model.state_dict().items())


def test_variance_is_that_of_the_shaped_scores(tmp_path: Path, trainer: Callable[..., RLTrainer]) -> None:
    """Equal scores, but one response was cut off: that is a signal, as it is for the advantages."""
    algorithm = GRPO(
        kl=KLConfig(coef=0.0),
        missing_eos_penalty=0.5,
        dynamic_sampling=DynamicSamplingConfig(max_prompts_factor=50.0),
    )
    sampling = RolloutConfig(sampling=SamplingConfig(max_new_tokens=12), engine=NativeEngineConfig(max_running=8))
    used = trainer(
        tmp_path / "run", lambda completions: [1.0] * len(completions), algorithm=algorithm, rollout=sampling, steps=1
    )
    used.train()
    ends: dict[str, set[str]] = {}
    for record in records(tmp_path / "run", 1):
        ends.setdefault(record.group, set()).add(record.finish_reason)
    assert len(ends) == PROMPTS and all(len(reasons) == 2 for reasons in ends.values()), ends
