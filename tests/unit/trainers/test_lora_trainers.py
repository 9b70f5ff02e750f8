"""Jobs with adapters: the reference is the actor without them, its passes disturb nobody, runs resume and export."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from quartet.config import UserError
from quartet.config.algorithms import GRPO, PPO, KLConfig
from quartet.config.common import CheckpointConfig, LoRAConfig, OptimConfig, SamplingConfig, TrainConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.recipe import (
    ActorConfig,
    CriticConfig,
    ReferenceConfig,
    RewardModelRecipe,
    RLRecipe,
    RolloutConfig,
    SFTRecipe,
)
from quartet.config.run import LogConfig
from quartet.models.loading import packed_causal_lm
from quartet.observe.spans import SpanRecorder
from quartet.observe.trackers import read_metrics
from quartet.rollout.engine import NativeEngine
from quartet.schedule.leases import LeaseContext, default_arbiter
from quartet.schedule.role_group import LocalGroup
from quartet.schedule.rollout import RolloutDriver
from quartet.schedule.rollout_worker import RolloutWorker
from quartet.schedule.weight_sync import CanarySpec
from quartet.train.checkpoint import CheckpointShare
from quartet.trainers.model_loader import UserObjects
from quartet.trainers.rl import RLTrainer
from quartet.trainers.roles import RLRoles
from quartet.trainers.supervised import RewardModelTrainer, SFTTrainer

LORA = LoRAConfig(rank=4, alpha=8.0)
TRAIN = TrainConfig(optim=OptimConfig(lr=1e-2), lora=LORA)
KL = KLConfig(coef=0.1, place="loss")


def rl(algorithm: Any = None, **changes: Any) -> RLRecipe:
    values: dict[str, Any] = {
        "algorithm": algorithm or GRPO(kl=KL),
        "actor": ActorConfig(train=TRAIN),
        "critic": CriticConfig(train=TRAIN),
        "rollout": RolloutConfig(
            sampling=SamplingConfig(max_new_tokens=6), engine=NativeEngineConfig(max_running=8, steps_per_lease=1)
        ),
        "steps": 2,
        "prompts_per_step": 4,
        "responses_per_prompt": 2,
        "chunk_size": 1,
        "log": LogConfig(tensorboard=False),
        "threads": 1,
    }
    return RLRecipe(**{**values, **changes})


@pytest.fixture
def objects(causal_lm: Any, tokenizer: Any, prompts: Any, digits: Any) -> Callable[..., dict[str, Any]]:
    def make(**changes: Any) -> dict[str, Any]:
        own = {"model": causal_lm(), "tokenizer": tokenizer, "prompts": prompts, "rewards": [digits]}
        return {**own, **changes}

    return make


@pytest.fixture
def roles_of(objects: Any) -> Callable[..., RLRoles]:
    def make(recipe: RLRecipe, shares_reference: bool = True, **changes: Any) -> RLRoles:
        return RLRoles(recipe, UserObjects(**objects(**changes)), shares_reference=shares_reference)

    return make


# Roles ---------------------------------------------------------------------------------------------------


def test_the_reference_is_the_actor_without_its_adapters(roles_of: Any, causal_lm: Any, tmp_path: Path) -> None:
    roles = roles_of(rl())
    assert roles.reference is roles.actor.packed and roles.shares_reference
    assert roles.models() == [roles.actor.packed], "held once, given back once"
    assert roles_of(rl(GRPO())).reference is None
    causal_lm(3).save_pretrained(tmp_path / "other")
    elsewhere = roles_of(rl(reference=ReferenceConfig(path=str(tmp_path / "other"))))
    assert not elsewhere.shares_reference and len(elsewhere.models()) == 2


def test_a_critic_starts_from_the_actors_base(roles_of: Any) -> None:
    roles = roles_of(rl(PPO(kl=KL)))
    with roles.actor.packed.without_adapters(), roles.critic.packed.without_adapters():
        body = roles.critic.packed.model.model.state_dict()
        for name, value in roles.actor.packed.model.model.state_dict().items():
            assert torch.equal(value, body[name]), name


# Exclusive -----------------------------------------------------------------------------------------------


def leases_of(roles: RLRoles, path: Path, version: int = 0) -> LeaseContext:
    sizes = {"rollout": {"generate": 0}, **{name: worker.sizes() for name, worker in roles.workers.items()}}
    return LeaseContext(default_arbiter(sizes, version=version), SpanRecorder(path / f"{version}.jsonl"))


def test_the_reference_reads_the_actor_which_is_not_trained_meanwhile(roles_of: Any, tmp_path: Path) -> None:
    roles = roles_of(rl())
    order: list[str] = []

    async def run() -> None:
        leases = leases_of(roles, tmp_path)
        reference: Any = next(s for s in roles.column_scorers(leases) if getattr(s, "role", "") == "reference")
        assert dict(reference.reads) == {"actor": None}
        async with leases.arbiter.lease("reference", "forward", reads=reference.reads):
            training = asyncio.create_task(train(leases.arbiter))
            await asyncio.sleep(0)
            order.append("reference")
        await training

    async def train(arbiter: Any) -> None:
        async with arbiter.lease("actor", "train", writes="actor"):
            order.append("train")

    asyncio.run(run())
    assert order == ["reference", "train"]


# Runs ----------------------------------------------------------------------------------------------------


def test_a_run_starts_at_no_kl_and_leaves_model_and_adapter(objects: Any, causal_lm: Any, tmp_path: Path) -> None:
    base = causal_lm()
    base.save_pretrained(tmp_path / "base")
    recipe = rl(output_dir=str(tmp_path / "run"))
    result = RLTrainer(recipe, **objects(model=base)).train()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    first, second = rows[-2:]
    assert abs(first["kl/ref"]) < 1e-6 < 1e-4 < abs(second["kl/ref"]), "a fresh actor is its reference"
    assert max(row["agreement/canary_diff"] for row in rows[-2:]) < 1e-4
    assert any("LoRA of rank 4" in note for note in result.summary["notes"])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.PeftModel.from_pretrained(copy.deepcopy(original), tmp_path / "run" / "adapter")
    ids = torch.tensor([[3, 5, 7, 4, 6]])
    with torch.no_grad():
        expected = result.model(ids).logits
        assert torch.equal(merged.eval()(ids).logits, expected), "what is given back is what was saved"
        torch.testing.assert_close(adapted.eval()(ids).logits, expected, atol=1e-5, rtol=1e-5)
        assert float((original.eval()(ids).logits - expected).abs().max()) > 1e-3
    saved = CheckpointShare(tmp_path / "run" / "checkpoints" / "step_00000002" / "actor").shapes
    assert saved and all(".lora_" in name for name in saved)


def test_a_resumed_run_has_the_same_bits(objects: Any, causal_lm: Any, tmp_path: Path) -> None:
    critic = CriticConfig(train=TRAIN.model_copy(update={"lora": LoRAConfig(rank=2, target_modules=("q_proj",))}))
    values: dict[str, Any] = {"critic": critic, "minibatches": 2, "checkpoint": CheckpointConfig(every_steps=1)}

    def run(name: str, steps: int, **changes: Any) -> dict[str, Any]:
        recipe = rl(PPO(kl=KL), output_dir=str(tmp_path / name), steps=steps, **values)
        RLTrainer(recipe, **objects(model=causal_lm()), **changes).train()
        return {
            role: CheckpointShare(tmp_path / name / "checkpoints" / f"step_{steps:08d}" / role).state()
            for role in ("actor", "critic")
        }

    whole = run("whole", 3)
    trainer = RLTrainer(rl(PPO(kl=KL), output_dir=str(tmp_path / "parts"), steps=3, **values), **objects())
    saves = trainer._save

    async def stop(at: Any) -> None:
        await saves(at)
        if at.step == 2:
            raise KeyboardInterrupt

    trainer._save = stop  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    resumed = run("parts", 3, resume=True)
    for role in ("actor", "critic"):
        rest, expected = resumed[role].pop("rest"), whole[role].pop("rest")
        if role == "critic":
            assert torch.equal(rest.pop("seen_token_ids"), expected.pop("seen_token_ids"))
        assert rest == expected
        for name, value in whole[role].items():
            assert torch.equal(value, resumed[role][name]), name
    with pytest.raises(UserError, match="trained on another base model"):
        recipe = rl(PPO(kl=KL), output_dir=str(tmp_path / "parts"), steps=3, critic=critic, minibatches=2)
        RLTrainer(recipe, **objects(model=causal_lm(9)), resume=True).train()


def learn(packed: Any) -> None:
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in packed.adapters.trained.values():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))


def test_a_canary_hears_adapters_that_were_not_sent(roles_of: Any, causal_lm: Any, tmp_path: Path) -> None:
    """An engine with a base copy of its own, and updates of adapters alone."""
    roles = roles_of(rl())
    learn(roles.actor.packed)
    own = packed_causal_lm(causal_lm(), lora=LORA)
    sent: dict[str, Any] = {"source": lambda: list(roles.actor.weights())}

    async def publish(version: int) -> dict[str, float]:
        engine = NativeEngine(own, owns_weights=True, version=version - 1)

        async def update_engine_weights(version: int) -> int:
            engine.update_weights(sent["source"](), version)
            return 0

        rollout = RolloutDriver(
            leases_of(roles, tmp_path, version),
            [LocalGroup(RolloutWorker(engine, roles.codec))],
            roles.requests,
            steps_per_lease=4,
            version=version,
            canary=CanarySpec(roles.prompts.items[0].prompt, 4, 1e-4),
            trainer=roles.train_group("actor"),
            update_engine_weights=update_engine_weights,
            shares_actor=False,
        )
        return await rollout.publish(version)

    assert asyncio.run(publish(1))["agreement/canary_diff"] < 1e-4
    old = [(name, value.clone()) for name, value in roles.actor.weights()]
    learn(roles.actor.packed)
    sent["source"] = lambda: old
    with pytest.raises(UserError, match="computes with other weights"):
        asyncio.run(publish(2))


@pytest.mark.parametrize("export", ["both"])
def test_sft_with_adapters(export: Any, causal_lm: Any, tokenizer: Any, demonstrations: Any, tmp_path: Path) -> None:
    lora = LORA.model_copy(update={"export": export})
    train = TrainConfig(optim=OptimConfig(lr=1e-2), lora=lora)
    recipe = SFTRecipe(
        output_dir=str(tmp_path / "run"), train=train, steps=6, examples_per_step=8, threads=1,
        log=LogConfig(tensorboard=False),
    )  # fmt: skip
    result = SFTTrainer(recipe, model=causal_lm(), tokenizer=tokenizer, rows=demonstrations).train()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["loss/sft"] < rows[0]["loss/sft"] - 0.05
    present = {name for name in ("model", "adapter") if (tmp_path / "run" / name).exists()}
    assert present == ({"model", "adapter"} if export == "both" else {"model" if export == "merged" else "adapter"})
    assert not any(type(m).__module__.startswith("peft") for m in result.model.modules())


def test_a_reward_model_with_adapters(causal_lm: Any, tokenizer: Any, pairs: Sequence[Any], tmp_path: Path) -> None:
    recipe = RewardModelRecipe(
        output_dir=str(tmp_path / "run"), train=TRAIN, steps=6, pairs_per_step=6, threads=1,
        log=LogConfig(tensorboard=False),
    )  # fmt: skip
    result = RewardModelTrainer(recipe, model=causal_lm(), tokenizer=tokenizer, rows=pairs).train()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["loss/reward_model"] < rows[0]["loss/reward_model"] - 0.05
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert torch.equal(merged.score.weight, result.model.score.weight)
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()


def test_a_critic_on_the_actors_own_body_is_refused(roles_of: Any, causal_lm: Any, scalar_model: Any) -> None:
    actor, critic = causal_lm(), scalar_model()
    critic.model = actor.model
    with pytest.raises(UserError, match="the critic shares weights with the actor") as caught:
        roles_of(rl(PPO(kl=KL)), model=actor, critic=critic)
    assert "first model." in caught.value.found
