"""What a run says about its models before it starts: tensors that were left out."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from quartet.config.algorithms import GRPO, KLConfig
from quartet.config.common import ModelConfig, SamplingConfig
from quartet.config.evaluation import EvalRecipe
from quartet.config.recipe import ReferenceConfig, RLRecipe, RolloutConfig
from quartet.config.rewards import ModelReward
from quartet.trainers.evaluation import Evaluator
from quartet.trainers.model_loader import UserObjects
from quartet.trainers.roles import RLRoles


def _saved(model: Any, tokenizer: Any, path: Path, **more: torch.Tensor) -> str:
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    if more:
        save_file({**load_file(path / "model.safetensors"), **more}, path / "model.safetensors", {"format": "pt"})
    return str(path)


def test_reward_model_and_reference_say_what_was_left_out(
    causal_lm: Any, scalar_model: Any, tokenizer: Any, prompts: Any, tmp_path: Path
) -> None:
    path = _saved(scalar_model(), tokenizer, tmp_path / "reward", **{"odd.weight": torch.ones(2)})
    teacher = _saved(causal_lm(), tokenizer, tmp_path / "teacher", **{"more.weight": torch.ones(2)})
    recipe = RLRecipe(
        algorithm=GRPO(kl=KLConfig(coef=0.1, place="loss", estimator="k3")),
        reference=ReferenceConfig(path=teacher),
        rewards=(ModelReward(path=path, name="odd"),),
        prompts_per_step=2,
        responses_per_prompt=2,
        rollout=RolloutConfig(sampling=SamplingConfig(max_new_tokens=4)),
        threads=1,
    )
    roles = RLRoles(recipe, UserObjects(causal_lm(), tokenizer, prompts=prompts))
    with closing(roles):
        assert [r for r in roles.warnings() if "odd.weight" in r and r.startswith("odd: ")]
        assert [r for r in roles.warnings() if "more.weight" in r and r.startswith("reference: ")]


def test_an_evaluation_says_so_too(causal_lm: Any, tokenizer: Any, prompts: Any, digits: Any, tmp_path: Path) -> None:
    path = _saved(causal_lm(), tokenizer, tmp_path / "model", **{"odd.weight": torch.ones(2)})
    recipe = EvalRecipe(
        model=ModelConfig(path=path),
        sampling=SamplingConfig(max_new_tokens=4, temperature=0.0),
        output_dir=str(tmp_path / "run"),
        threads=1,
    )
    result = Evaluator(recipe, rewards=[digits], prompts=prompts[:2]).run()
    assert any("odd.weight" in note for note in result.notes)
