"""Process-reward training: what it learns, held-out figures, what is saved, bad rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from quartet.config import UserError
from quartet.config.common import OptimConfig, TrainConfig
from quartet.config.run import LogConfig
from quartet.extras.process_rewards.config import ProcessRewardRecipe
from quartet.extras.process_rewards.data import load_step_separator
from quartet.extras.process_rewards.trainer import ProcessRewardTrainer


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Steps of three digits; a step is right where it ends in 7, 8 or 9."""
    draw = random.Random(0)
    found = []
    for n in range(48):
        steps = ["".join(draw.choice("123456789") for _ in range(3)) for _ in range(draw.randint(1, 4))]
        found.append({"prompt": f"{n}=", "steps": steps, "labels": [int(step[-1] in "789") for step in steps]})
    return found


def trainer(path: Path, model: Any, tokenizer: Any, rows: Any, *, resume: bool = False, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "threads": 1,
        "train": TrainConfig(optim=OptimConfig(lr=5e-3, warmup_steps=2, schedule="cosine"), token_budget=128),
        "log": LogConfig(tensorboard=False),
        "separator": ";",
        "steps": 5,
        "evaluate_every_steps": 2,
        "answers_per_step": 8,
        "output_dir": str(path),
    }
    recipe = ProcessRewardRecipe(**{**values, **changes})
    return ProcessRewardTrainer(
        recipe, model=model, tokenizer=tokenizer, rows=rows, evaluation_rows=rows[:12], resume=resume
    )


def plain_logits(model: Any, item: Any) -> list[float]:
    """The head on the hidden states at the ends of an item's steps, by the model alone."""
    with torch.no_grad():
        hidden = model.model(torch.tensor([item.prompt_ids + item.completion_ids])).last_hidden_state[0]
    states = hidden[[len(item.prompt_ids) + t for t in item.step_tokens]]
    return (states @ model.score.weight.detach().T).squeeze(-1).tolist()


def test_it_learns_to_tell_steps_apart_and_reports_what_the_model_alone_computes(
    causal_lm: Any, tokenizer: Any, rows: Any, tmp_path: Path
) -> None:
    made = trainer(tmp_path / "run", causal_lm(), tokenizer, rows, steps=60, evaluate_every_steps=60)
    before = made.evaluate()
    result = made.train()
    after = result.summary["stages"][0]["metrics"]
    assert after["eval/accuracy"] > 0.95 > before["eval/accuracy"]
    assert after["eval/loss"] < 0.25 < before["eval/loss"]
    assert after["process_reward/accuracy"] > 0.95
    items = made.worker.evaluation.items
    logits = torch.tensor([x for item in items for x in plain_logits(result.model, item)], dtype=torch.float64)
    labels = torch.tensor([label for item in items for label in item.labels], dtype=torch.float64)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    assert after["eval/loss"] == pytest.approx(float(loss), rel=1e-4)
    assert after["eval/accuracy"] == pytest.approx(float(((logits > 0) == (labels > 0.5)).double().mean()))


def test_what_is_saved_loads_with_from_pretrained_and_says_how_steps_end(
    causal_lm: Any, tokenizer: Any, rows: Any, tmp_path: Path
) -> None:
    made = trainer(tmp_path / "run", causal_lm(), tokenizer, rows, steps=2)
    result = made.train()
    path = tmp_path / "run" / "model"
    plain = AutoModelForSequenceClassification.from_pretrained(path).eval()
    assert plain.config.num_labels == 1
    for item in made.worker.data.items[:4]:
        assert plain_logits(plain, item) == pytest.approx(plain_logits(result.model, item), abs=1e-6)
    item = made.worker.data.items[0]
    with torch.no_grad():
        pooled = plain(torch.tensor([item.prompt_ids + item.completion_ids])).logits.item()
    assert pooled == pytest.approx(plain_logits(plain, item)[-1], abs=1e-6), "its own pooling is the last step's score"
    assert AutoTokenizer.from_pretrained(path).get_vocab() == tokenizer.get_vocab()
    assert load_step_separator(str(path)) == ";"


def test_bad_rows_stop_the_run_before_anything_is_written(
    causal_lm: Any, tokenizer: Any, rows: Any, tmp_path: Path
) -> None:
    wrong = [*rows[:3], {"prompt": "1=", "completion": "1;2", "labels": [1]}]
    with pytest.raises(UserError, match="step labels do not fit") as caught:
        trainer(tmp_path / "run", causal_lm(), tokenizer, wrong)
    assert "data passed from Python:4: 1 labels for 2 steps" in caught.value.found
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="token_budget is too small"):
        trainer(tmp_path / "run", causal_lm(), tokenizer, rows, train=TrainConfig(token_budget=5))
