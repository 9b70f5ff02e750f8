"""SFT and reward-model training: resume, held-out figures, what is saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.config import UserError
from quartet.config.common import DataConfig, OptimConfig, TrainConfig
from quartet.config.recipe import CheckpointConfig, LogConfig, RewardModelRecipe, SFTRecipe
from quartet.extras.process_rewards.config import ProcessRewardRecipe
from quartet.extras.process_rewards.trainer import ProcessRewardTrainer
from quartet.trainers.supervised import RewardModelTrainer, SFTTrainer

COMMON: dict[str, Any] = {
    "threads": 1,
    "train": TrainConfig(optim=OptimConfig(lr=5e-3, warmup_steps=2, schedule="cosine")),
    "checkpoint": CheckpointConfig(every_steps=2),
    "log": LogConfig(tensorboard=False),
    "steps": 5,
    "evaluate_every_steps": 2,
}


def sft(path: Path, model: Any, tokenizer: Any, rows: Any, *, resume: bool = False, **changes: Any) -> SFTTrainer:
    values = {**COMMON, "examples_per_step": 6, "output_dir": str(path), **changes}
    return SFTTrainer(
        SFTRecipe(**values), model=model, tokenizer=tokenizer, rows=rows, evaluation_rows=rows[:4], resume=resume
    )


def reward_model(
    path: Path, model: Any, tokenizer: Any, rows: Any, *, resume: bool = False, **changes: Any
) -> RewardModelTrainer:
    values = {**COMMON, "pairs_per_step": 4, "output_dir": str(path), **changes}
    return RewardModelTrainer(
        RewardModelRecipe(**values), model=model, tokenizer=tokenizer, rows=rows, evaluation_rows=rows, resume=resume
    )


def process_reward(
    path: Path, model: Any, tokenizer: Any, rows: Any, *, resume: bool = False, **changes: Any
) -> ProcessRewardTrainer:
    values = {**COMMON, "answers_per_step": 8, "separator": ";", "output_dir": str(path), **changes}
    labelled = [
        {"prompt": row["prompt"], "steps": (steps := row["chosen"].split(";")), "labels": [0.5] * len(steps)}
        for row in rows
    ]
    return ProcessRewardTrainer(
        ProcessRewardRecipe(**values),
        model=model,
        tokenizer=tokenizer,
        rows=labelled,
        evaluation_rows=labelled[:4],
        resume=resume,
    )


@pytest.mark.parametrize(("make", "check_rows"), [(sft, 50_000), (sft, 3), (reward_model, 3), (process_reward, 50_000)])
def test_a_run_that_breaks_off_and_is_resumed_ends_the_same(
    make: Any,
    check_rows: int,
    request: pytest.FixtureRequest,
    break_off: Any,
    untimed: Any,
    causal_lm: Any,
    tmp_path: Path,
) -> None:
    """Also where it begins before all rows are checked: then as the one that had checked them."""
    fixtures = ("tokenizer", "demonstrations" if make is sft else "pairs")
    tokenizer, rows = (request.getfixturevalue(name) for name in fixtures)
    rows = [row for row in rows if make is sft or row["chosen"] != row["rejected"]]
    whole = make(tmp_path / "whole", causal_lm(), tokenizer, rows).train()
    data = DataConfig(check_rows=check_rows)
    break_off(make(tmp_path / "broken", causal_lm(), tokenizer, rows, data=data), 3)
    assert len(untimed(tmp_path / "broken")) == 3, "one row more than the checkpoint"
    resumed = make(tmp_path / "broken", causal_lm(seed=9), tokenizer, rows, data=data, resume=True).train()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert untimed(tmp_path / "whole") == untimed(tmp_path / "broken")


def test_sft_figures_are_those_of_transformers_own_loss(
    causal_lm: Any, tokenizer: Any, demonstrations: Any, tmp_path: Path
) -> None:
    """Mean over the completions' tokens, end of text included, prompts not."""
    rows = demonstrations[:4]
    trainer = sft(tmp_path / "run", causal_lm(), tokenizer, rows)
    found = trainer.evaluate()
    trainer.worker.packed.release()
    total = count = 0.0
    for row in rows:
        head = tokenizer(row["prompt"])["input_ids"]
        tail = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            labels = torch.tensor([[-100] * len(head) + tail])
            loss = trainer.worker.packed.model(torch.tensor([head + tail]), labels=labels).loss
        total, count = total + float(loss) * len(tail), count + len(tail)
    assert found["eval/loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["sft/perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)


