"""Jobs by their recipe's `device`: where they compute, in which precision, and that they go on elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu


def sft(path: Path, **changes: Any) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from quartet.config.common import TrainConfig
    from quartet.config.recipe import CheckpointConfig, LogConfig, SFTRecipe
    from quartet.extras.quickstart import task
    from quartet.extras.quickstart.tokenizer import build_tokenizer
    from quartet.trainers.supervised import SFTTrainer

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    resume = changes.pop("resume", False)
    train = TrainConfig(precision=changes.pop("precision", "auto"))
    recipe = SFTRecipe(
        **{"device": "cuda", "steps": 4, "examples_per_step": 6, "output_dir": str(path), "train": train, **changes},
        checkpoint=CheckpointConfig(every_steps=2),
        log=LogConfig(tensorboard=False),
    )
    rows = [dict(row) for row in task.toy_demonstrations(0, 24)]
    return SFTTrainer(recipe, model=Qwen2ForCausalLM(config), tokenizer=tokenizer, rows=rows, resume=resume)


def test_a_named_gpu_takes_the_model_and_auto_its_bf16(tmp_path: Path) -> None:
    trainer = sft(tmp_path / "run")
    assert trainer.packed.device == torch.device("cuda", 0) and trainer.packed.precision == "bf16"
    result = trainer.train()
    found = json.loads((result.path / "run.json").read_text())["resolved"]
    assert found["device"] == "cuda:0" and found["train.precision"] == "bf16" and found["gpu"]


def test_a_run_of_a_gpu_goes_on_on_the_cpu(tmp_path: Path) -> None:
    trainer = sft(tmp_path / "run", precision="fp32")
    step = trainer.engine.train_step

    def breaks(*arguments: Any) -> Any:
        if trainer.engine.num_updates == 3:
            raise RuntimeError("stopped")
        return step(*arguments)

    trainer.engine.train_step = breaks
    with pytest.raises(RuntimeError, match="stopped"):
        trainer.train()
    there = sft(tmp_path / "run", precision="fp32", device="cpu", resume=True).train()
    whole = sft(tmp_path / "whole", precision="fp32").train()
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(there.model.state_dict()[name], value.cpu(), rtol=1e-3, atol=1e-4)


def test_an_updates_forward_and_backward_never_wait(tmp_path: Path) -> None:
    trainer = sft(tmp_path / "run")
    engine, batch = trainer.engine, trainer.data.batch(0, 6, 0)
    engine.train_step(batch, trainer.objective)
    part, watches = engine._backward_part, []

    def watched(*arguments: Any) -> None:
        watches.append(arguments)
        torch.cuda.set_sync_debug_mode("error")
        try:
            part(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine._backward_part = watched
    engine.train_step(batch, trainer.objective)
    assert watches, "the update goes through what is watched"
