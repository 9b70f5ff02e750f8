"""Preference training: learning, the reference's log-probabilities on disk, resume, what is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from quartet.config import UserError
from quartet.config.common import CheckpointConfig, DataConfig, OptimConfig, TrainConfig
from quartet.config.preference import (
    DPOLoss,
    KTOLoss,
    PreferenceRecipe,
    SimPOLoss,
)
from quartet.config.run import LogConfig
from quartet.extras.quickstart import task
from quartet.trainers.preference import PreferenceTrainer

COMMON: dict[str, Any] = {
    "threads": 1,
    "train": TrainConfig(optim=OptimConfig(lr=3e-3, warmup_steps=2)),
    "log": LogConfig(tensorboard=False),
    "steps": 5,
    "pairs_per_step": 4,
    "evaluate_every_steps": 2,
}
SAVED = CheckpointConfig(every_steps=2)
LOSSES = (DPOLoss(), SimPOLoss(), KTOLoss())


@pytest.fixture
def tokenizer(tokenizer: Any) -> Any:
    """A test's own: some change it."""
    return copy.deepcopy(tokenizer)


@pytest.fixture
def pairs(prompts: list[str]) -> list[dict[str, str]]:
    """Twelve sums, worked out and the same backwards."""
    answers = [task.work(*task.operands(prompt)) for prompt in prompts]
    return [{"prompt": p, "chosen": a, "rejected": a[::-1]} for p, a in zip(prompts, answers, strict=True)]


@pytest.fixture
def train(causal_lm: Any, tokenizer: Any, pairs: Any, tmp_path: Path) -> Callable[..., PreferenceTrainer]:
    """A trainer on the pairs; ``path`` below the test's folder, other arguments are the recipe's."""

    def make(
        path: str = "run",
        *,
        model: Any = None,
        other: Any = None,
        rows: Sequence[Mapping[str, Any]] | None = pairs,
        held_out: Sequence[Mapping[str, Any]] | None = None,
        resume: bool = False,
        **changes: Any,
    ) -> PreferenceTrainer:
        recipe = PreferenceRecipe(**{**COMMON, "output_dir": str(tmp_path / path), **changes})
        return PreferenceTrainer(
            recipe,
            model=causal_lm() if model is None else model,
            reference=other,
            tokenizer=tokenizer,
            rows=rows,
            evaluation_rows=pairs if held_out is None else held_out,
            resume=resume,
        )

    return make


