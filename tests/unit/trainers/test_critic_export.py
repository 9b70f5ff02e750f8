"""The critic as a run writes it: it pads with a token that the policy has not produced, also before a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from breaking import fails_at
from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.config.algorithms import PPO, KLConfig
from quartet.config.common import CheckpointConfig, OptimConfig, TrainConfig
from quartet.config.recipe import CriticConfig
from quartet.models.packed_model import PackedScalarModel
from quartet.observe.rollouts import list_steps, read_step
from quartet.schedule.model_worker import CriticWorker, TrainWorker
from quartet.train.engine import TrainEngine
from quartet.trainers.rl import RLTrainer

VALUES: dict[str, Any] = {
    "algorithm": PPO(kl=KLConfig(coef=0.0)),
    "critic": CriticConfig(train=TrainConfig(optim=OptimConfig(lr=2e-2))),
    "steps": 2,
    "prompts_per_step": 4,
    "responses_per_prompt": 4,
    "checkpoint": CheckpointConfig(every_steps=1),
}


@pytest.fixture
def worker(scalar_model: Callable[..., Any]) -> Callable[[], CriticWorker]:
    def make() -> CriticWorker:
        return CriticWorker(TrainEngine(PackedScalarModel(scalar_model()), TrainConfig(), total_steps=1))

    return make


def pad_of(path: Path) -> int:
    return int(AutoConfig.from_pretrained(path).pad_token_id)


def sampled_ids(path: Path) -> set[int]:
    return {i for step in list_steps(path) for record in read_step(path, step) for i in record.response_ids}


def half(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) > 2) for text in completions]


def test_a_token_that_the_policy_has_produced_pads_nothing(
    tmp_path: Path, tiny_rl: Callable[..., RLTrainer], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays so after a resume, where the worker knows of the steps before from its checkpoint alone."""
    with pytest.raises(UserError, match="server is gone"):
        tiny_rl(tmp_path / "run", fails_at(5, half), chunk_size=1, **VALUES).train()
    assert tokenizer.pad_token_id in sampled_ids(tmp_path / "run" / "rollouts"), "else this shows nothing"
    monkeypatch.setattr(CriticWorker, "update", TrainWorker.update)
    tiny_rl(tmp_path / "run", half, resume=True, chunk_size=1, **VALUES).train()
    assert pad_of(tmp_path / "run" / "critic") == len(tokenizer)


def test_the_pad_token_stays_where_neither_data_nor_policy_have_it(
    tmp_path: Path, worker: Callable[[], CriticWorker], tokenizer: Any
) -> None:
    used, pad = worker(), tokenizer.pad_token_id
    used.update(RaggedBatch.from_sequences([[i for i in range(len(tokenizer)) if i != pad]]), [])
    used.export(tmp_path / "clean", tokenizer, frozenset(), ())
    used.export(tmp_path / "in_prompts", tokenizer, frozenset({pad}), ())
    assert (pad_of(tmp_path / "clean"), pad_of(tmp_path / "in_prompts")) == (pad, len(tokenizer))
    # What only an export was told is not remembered; what was trained on is.
    used.save_checkpoint(tmp_path / "before", background=False)
    used.update(RaggedBatch.from_sequences([[pad]]), [])
    used.save_checkpoint(tmp_path / "after", background=True)
    other = worker()
    for name, expected in (("before", pad), ("after", len(tokenizer)), ("before", pad)):
        while used.finish_checkpoint(tmp_path / "after") is None:
            pass
        other.load_checkpoint(tmp_path / name)
        other.export(tmp_path / f"{name}_again", tokenizer, frozenset(), ())
        assert pad_of(tmp_path / f"{name}_again") == expected
