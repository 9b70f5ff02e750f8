"""Tiny models and data of the quickstart's vocabulary, as objects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from quartet.config.common import OptimConfig, SamplingConfig, TrainConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.recipe import ActorConfig, LogConfig, RLRecipe, RolloutConfig
from quartet.extras.quickstart import task
from quartet.extras.quickstart.tokenizer import build_tokenizer
from quartet.observe.trackers import read_metrics
from quartet.trainers.rl import RLTrainer


@pytest.fixture
def break_off() -> Callable[[Any, int], None]:
    """Trains a supervised job in this process until it has made so many updates, and lets it fail there."""

    class Stopped(RuntimeError):
        pass

    def run(trainer: Any, num_updates: int) -> None:
        engine = trainer.worker.engine
        step = engine.train_step

        def breaks(*arguments: Any) -> Any:
            if engine.num_updates == num_updates:
                raise Stopped
            return step(*arguments)

        engine.train_step = breaks
        with pytest.raises(Stopped):
            trainer.train()

    return run


@pytest.fixture
def untimed() -> Callable[[Path], list[dict[str, float]]]:
    """The rows of a run's metrics without those that measure seconds."""

    def rows(path: Path) -> list[dict[str, float]]:
        found = read_metrics(path / "metrics.jsonl")
        timed = ("time_s", "time/", "throughput/", "memory/")
        return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in found]

    return rows


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def _config(tokenizer: PreTrainedTokenizerFast, **changes: Any) -> Qwen2Config:
    values: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }
    return Qwen2Config(**{**values, **changes})


@pytest.fixture
def causal_lm(tokenizer: PreTrainedTokenizerFast) -> Callable[..., Qwen2ForCausalLM]:
    def make(seed: int = 0, **changes: Any) -> Qwen2ForCausalLM:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Qwen2ForCausalLM(_config(tokenizer, **changes)).eval()

    return make


@pytest.fixture
def scalar_model(tokenizer: PreTrainedTokenizerFast) -> Callable[..., Qwen2ForSequenceClassification]:
    def make(seed: int = 1, **changes: Any) -> Qwen2ForSequenceClassification:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Qwen2ForSequenceClassification(_config(tokenizer, num_labels=1, **changes)).eval()

    return make


@pytest.fixture
def digits() -> Callable[..., list[float]]:
    """A reward function: the share of characters that are digits."""

    def share_of_digits(completions: list[str], **_: Any) -> list[float]:
        return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]

    return share_of_digits


@pytest.fixture
def tiny_rl(causal_lm: Any, tokenizer: Any, prompts: Any) -> Callable[..., RLTrainer]:
    """Makes an RL trainer of the tiny model; a recipe's ``values`` go over those that keep tests quick."""

    def make(
        path: Path,
        *rewards: Any,
        resume: bool = False,
        model: Any = None,
        critic_model: Any = None,
        ptx_rows: Any = None,
        callbacks: Any = (),
        **values: Any,
    ) -> RLTrainer:
        common: dict[str, Any] = {
            "output_dir": str(path),
            "actor": ActorConfig(train=TrainConfig(optim=OptimConfig(lr=1e-2))),
            "rollout": RolloutConfig(
                sampling=SamplingConfig(max_new_tokens=5), engine=NativeEngineConfig(max_running=8)
            ),
            "log": LogConfig(tensorboard=False),
            "threads": 1,
        }
        objects = {"model": model or causal_lm(), "tokenizer": tokenizer, "rewards": rewards, "prompts": prompts}
        recipe = RLRecipe(**{**common, **values})
        objects |= {"callbacks": callbacks, "ptx_rows": ptx_rows, "critic": critic_model}
        return RLTrainer(recipe, resume=resume, **objects)

    return make


@pytest.fixture
def prompts() -> list[str]:
    return task.toy_prompts(0, 12)


@pytest.fixture
def demonstrations() -> list[dict[str, str]]:
    return [dict(row) for row in task.toy_demonstrations(0, 24)]


@pytest.fixture
def pairs(prompts: list[str]) -> list[dict[str, str]]:
    return [
        {"prompt": p, "chosen": task.work(*task.operands(p)), "rejected": task.work(*task.operands(p), "eager")}
        for p in prompts
    ]
