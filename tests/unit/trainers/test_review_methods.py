"""Methods in whole runs: what a resumed run remembers, what is refused or said before one starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from breaking import break_at, same_weights, untimed_rows
from quartet.config.algorithms import GRPO, RLOO, KLConfig, OnlineDPO
from quartet.config.common import CheckpointConfig, LoRAConfig, OptimConfig, TrainConfig
from quartet.config.recipe import ActorConfig, ReferenceConfig
from quartet.trainers.rl import RLTrainer


@pytest.fixture
def trainer(tiny_rl: Callable[..., RLTrainer], digits: Any, tmp_path: Path) -> Callable[..., RLTrainer]:
    def make(path: str, algorithm: Any, **changes: Any) -> RLTrainer:
        values = {"steps": 4, "prompts_per_step": 4, "responses_per_prompt": 2, **changes}
        saved = CheckpointConfig(every_steps=1)
        return tiny_rl(tmp_path / path, digits, algorithm=algorithm, checkpoint=saved, **values)

    return make


# The adaptive coefficient --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm",
    [
        RLOO(kl=KLConfig(coef=0.1, target=0.02, horizon=16)),
        GRPO(kl=KLConfig(coef=0.1, target=0.02, horizon=16, place="loss", estimator="k3")),
    ],
    ids=["reward", "loss"],
)
def test_the_adaptive_coefficient_goes_on_where_a_run_stopped(algorithm: Any, trainer: Any) -> None:
    whole = trainer("whole", algorithm)
    whole.train()
    coefficients = [row["kl/coef"] for row in untimed_rows(whole.path)[1:]]
    assert coefficients[0] == 0.1 and len(set(coefficients)) >= 3, "it moves"
    broken = trainer("broken", algorithm)
    break_at(3, broken.roles.actor)
    with pytest.raises(RuntimeError, match="on purpose"):
        broken.train()
    resumed = trainer("broken", algorithm, resume=True)
    resumed.train()
    assert untimed_rows(resumed.path)[1:] == untimed_rows(whole.path)[1:]
    assert same_weights(resumed.roles.actor.packed.model, whole.roles.actor.packed.model)


# Iterative DPO -------------------------------------------------------------------------------------------


def test_with_adapters_the_reference_takes_over_the_merged_weights(
    trainer: Any, causal_lm: Any, tmp_path: Path
) -> None:
    causal_lm().save_pretrained(tmp_path / "start")
    adapted = ActorConfig(train=TrainConfig(optim=OptimConfig(lr=3e-2), lora=LoRAConfig(rank=4)))
    run = trainer(
        "run", OnlineDPO(refresh_steps=2), actor=adapted, reference=ReferenceConfig(path=str(tmp_path / "start"))
    )
    run.train()
    rows = untimed_rows(run.path)[1:]
    assert [row["reference/age"] for row in rows] == [1, 0, 1, 0]
    assert abs(rows[0]["kl/ref"]) < 1e-5 and abs(rows[2]["kl/ref"]) < 1e-5, "it is what the actor is"
    assert abs(rows[1]["kl/ref"]) > 1e-4 and abs(rows[3]["kl/ref"]) > 1e-4, "and stays when the actor goes on"


# Before a run starts -------------------------------------------------------------------------------------


# Figures -------------------------------------------------------------------------------------------------
