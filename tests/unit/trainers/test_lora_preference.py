"""Preference training with adapters: the reference is the model without them, whatever they have learned."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quartet.config.common import CheckpointConfig, LoRAConfig, OptimConfig, TrainConfig
from quartet.config.preference import DPOLoss, KTOLoss, PreferenceRecipe
from quartet.config.run import LogConfig
from quartet.models.packed_model import PackedCausalLM
from quartet.train.checkpoint import CheckpointShare
from quartet.train.forward import ForwardNeeds, forward_only
from quartet.train.objectives import answer_logprobs
from quartet.trainers.preference import PreferenceTrainer

TRAIN = TrainConfig(optim=OptimConfig(lr=1e-2), lora=LoRAConfig(rank=4, alpha=8.0))
EQUAL = {"atol": 1e-4, "rtol": 1e-5}


@pytest.fixture
def train(causal_lm: Any, tokenizer: Any, pairs: Any, tmp_path: Path) -> Callable[..., PreferenceTrainer]:
    def make(path: str = "run", *, resume: bool = False, **changes: Any) -> PreferenceTrainer:
        values: dict[str, Any] = {
            "output_dir": str(tmp_path / path), "train": TRAIN, "steps": 5, "pairs_per_step": 4, "threads": 1,
            "checkpoint": CheckpointConfig(every_steps=2), "log": LogConfig(tensorboard=False),
            "evaluate_every_steps": 100,
        }  # fmt: skip
        recipe = PreferenceRecipe(**{**values, **changes})
        objects = {"model": causal_lm(), "tokenizer": tokenizer, "rows": pairs, "evaluation_rows": pairs}
        return PreferenceTrainer(recipe, resume=resume, **objects)

    return make


def answers(model: Any, data: Any) -> Tensor:
    """``[rows, 2]`` log-probabilities of chosen and rejected answers under a model as it is."""
    packed = PackedCausalLM(model)
    batch = data.select(range(len(data)))
    totals, _ = answer_logprobs(
        forward_only(packed, batch, ForwardNeeds(logprobs=True), 10_000).token["logprobs"], batch
    )
    packed.release()
    return totals.view(-1, 2)


def learn(packed: Any) -> None:
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in packed.adapters.trained.values():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def test_the_reference_is_the_model_without_its_adapters(train: Any, causal_lm: Any) -> None:
    trainer = train()
    learn(trainer.worker.packed)
    reference, batch = trainer.worker._tables._reference, trainer.worker.data.select(range(len(trainer.worker.data)))
    found = answer_logprobs(reference.forward(batch).token["logprobs"], batch)[0].view(-1, 2)
    learned = answer_logprobs(
        trainer.worker.engine.forward(batch, ForwardNeeds(logprobs=True)).token["logprobs"], batch
    )[0]
    torch.testing.assert_close(found, answers(causal_lm(), trainer.worker.data), **EQUAL)
    assert float((learned.view(-1, 2) - found).abs().max()) > 0.1, "adapters that do something"


def test_figures_are_those_of_the_base_and_the_merged_model(train: Any, untimed: Any, causal_lm: Any) -> None:
    trainer = train(loss=DPOLoss(beta=0.3), steps=12)
    result = trainer.train()
    rows = untimed(trainer.path)
    assert rows[0]["loss/preference"] == pytest.approx(math.log(2), abs=1e-5), "the policy starts as its reference"
    base, merged = (answers(model, trainer.worker.data) for model in (causal_lm(), result.model))
    table = load_file(trainer.path / "reference" / "training.safetensors")
    torch.testing.assert_close(table["answers"], base, **EQUAL)
    chosen, rejected = (0.3 * (merged - base)).unbind(1)
    metrics = result.summary["stages"][0]["metrics"]
    assert metrics["eval/loss"] == pytest.approx(
        float(-torch.nn.functional.logsigmoid(chosen - rejected).mean()), abs=1e-4
    )
    assert metrics["eval/reward_chosen"] == pytest.approx(float(chosen.mean()), abs=1e-4)
    assert metrics["eval/margin"] > 0.1 and metrics["eval/loss"] < rows[0]["loss/preference"] - 0.05
    saved = CheckpointShare(trainer.path / "checkpoints" / "step_00000012" / "engine").shapes
    assert saved and all(".lora_" in name for name in saved)
    assert (trainer.path / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("loss", [KTOLoss()], ids=lambda loss: loss.name)
def test_a_run_that_breaks_off_ends_with_the_same_bits(loss: Any, train: Any, break_off: Any, untimed: Any) -> None:
    whole = train("whole", loss=loss).train()
    break_off(train("broken", loss=loss), 3)
    resumed = train("broken", loss=loss, resume=True).train()
    found = resumed.model.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in whole.model.state_dict().items())
    assert untimed(resumed.path) == untimed(whole.path)
