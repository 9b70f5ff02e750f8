"""What a run says about its models before it starts: answers that the context cuts off, tensors that were left out."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from quartet.config.algorithms import GRPO, KLConfig
from quartet.config.common import LogConfig, ModelConfig, SamplingConfig
from quartet.config.evaluation import EvalRecipe, EvaluationConfig
from quartet.config.recipe import ReferenceConfig, RLRecipe, RolloutConfig
from quartet.config.rewards import ModelReward
from quartet.observe.progress import Progress
from quartet.trainers.evaluation import Evaluator
from quartet.trainers.model_loader import UserObjects
from quartet.trainers.roles import RLRoles


def _saved(model: Any, tokenizer: Any, path: Path, **more: torch.Tensor) -> str:
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    if more:
        save_file({**load_file(path / "model.safetensors"), **more}, path / "model.safetensors", {"format": "pt"})
    return str(path)


class _Heard(Progress):
    """Keeps what is printed."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def print(self, text: str) -> None:
        self.lines.append(text)


def test_a_run_says_that_answers_are_cut_off(causal_lm: Any, tokenizer: Any, prompts: Any, digits: Any) -> None:
    def warnings(training: int, held_out: int) -> list[str]:
        recipe = RLRecipe(
            algorithm=GRPO(),
            rollout=RolloutConfig(sampling=SamplingConfig(max_new_tokens=training)),
            evaluation=EvaluationConfig(sampling=SamplingConfig(max_new_tokens=held_out, temperature=0.0)),
            prompts_per_step=2,
            responses_per_prompt=2,
            log=LogConfig(tensorboard=False),
            threads=1,
        )
        objects = UserObjects(causal_lm(), tokenizer, rewards=[digits], prompts=prompts, evaluation_prompts=prompts[:2])
        roles = RLRoles(recipe, objects)
        with closing(roles):
            return [warning for warning in roles.warnings() if "max_new_tokens" in warning]

    assert warnings(4, 4) == []
    training, held_out = warnings(10_000, 9_999)
    assert training.startswith("rollout.sampling.max_new_tokens is 10000") and f"of {len(prompts)} prompts" in training
    assert held_out.startswith("evaluation.sampling.max_new_tokens is 9999") and "of 2 prompts" in held_out


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


def test_an_evaluation_says_both(causal_lm: Any, tokenizer: Any, prompts: Any, digits: Any, tmp_path: Path) -> None:
    path = _saved(causal_lm(), tokenizer, tmp_path / "model", **{"odd.weight": torch.ones(2)})
    heard = _Heard()
    recipe = EvalRecipe(
        model=ModelConfig(path=path),
        sampling=SamplingConfig(max_new_tokens=5_000, temperature=0.0),
        output_dir=str(tmp_path / "run"),
        threads=1,
    )
    evaluator = Evaluator(recipe, rewards=[digits], prompts=prompts[:2], progress=heard)
    result = evaluator.run()
    assert any("sampling.max_new_tokens is 5000" in line for line in heard.lines), "before the first answer"
    assert any("sampling.max_new_tokens is 5000" in note for note in result.notes)
    assert any("odd.weight" in note for note in result.notes)
