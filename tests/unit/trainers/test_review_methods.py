"""Methods in whole runs: what a resumed run remembers, what is refused or said before one starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from breaking import break_at, same_weights, untimed_rows
from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.config import UserError
from quartet.config.algorithms import GPG, GRPO, PPO, RLOO, Distillation, KLConfig, OnlineDPO
from quartet.config.common import CheckpointConfig, LoRAConfig, OptimConfig, TrainConfig
from quartet.config.recipe import ActorConfig, CriticConfig, ReferenceConfig
from quartet.schedule.iteration import Chunk
from quartet.trainers.experience import Assembler
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


def test_a_reference_of_another_size_takes_over_no_weights(trainer: Any, causal_lm: Any, tmp_path: Path) -> None:
    causal_lm(num_hidden_layers=1).save_pretrained(tmp_path / "small")
    other = ReferenceConfig(path=str(tmp_path / "small"))
    trainer("fixed", OnlineDPO(), reference=other)
    with pytest.raises(UserError, match="cannot take over") as caught:
        trainer("run", OnlineDPO(refresh_steps=2), reference=other)
    assert "layers.1." in caught.value.found
    assert not (tmp_path / "run").exists()


# Before a run starts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [True, False])
def test_a_pair_of_responses_has_to_fit_the_budget(share: bool, trainer: Any) -> None:
    def with_budget(name: str, tokens: int) -> RLTrainer:
        train = TrainConfig(token_budget=tokens, share_prefixes=share)
        return trainer(name, OnlineDPO(), actor=ActorConfig(train=train))

    prompt = max(item.num_tokens for item in with_budget("large", 1000).roles.prompts.items)
    needed = (1 if share else 2) * prompt + 2 * 5
    with pytest.raises(UserError, match="token_budget is too small") as caught:
        with_budget("small", needed - 1)
    assert f"{needed} tokens" in caught.value.found
    with_budget("enough", needed)


def test_a_reference_with_a_short_context_is_refused(trainer: Any, causal_lm: Any, tmp_path: Path) -> None:
    causal_lm(1, max_position_embeddings=6).save_pretrained(tmp_path / "short")
    with pytest.raises(UserError, match="reference's context is too short"):
        trainer("run", Distillation(), reference=ReferenceConfig(path=str(tmp_path / "short")))


def test_a_critic_that_is_not_read_is_refused_and_its_section_remarked_on(
    trainer: Any, scalar_model: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="the method does not have"):
        trainer("refused", GRPO(), critic_model=scalar_model())
    assert not (tmp_path / "refused").exists()
    run = trainer("said", GRPO(), critic=CriticConfig(warmup_steps=1), steps=1)
    assert run.train().summary["notes"][0] == "critic: not read, grpo has none"
    assert not any("not read" in warning for warning in trainer("ppo", PPO()).roles.warnings())


# Figures -------------------------------------------------------------------------------------------------


def _one_step(config: Any, scores: list[float] | None) -> dict[str, float]:
    """Two groups of two one-token responses."""
    batch = RaggedBatch.from_groups([[5], [6]], [[[7], [8]]] * 2, ["0.0", "0.1", "1.0", "1.1"])
    mask = batch.sequence_index() >= 0
    zeros = torch.zeros(batch.num_tokens)
    batch = batch.with_token(action_mask=mask, loss_mask=mask, rollout_logprobs=zeros).with_sequence(
        group=torch.tensor([0, 0, 1, 1]), response=torch.tensor([0, 1, 0, 1]), ended=torch.ones(4, dtype=torch.bool)
    )
    columns = [ColumnSet(batch.ids, {"ref_logprobs": mask.float()})]
    columns += [ColumnSet(batch.ids, sequence={"reward/score": torch.tensor(scores)})] if scores else []
    assembler = Assembler(config, {"score": 1.0} if scores else {}, lambda: 0.0)
    experience = assembler([(Chunk(0, 0, batch), columns)])
    return {**experience.metrics, "largest": float(experience.batch.token["advantages"].max())}


def test_without_rewards_no_group_is_said_to_lack_variance() -> None:
    assert "groups/zero_variance" not in _one_step(Distillation(), None)
    assert _one_step(Distillation(), [1.0, 1.0, 0.0, 1.0])["groups/zero_variance"] == 0.5


def test_gpg_grows_by_the_share_of_groups_without_variance() -> None:
    scores = [1.0, 1.0, 0.0, 1.0]
    assert _one_step(GPG(), scores)["largest"] == 1.0
    assert _one_step(GPG(rescale=False), scores)["largest"] == 0.5
    assert _one_step(GRPO(normalise_std=False), scores)["largest"] == 0.5
