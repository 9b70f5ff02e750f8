"""The greedy baseline of ReMax: generated beside the group, scored by the rewards, seen by nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from breaking import fails_at, same_weights
from quartet.batch.ragged import ColumnSet
from quartet.batch.trajectory import Trajectory
from quartet.config.algorithms import KLConfig, ReMax
from quartet.config.common import CheckpointConfig
from quartet.data.datasets import PromptItem
from quartet.observe.rollouts import RolloutRecord, read_rollout_step
from quartet.observe.trackers import read_metrics
from quartet.rollout.protocol import Completion, FinishReason, SamplingParams
from quartet.schedule import model_worker
from quartet.schedule.groups import PromptGroup, group_batch, make_chunk, single_turn_trajectory
from quartet.schedule.iteration import Chunk, SubsetScorer
from quartet.trainers.evaluation import generate
from quartet.trainers.experience import Experience, ExperienceAssembler, sampled_and_greedy
from quartet.trainers.rl import RLTrainer

PROMPTS, RESPONSES = 3, 2


def ordinals(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(ord, text)) % 17 / 16 for text in completions]


VALUES: dict[str, Any] = {
    "algorithm": ReMax(kl=KLConfig(coef=0.1), missing_eos_penalty=0.25),
    "steps": 2,
    "prompts_per_step": PROMPTS,
    "responses_per_prompt": RESPONSES,
    "chunk_size": 2,
    "checkpoint": CheckpointConfig(every_steps=1),
}


@pytest.fixture
def trainer(tiny_rl: Callable[..., RLTrainer]) -> Callable[..., RLTrainer]:
    def make(path: Path, reward: Callable[..., Any] = ordinals, **changes: Any) -> RLTrainer:
        return tiny_rl(path, reward, **{**VALUES, **changes})

    return make


def split(path: Path, step: int) -> tuple[list[RolloutRecord], list[RolloutRecord]]:
    records = read_rollout_step(path / "rollouts", step)
    greedy = [record for record in records if record.sequence_id.endswith(".greedy")]
    return [record for record in records if record not in greedy], greedy


def test_the_baseline_is_the_score_of_the_most_likely_response(
    tmp_path: Path, trainer: Callable[..., RLTrainer], causal_lm: Any
) -> None:
    """Against plain greedy generation with the model as it was when the run began."""
    used = trainer(tmp_path / "run")
    items = [used.roles.item(index) for index in range(PROMPTS)]
    params = SamplingParams(temperature=0.0, max_new_tokens=5)
    expected = [
        found for (found,) in generate(used.roles.actor.packed, used.roles.codec, [i.prompt for i in items], params)
    ]
    used.train()
    sampled, greedy = split(tmp_path / "run", 1)
    assert [record.response_ids for record in greedy] == [list(found.completion.token_ids) for found in expected]
    scores = [ordinals([found.text])[0] - 0.25 * (found.finish_reason == "length") for found in expected]
    assert [record.score for record in greedy] == pytest.approx(scores)
    row = read_metrics(tmp_path / "run" / "metrics.jsonl")[1]
    assert row["reward/greedy_mean"] == pytest.approx(sum(scores) / PROMPTS)
    assert len(sampled) == PROMPTS * RESPONSES
    assert row["reward/score_mean"] == pytest.approx(sum(r.score or 0.0 for r in sampled) / len(sampled))
    assert {record.columns["loss_mask"][0] for record in greedy} == {0.0}


def test_only_rewards_see_the_greedy_response(
    tmp_path: Path, trainer: Callable[..., RLTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences through the reference, the actor's forward and its updates: the sampled ones and no more."""
    frozen, forward, trained, scored = [], [], [], []
    plain = model_worker.forward_only
    monkeypatch.setattr(
        model_worker,
        "forward_only",
        lambda model, batch, *a, **k: frozen.append(len(batch)) or plain(model, batch, *a, **k),
    )

    def counted(completions: list[str], **_: Any) -> list[float]:
        scored.append(len(completions))
        return ordinals(completions)

    used = trainer(tmp_path / "run", counted)
    engine = used.roles.actor
    own_forward, own_step = engine.forward, engine.train_step
    monkeypatch.setattr(engine, "forward", lambda batch, needs: forward.append(len(batch)) or own_forward(batch, needs))
    monkeypatch.setattr(engine, "train_step", lambda b, *rest, **k: trained.append(len(b)) or own_step(b, *rest, **k))
    used.train()
    sampled = 2 * PROMPTS * RESPONSES
    assert sum(frozen) == sampled
    assert sum(forward) == sampled + 2, "and the canary of each update"
    assert sum(trained) == sampled
    assert sum(scored) == sampled + 2 * PROMPTS


def test_a_run_that_stops_and_goes_on_ends_with_the_same_bits(
    tmp_path: Path, trainer: Callable[..., RLTrainer]
) -> None:
    whole = trainer(tmp_path / "whole")
    whole.train()
    with pytest.raises(Exception, match="server is gone"):
        trainer(tmp_path / "run", fails_at(6, ordinals)).train()
    resumed = trainer(tmp_path / "run", resume=True)
    resumed.train()
    assert same_weights(resumed.roles.actor.packed.model, whole.roles.actor.packed.model)


# The column ----------------------------------------------------------------------------------------------


class Scores:
    """A reward source that knows the score of each text; NaN: does not apply."""

    def __init__(self, scores: dict[str, float]) -> None:
        self.scores = scores

    async def score(self, chunk: Chunk) -> ColumnSet:
        values = torch.tensor([self.scores[text] for text in chunk.data.objects["completion"]])
        return ColumnSet(chunk.data.ids, sequence={"reward/score": values})


def _completion(token: int, reason: FinishReason = FinishReason.STOP) -> Completion:
    return Completion(f"r{token}", "g", (token,), (-0.5,), (3,), reason)


def _chunk(greedy: list[Completion]) -> Chunk:
    def made(completion: Completion) -> Trajectory:
        return single_turn_trajectory((1, 2), completion, str(completion.token_ids[0]))

    sampled = made(_completion(10)), made(_completion(11))
    items = [PromptItem(f"p{g}", "x", {}, "", 2) for g in range(len(greedy))]
    batches = [group_batch(7 + g, sampled, made(completion)) for g, completion in enumerate(greedy)]
    groups = [PromptGroup.of(7 + g, item, batch) for g, (item, batch) in enumerate(zip(items, batches, strict=True))]
    return make_chunk(3, 0, groups)


def _assembled(chunk: Chunk, scores: dict[str, float]) -> Experience:
    scored = asyncio.run(SubsetScorer(Scores(scores), sampled_and_greedy).score(chunk))
    return ExperienceAssembler(ReMax(kl=KLConfig(coef=0.0), missing_eos_penalty=0.5), {"score": 2.0}, lambda: 0.0)(
        [(chunk, [scored])]
    )


def test_the_column_is_the_weighted_shaped_score_of_the_sequences_own_prompt() -> None:
    chunk = _chunk([_completion(20), _completion(21, FinishReason.LENGTH)])
    assert chunk.data.ids == ("7.0", "7.1", "7.greedy", "8.0", "8.1", "8.greedy")
    found = _assembled(chunk, {"10": 4.0, "11": 5.0, "20": 1.0, "21": 3.0})
    assert found.batch.ids == ("7.0", "7.1", "8.0", "8.1")
    assert found.batch.sequence["baseline"].tolist() == [2.0, 2.0, 5.5, 5.5]
    acted = found.batch.token["action_mask"]
    assert found.batch.token["advantages"][acted].tolist() == [6.0, 8.0, 2.5, 4.5]
