"""Models of an RL run that cannot be cut as its recipe says are refused by the driver, before Ray is asked.

Workers that died are made anew so often, and no more.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from quartet.cluster import WorkerDied, WorkerError
from quartet.cluster.errors import WorkerDeath, WorkerFailure
from quartet.cluster.group import DeathCount
from quartet.config import UserError
from quartet.config.recipe import RLRecipe
from quartet.trainers.model_loader import UserObjects
from quartet.trainers.rl import RLTrainer
from quartet.trainers.roles import RLRoles
from quartet.trainers.workers import RayRunWorkers

NOWHERE = {"type": "ray", "address": "127.0.0.1:1"}


SAYS = {
    "tensor": ("sharding.tensor: 3; 2 attention heads", "choose a divisor of all of these"),
    "context": ("2 heads, sharding.tensor 1 × sharding.context 3 = 3", "choose tensor × context among 1, 2"),
    "pipeline": ("sharding.pipeline: 3, 2 layers", "choose 2 stages or fewer"),
}


@pytest.mark.parametrize("axis", SAYS)
@pytest.mark.parametrize("role", ["actor", "critic", "reference", "reward"])
def test_every_role_of_rl(
    role: str, axis: str, causal_lm: Any, scalar_model: Any, tokenizer: Any, prompts: Any, tmp_path: Path
) -> None:
    scalar_model().save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")
    reward: dict[str, Any] = {"type": "model", "path": str(tmp_path / "rm")}
    sizes = {axis: 3}
    values = {role: {"sharding": sizes}} if role != "reward" else {}
    recipe = RLRecipe(
        algorithm={"name": "ppo"},
        cluster=NOWHERE,
        placement={"type": "full_offload", "pool": {"processes": 3}},
        rewards=[reward | ({"sharding": sizes} if role == "reward" else {})],
        **values,
    )
    objects = UserObjects(causal_lm(), tokenizer, prompts=prompts).on_meta()
    with pytest.raises(UserError, match=rf"^{role}(_model)?: ") as raised:
        RLRoles(recipe, objects)
    found, remedy = SAYS[axis]
    assert found in raised.value.found and remedy in raised.value.remedy, str(raised.value)


def test_a_family_whose_layers_cannot_be_cut(tokenizer: Any, prompts: Any, digits: Any) -> None:
    """Its layers read embeddings of their own."""
    config = Gemma4TextConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, hidden_size_per_layer_input=4, vocab_size_per_layer_input=len(tokenizer),
    )  # fmt: skip
    recipe = RLRecipe(
        algorithm={"name": "rloo", "kl": {"coef": 0.0}},
        cluster=NOWHERE,
        placement={"type": "full_offload", "pool": {"processes": 2}},
        actor={"sharding": {"pipeline": 2}},
    )
    objects = UserObjects(Gemma4ForCausalLM(config), tokenizer, prompts=prompts, rewards=[digits]).on_meta()
    with pytest.raises(UserError, match=r"^actor: Gemma4ForCausalLM cannot be cut into pipeline stages") as raised:
        RLRoles(recipe, objects)
    assert raised.value.remedy == "set sharding.pipeline to 1, and use sharding.shard, tensor or context"


def test_a_worker_that_cannot_be_made_anew_ends_the_run_after_its_restarts() -> None:
    """It was asked for ever whether it lives."""
    restarts = []

    def restart() -> None:
        restarts.append(1)
        raise WorkerError(WorkerFailure("trained", 0, 1, "here", "trained.__init__", "OSError: no such model", ""))

    death = WorkerDeath("trained", 0, None, "here", "starting", "OSError: no such model")
    workers: Any = RayRunWorkers.__new__(RayRunWorkers)
    workers._groups = {"trained": SimpleNamespace(dead=lambda timeout_s: [death], restart=restart)}
    workers._count, workers._changing = DeathCount(3), {"actor"}
    workers.placement = SimpleNamespace(pool_of=dict.fromkeys(("actor", "rollout"), "trained"))
    trainer: Any = RLTrainer.__new__(RLTrainer)
    trainer.workers, trainer._loop = workers, None
    trainer.run = SimpleNamespace(check_stop=lambda step: None)
    with pytest.raises(UserError, match="died more often") as caught:
        asyncio.run(asyncio.wait_for(trainer._after_death(WorkerDied(death)), 60))
    assert len(restarts) == 3
    assert caught.value.found == (
        "death 4, cluster.max_restarts is 3; rank 0 of group 'trained' died: OSError: no such model (actor, rollout)"
    )