def test_evaluation_runs_on_its_cadence_and_at_the_end(
    causal_lm: Any, tokenizer: Any, demonstrations: Any, untimed: Any, tmp_path: Path
) -> None:
    sft(tmp_path / "run", causal_lm(), tokenizer, demonstrations).train()
    rows = untimed(tmp_path / "run")
    assert [row["step"] for row in rows if "eval/loss" in row] == [2, 4, 5]
    assert [row["data/epoch"] for row in rows] == pytest.approx([6 * n / 24 for n in range(1, 6)])


def test_a_reward_model_learns_to_prefer_and_reports_it(
    causal_lm: Any, tokenizer: Any, pairs: Any, tmp_path: Path
) -> None:
    trainer = reward_model(tmp_path / "run", causal_lm(), tokenizer, pairs, steps=25, centring=0.01)
    before = trainer.evaluate()
    result = trainer.train()
    after = result.summary["stages"][0]["metrics"]
    assert after["eval/accuracy"] > max(0.8, before["eval/accuracy"])
    assert after["eval/margin"] > before["eval/margin"]
    assert trainer.worker.evaluation is not None
    with torch.no_grad():
        margins = [
            result.model(torch.tensor([item.prompt_ids + item.answers[0]])).logits.item()
            - result.model(torch.tensor([item.prompt_ids + item.answers[1]])).logits.item()
            for item in trainer.worker.evaluation.items
        ]
    assert after["eval/accuracy"] == pytest.approx(sum(m > 0 for m in margins) / len(margins))
    assert after["eval/margin"] == pytest.approx(sum(margins) / len(margins), rel=1e-4)


def test_a_reward_model_goes_on_from_a_scalar_model_in_place(
    scalar_model: Any, tokenizer: Any, pairs: Any, tmp_path: Path
) -> None:
    model = scalar_model()
    head = model.score.weight.clone()
    result = reward_model(tmp_path / "run", model, tokenizer, pairs, steps=1).train()
    assert result.model is model and not torch.equal(model.score.weight, head)


def test_a_causal_lm_given_for_a_reward_model_is_copied(
    causal_lm: Any, tokenizer: Any, pairs: Any, tmp_path: Path
) -> None:
    model = causal_lm()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reward_model(tmp_path / "run", model, tokenizer, pairs, steps=1).train()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_without_model_or_data_there_is_nothing_to_do(tokenizer: Any, causal_lm: Any, tmp_path: Path) -> None:
    bare = SFTRecipe(output_dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match="no tokenizer"):
        SFTTrainer(bare)
    with pytest.raises(UserError, match="no model"):
        SFTTrainer(bare, tokenizer=tokenizer)
    with pytest.raises(UserError, match="no data"):
        SFTTrainer(bare, tokenizer=tokenizer, model=causal_lm())
    assert not (tmp_path / "run").exists()


def test_a_run_whose_gradients_are_never_finite_stops(
    causal_lm: Any, tokenizer: Any, demonstrations: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quartet.train.engine.clip_gradients", lambda *_: math.nan)
    with pytest.raises(UserError, match="no update of the model has been made for 3 steps"):
        sft(tmp_path / "run", causal_lm(), tokenizer, demonstrations, steps=6).train()
    assert (tmp_path / "run" / "checkpoints" / "step_00000003").is_dir()