def total_logprob(model: Any, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> float:
    """Of an answer, by an unmodified model."""
    ids = [*prompt_ids, *answer_ids]
    with torch.no_grad():
        log_p = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return sum(float(log_p[k - 1, ids[k]]) for k in range(len(prompt_ids), len(ids)))


# Learning ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_every_loss_learns_to_prefer(loss: Any, train: Any, untimed: Any) -> None:
    trainer = train(loss=loss, steps=20, pairs_per_step=6, evaluate_every_steps=100)
    metrics = trainer.train().summary["stages"][0]["metrics"]
    first = untimed(trainer.path)[0]
    assert metrics["preference/margin"] > first["preference/margin"]
    assert metrics["eval/accuracy"] > 0.9 and metrics["eval/loss"] < first["loss/preference"]
    assert ("preference/kl" in metrics) == isinstance(loss, KTOLoss)
    assert (trainer.path / "reference").exists() != isinstance(loss, SimPOLoss)


def test_figures_are_those_of_unmodified_models(train: Any, untimed: Any, causal_lm: Any) -> None:
    """Held-out loss and rewards after training, from two plain models and the formula."""
    trainer = train(loss=DPOLoss(beta=0.3))
    result = trainer.train()
    reference = causal_lm()
    losses, chosen_rewards = [], []
    assert trainer.worker.evaluation is not None
    for item in trainer.worker.evaluation.items:
        ratios = [
            total_logprob(result.model, item.prompt_ids, ids) - total_logprob(reference, item.prompt_ids, ids)
            for ids in item.answers
        ]
        losses.append(math.log1p(math.exp(-0.3 * (ratios[0] - ratios[1]))))
        chosen_rewards.append(0.3 * ratios[0])
    metrics = result.summary["stages"][0]["metrics"]
    assert metrics["eval/loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert metrics["eval/reward_chosen"] == pytest.approx(sum(chosen_rewards) / len(chosen_rewards), abs=1e-5)
    first = untimed(trainer.path)[0]
    assert first["loss/preference"] == pytest.approx(math.log(2), abs=1e-5), "the policy starts as its reference"


def test_another_reference(train: Any, causal_lm: Any) -> None:
    other = causal_lm(seed=4)
    trainer = train(other=other, steps=1)
    item = trainer.worker.data.items[3]
    metrics = trainer.train()
    tables = load_file(metrics.path / "reference" / "training.safetensors")
    assert tables["answers"].shape == (12, 2)
    assert float(tables["answers"][3, 1]) == pytest.approx(
        total_logprob(other, item.prompt_ids, item.answers[1]), abs=1e-4
    ), "and the model given as reference works on its own again"


def test_kto_takes_answers_judged_one_by_one(train: Any, pairs: Any) -> None:
    judged = [{"prompt": p["prompt"], "completion": p[side], "label": side == "chosen"}
              for p in pairs for side in ("chosen", "rejected")]  # fmt: skip
    trainer = train(loss=KTOLoss(), rows=judged, held_out=judged, steps=20, pairs_per_step=8)
    metrics = trainer.train().summary["stages"][0]["metrics"]
    assert metrics["eval/reward_chosen"] > 0.05 > -0.05 > metrics["eval/reward_rejected"]
    assert "preference/accuracy" not in metrics and metrics["preference/kl"] >= 0
    with pytest.raises(UserError, match="loss dpo compares two answers"):
        train("other", rows=judged)


def test_the_reference_point_of_kto_is_the_one_of_unmodified_models(train: Any, untimed: Any, causal_lm: Any) -> None:
    trainer = train(loss=KTOLoss(), model=causal_lm(seed=8), other=causal_lm(seed=4), steps=1)
    policy, reference, data = causal_lm(seed=8), causal_lm(seed=4), trainer.worker.data
    rows = data.batch(0, 4, trainer.recipe.seed).sequence["row"].tolist()[::2]
    trainer.train()
    ratios = []
    for row in rows:
        item, other = data.items[row], data.items[(row + 1) % len(data)]
        assert item.prompt_ids != other.prompt_ids
        for ids in other.answers:
            cut = ids[: data.max_tokens - len(item.prompt_ids)]
            ratios.append(total_logprob(policy, item.prompt_ids, cut) - total_logprob(reference, item.prompt_ids, cut))
    expected = max(0.0, sum(ratios) / len(ratios))
    assert untimed(trainer.path)[0]["preference/kl"] == pytest.approx(expected, abs=1e-4)


# The reference's log-probabilities -----------------------------------------------------------------------


def counted(trainer: PreferenceTrainer) -> list[int]:
    """The rows of which the reference computes log-probabilities from now on, each once per answer."""
    assert trainer.worker._tables is not None and trainer.worker._tables._reference is not None
    reference, seen = trainer.worker._tables._reference, []

    def forward(batch: Any) -> Any:
        seen.extend(batch.sequence["row"].tolist())
        return reference.forward(batch)

    trainer.worker._tables._reference = replace(reference, forward=forward)
    return seen


def test_a_run_that_breaks_off_goes_on_with_the_reference_it_began_with(
    train: Any, break_off: Any, untimed: Any, causal_lm: Any
) -> None:
    whole = train("whole").train()
    break_off(train("broken", checkpoint=SAVED), 3)
    # The weights given are not those the run began with: model and reference come from the run's own files.
    resumed = train("broken", model=causal_lm(seed=9), checkpoint=SAVED, resume=True)
    seen = counted(resumed)
    result = resumed.train()
    assert not seen
    assert all(torch.equal(value, result.model.state_dict()[name]) for name, value in whole.model.state_dict().items())
    assert untimed(whole.path) == untimed(result.path)


@pytest.mark.parametrize("damage", ["gone", "cut off", "of other tokens"])
def test_tables_that_cannot_be_read_are_computed_again(damage: str, train: Any, break_off: Any, tmp_path: Path) -> None:
    whole = train("whole").train()
    break_off(train("broken", checkpoint=SAVED), 3)
    for path in (tmp_path / "broken" / "reference").iterdir():
        tables, data = load_file(path), path.read_bytes()
        path.unlink()
        if damage != "gone":
            path.write_bytes(data[:-20] if damage == "cut off" else save(tables, {"ids": "others'"}))
    resumed = train("broken", checkpoint=SAVED, resume=True)
    seen = counted(resumed)
    result = resumed.train()
    assert len(seen) == 2 * (12 + 12), "every answer of training and held-out pairs"
    assert all(torch.equal(value, result.model.state_dict()[name]) for name, value in whole.model.state_dict().items())


def test_a_reference_without_finite_numbers_stops_the_run(train: Any) -> None:
    trainer = train()
    reference = trainer.worker._tables._reference

    def forward(batch: Any) -> Any:
        found = reference.forward(batch)
        return replace(found, token={"logprobs": found.token["logprobs"] / 0})

    trainer.worker._tables._reference = replace(reference, forward=forward)
    with pytest.raises(UserError, match="finite"):
        trainer.train()
    assert not (trainer.path / "reference").exists()


# What is refused -----------------------------------------------------------------------------------------


def test_what_does_not_fit_together(train: Any, causal_lm: Any, tokenizer: Any, pairs: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="looks at the policy alone"):
        train(loss=SimPOLoss(), other=causal_lm(seed=4))
    with pytest.raises(UserError, match="reference's vocabulary is smaller"):
        train(other=causal_lm(seed=4, vocab_size=15))
    with pytest.raises(UserError, match=r"train\.token_budget is too small"):
        train(train=TrainConfig(token_budget=12))
    with pytest.raises(UserError, match=r"train\.forward_token_budget is too small"):
        train(train=TrainConfig(forward_token_budget=8))
    with pytest.raises(UserError, match="all rows have the same prompt"):
        train(loss=KTOLoss(), held_out=[{**pair, "prompt": "1+1="} for pair in pairs])
    with pytest.raises(UserError, match="no evaluation data"):
        PreferenceTrainer(
            PreferenceRecipe(**COMMON, output_dir=str(tmp_path / "none")),
            model=causal_lm(), tokenizer=tokenizer, rows=pairs,
        ).evaluate()  # fmt: skip


def test_the_users_model_is_given_back(train: Any, causal_lm: Any) -> None:
    model = causal_lm()
    train(model=model, steps=1).train()
    with torch.no_grad():
        assert model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()
    with pytest.raises(UserError, match="token_budget"):
        train("other", model=model, train=TrainConfig(token_budget=12))
    with torch.no_grad():
        assert model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


def test_of_many_rows_the_reference_scores_those_that_are_drawn(
    train: Callable[..., PreferenceTrainer], pairs: Any, tmp_path: Path
) -> None:
    """A run that begins before all rows are checked: its two steps draw eight of twelve."""
    whole = train("whole", steps=2).train()
    few = train("few", steps=2, data=DataConfig(check_rows=5)).train()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, few.model.state_dict()[name]), name
    answers = load_file(tmp_path / "few" / "reference" / "training.safetensors")["answers"]
    assert answers.shape == (12, 2) and int(answers.isfinite().all(1).sum()) == 8
    longer = train("few", steps=3, data=DataConfig(check_rows=5), resume=True).train()
    for name, value in train("three", steps=3).train().model.state_dict().items():
        assert torch.equal(value, longer.model.state_dict()[name]), name
