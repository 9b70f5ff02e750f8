"""The quickstart's model and recipes. Frozen: seeds are compared, so nothing here depends on one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quartet.config.algorithms import PPO, KLConfig
from quartet.config.common import DataConfig, ModelConfig, OptimConfig, SamplingConfig, TrainConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.recipe import (
    ActorConfig,
    CheckpointConfig,
    CriticConfig,
    EvaluationConfig,
    RewardModelRecipe,
    RLRecipe,
    RolloutConfig,
    SFTRecipe,
)
from quartet.config.rewards import ModelReward

MODEL = {
    "hidden_size": 192,
    "intermediate_size": 640,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 128,
}
"""1.0 M parameters."""
MAX_NEW_TOKENS = 48


@dataclass(frozen=True)
class Size:
    """How much of everything; learning rates and the like do not depend on it."""

    demonstrations: int = 20_000
    sft_steps: int = 312
    pair_prompts: int = 2_400
    responses_per_pair_prompt: int = 4
    reward_model_epochs: int = 3
    rl_prompts: int = 320
    rl_steps: int = 20
    evaluation_prompts: int = 500


FULL = Size()


def sft_recipe(size: Size, seed: int, path: Path, data: Path) -> SFTRecipe:
    return SFTRecipe(
        seed=seed,
        output_dir=str(path / "sft"),
        model=ModelConfig(path=str(path / "initial")),
        data=DataConfig(path=str(data)),
        train=TrainConfig(optim=OptimConfig(lr=3e-3, warmup_steps=20, schedule="cosine")),
        steps=size.sft_steps,
        examples_per_step=64,
        checkpoint=CheckpointConfig(every_steps=100, keep=1),
    )


def reward_model_recipe(size: Size, seed: int, path: Path, data: Path, held_out: Path) -> RewardModelRecipe:
    return RewardModelRecipe(
        seed=seed,
        output_dir=str(path / "reward_model"),
        model=ModelConfig(path=str(path / "sft" / "model")),
        data=DataConfig(path=str(data)),
        evaluation_data=DataConfig(path=str(held_out)),
        train=TrainConfig(optim=OptimConfig(lr=2e-3, warmup_steps=10, schedule="cosine")),
        epochs=size.reward_model_epochs,
        pairs_per_step=32,
        centring=0.01,
        checkpoint=CheckpointConfig(every_steps=50, keep=1),
    )


def rl_recipe(size: Size, seed: int, path: Path, prompts: Path, held_out: Path) -> RLRecipe:
    return RLRecipe(
        seed=seed,
        output_dir=str(path / "rl"),
        actor=ActorConfig(
            model=ModelConfig(path=str(path / "sft" / "model")),
            train=TrainConfig(optim=OptimConfig(lr=3e-4, warmup_steps=6, schedule="cosine", min_lr_ratio=0.1)),
        ),
        critic=CriticConfig(train=TrainConfig(optim=OptimConfig(lr=1e-3)), warmup_steps=2),
        rewards=(ModelReward(path=str(path / "reward_model" / "model")),),
        algorithm=PPO(kl=KLConfig(coef=0.2), missing_eos_penalty=1.0),
        data=DataConfig(path=str(prompts)),
        evaluation=EvaluationConfig(
            data=DataConfig(path=str(held_out), limit=64),
            every_steps=8,
            sampling=SamplingConfig(temperature=0.0, max_new_tokens=MAX_NEW_TOKENS),
        ),
        rollout=RolloutConfig(
            sampling=SamplingConfig(max_new_tokens=MAX_NEW_TOKENS),
            engine=NativeEngineConfig(max_running=64, steps_per_lease=4),
        ),
        steps=size.rl_steps,
        prompts_per_step=64,
        responses_per_prompt=4,
        minibatches=2,
        epochs=1,
        chunk_size=16,
        checkpoint=CheckpointConfig(every_steps=8, keep=1),
    )
