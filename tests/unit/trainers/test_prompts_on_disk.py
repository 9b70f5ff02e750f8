"""Reinforcement learning on prompts that are checked when they are drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quartet.config.common import DataConfig
from quartet.trainers.rl import RLTrainer


def test_a_run_is_that_on_prompts_checked_before(
    tmp_path: Path, tiny_rl: Callable[..., RLTrainer], digits: Any
) -> None:
    shape = {"steps": 3, "prompts_per_step": 4, "responses_per_prompt": 2, "minibatches": 1}
    runs = []
    for name, data in (("whole", None), ("few", DataConfig(check_rows=5))):
        runs.append(tiny_rl(tmp_path / name, digits, data=data, **shape))
        runs[-1].train()
    whole, few = (run.roles.actor.packed.model.state_dict() for run in runs)
    assert all(torch.equal(values, few[name]) for name, values in whole.items())
    assert any("the first 5 of 12 rows were checked" in text for text in runs[1].roles.warnings())
    assert runs[0].roles.prompts.seen == runs[1].roles.prompts.seen, "each of the twelve was drawn"
