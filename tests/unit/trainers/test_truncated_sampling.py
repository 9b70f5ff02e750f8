"""Rollouts sampled with top-p, top-k or min-p, and trained on under the same truncation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quartet.config import UserError
from quartet.config.algorithms import GRPO, OnlineDPO
from quartet.config.common import SamplingConfig
from quartet.config.recipe import RLRecipe, RolloutConfig
from quartet.config.run import LogConfig
from quartet.observe.trackers import read_metrics
from quartet.trainers import loop, roles
from quartet.trainers.rl import RLTrainer

TRUNCATED = {"temperature": 1.2, "top_p": 0.7, "top_k": 9, "min_p": 0.02, "max_new_tokens": 8}


@pytest.fixture
def first_step(
    exact_processor: None, causal_lm: Any, tokenizer: Any, prompts: Any, digits: Any, tmp_path: Path
) -> Callable[..., Any]:
    def run(**sampling: Any) -> dict[str, Any]:
        recipe = RLRecipe(
            algorithm=GRPO(),
            rollout=RolloutConfig(sampling=SamplingConfig(**{**TRUNCATED, **sampling})),
            steps=2,
            prompts_per_step=4,
            responses_per_prompt=4,
            minibatches=2,
            numerics="exact",
            output_dir=str(tmp_path / "run"),
            log=LogConfig(tensorboard=False),
        )
        objects = {"model": causal_lm(), "tokenizer": tokenizer, "rewards": [digits], "prompts": prompts}
        return read_metrics(RLTrainer(recipe, **objects).train().path / "metrics.jsonl")[-1]

    return run


@pytest.mark.parametrize("truncated_logprobs", [True, False])
def test_sampler_and_trainer_agree_to_the_last_bit(first_step: Any, truncated_logprobs: bool) -> None:
    metrics = first_step(truncated_logprobs=truncated_logprobs)
    assert metrics["agreement/logprob_diff_max"] == 0.0
    assert metrics["policy/ratio_max"] < 1.01


def test_without_the_trainers_part_they_would_differ(first_step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (loop, roles):
        monkeypatch.setattr(module, "policy_limits", lambda recipe: None)
    assert first_step(truncated_logprobs=True)["agreement/logprob_diff_max"] > 0.1


def test_what_cannot_agree_is_refused() -> None:
    rollout = RolloutConfig(sampling=SamplingConfig(top_k=5, truncated_logprobs=True))
    with pytest.raises(UserError, match="learns the whole distribution"):
        RLRecipe(algorithm=OnlineDPO(), rollout=rollout)
