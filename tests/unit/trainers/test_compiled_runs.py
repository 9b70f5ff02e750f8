"""A run with compiled layers that is resumed ends with the bits of one that was not stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.config.common import OptimConfig, TrainConfig
from quartet.config.recipe import CheckpointConfig, LogConfig, SFTRecipe
from quartet.trainers.sft import SFTTrainer


class Stopped(RuntimeError):
    pass


@pytest.mark.slow
def test_compiled_layers_keep_their_bits_over_a_stop(
    causal_lm: Any, tokenizer: Any, demonstrations: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Code compiled for the first run must not serve the others: another process may not find it.
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)

    def sft(name: str, *, resume: bool = False) -> SFTTrainer:
        torch._dynamo.reset()
        recipe = SFTRecipe(
            threads=1,
            train=TrainConfig(optim=OptimConfig(lr=5e-3), compile=True),
            checkpoint=CheckpointConfig(every_steps=2),
            log=LogConfig(tensorboard=False),
            steps=4,
            examples_per_step=6,
            output_dir=str(tmp_path / name),
        )
        return SFTTrainer(recipe, model=causal_lm(), tokenizer=tokenizer, rows=demonstrations, resume=resume)

    whole = sft("whole").train()
    broken: Any = sft("broken")
    step = broken.engine.train_step

    def breaks(*arguments: Any) -> Any:
        if broken.engine.num_updates == 3:
            raise Stopped
        return step(*arguments)

    broken.engine.train_step = breaks
    with pytest.raises(Stopped):
        broken.train()
    resumed = sft("broken", resume=True).train()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
