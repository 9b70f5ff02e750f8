"""Numbers and messages of RL that are easy to get wrong without anything failing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.config import UserError
from quartet.config.algorithms import GRPO, PPO, RLOO, AlgorithmConfig, KLConfig, OffPolicyConfig
from quartet.config.load import load_recipe
from quartet.config.recipe import LogConfig, RLRecipe, SFTRecipe
from quartet.observe.global_state import guarded_code
from quartet.schedule.iteration import Chunk
from quartet.trainers.experience import Assembler, Experience, KLCoefficient
from quartet.trainers.input_sources import check_budget
from quartet.trainers.rl import RLTrainer
from quartet.trainers.run import RunDirectory

NAN = float("nan")


def assembled(config: AlgorithmConfig, scores: Sequence[float], ended: Sequence[bool], **columns: float) -> Experience:
    """One group of two-token responses; ``columns`` holds one value for every response token."""
    names = [f"0.{r}" for r in range(len(scores))]
    batch = RaggedBatch.from_groups([[5, 6]], [[[7, 8]] * len(scores)], names)
    mask = batch.sequence_index() >= 0
    batch = batch.with_token(action_mask=mask, loss_mask=mask, rollout_logprobs=torch.zeros(batch.num_tokens))
    batch = batch.with_token(**{name: mask.float() * value for name, value in columns.items()}).with_sequence(
        group=torch.zeros(len(names), dtype=torch.int64),
        response=torch.arange(len(names)),
        ended=torch.tensor(list(ended)),
    )
    found = ColumnSet(batch.ids, sequence={"reward/score": torch.tensor(list(scores))})
    return Assembler(config, {"score": 1.0}, lambda: config.kl.coef)([(Chunk(0, 0, batch), [found])])


@pytest.mark.parametrize("config", [GRPO, RLOO])
def test_a_missing_end_counts_where_all_scores_are_equal(config: type[GRPO] | type[RLOO]) -> None:
    used = config(kl=KLConfig(coef=0.0), missing_eos_penalty=0.5)
    experience = assembled(used, [0.0, 0.0], [True, False])
    advantages = experience.batch.token["advantages"][experience.batch.sequence_index() >= 0]
    assert advantages[0] > 0 > advantages[2], "the response that was cut off is the worse one"
    assert experience.metrics["groups/zero_variance"] == 0.0


def trainer(
    tmp_path: Path,
    causal_lm: Any,
    tokenizer: Any,
    functions: Sequence[Any] = (lambda completions: [float(len(text)) for text in completions],),
    prompts: Sequence[Any] = ({"prompt": "1+2="}, {"prompt": "3+4="}),
    **changes: Any,
) -> RLTrainer:
    values: dict[str, Any] = {
        "output_dir": str(tmp_path / "run"),
        "algorithm": PPO(kl=KLConfig(coef=0.1, target=1.0, horizon=100)),
        "critic": {"warmup_steps": 1},
        "rollout": {"sampling": {"max_new_tokens": 2}},
        "steps": 1,
        "prompts_per_step": 2,
        "log": LogConfig(tensorboard=False),
        "threads": 1,
        **changes,
    }
    given: dict[str, Any] = {"rewards": list(functions), "prompts": list(prompts)}
    return RLTrainer(RLRecipe(**values), model=causal_lm(), tokenizer=tokenizer, **given)


def test_the_adaptive_coefficient_sees_the_responses_that_take_part() -> None:
    config = PPO(kl=KLConfig(coef=0.1, target=1.0, horizon=100))
    kl = KLCoefficient(config, warmup_steps=1)
    # 2 nats in each of the two responses that have a score; the others have none.
    scores, ended = [1.0, NAN, 1.0, NAN], [True] * 4
    experience = assembled(config, scores, ended, old_logprobs=-1.0, ref_logprobs=-2.0, values=0.0)
    kl.adapt(experience.batch, step=0)
    assert kl.value == 0.1, "the actor rests"
    kl.adapt(experience.batch, step=1)
    assert kl.value == pytest.approx(0.1 * (1 + 0.2 * 2 / 100))


def test_the_adaptive_coefficient_steers_nats_per_trajectory() -> None:
    # 1 nat on each of two tokens is 2 per trajectory: within the clip of the error around 1.9, far from 1 per token.
    config = PPO(kl=KLConfig(coef=0.1, target=1.9, horizon=100))
    kl, ended = KLCoefficient(config), [True] * 2
    experience = assembled(config, [1.0, 1.0], ended, old_logprobs=-1.0, ref_logprobs=-2.0, values=0.0)
    kl.adapt(experience.batch, step=0)
    assert kl.value == pytest.approx(0.1 * (1 + (2.0 / 1.9 - 1) * 2 / 100))


def test_a_lambda_is_a_reward_like_any_other(tmp_path: Path, causal_lm: Any, tokenizer: Any) -> None:
    result = trainer(tmp_path, causal_lm, tokenizer).train()
    assert "reward/lambda" in result.summary["stages"][0]["metrics"]


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_run_within_a_reward_is_refused_and_does_not_wait_for_ever(
    kind: str, tmp_path: Path, causal_lm: Any, tokenizer: Any
) -> None:
    def inner() -> None:
        trainer(tmp_path / "inner", causal_lm, tokenizer).train()

    def plain(completions: list[str]) -> list[float]:
        inner()
        return [0.0] * len(completions)

    async def waiting(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return plain(completions)

    reward = plain if kind == "plain" else waiting
    with pytest.raises(UserError, match=f"the reward '{reward.__name__}' starts a run inside of another one"):
        trainer(tmp_path, causal_lm, tokenizer, functions=[reward]).train()
    assert guarded_code() is None


@pytest.mark.parametrize(
    "value", [lambda: 1, threading.Lock(), (part for part in "ab")], ids=["function", "lock", "generator"]
)
def test_a_column_that_cannot_be_kept_is_named(value: Any, tmp_path: Path, causal_lm: Any, tokenizer: Any) -> None:
    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "3+4=", "answer": [value]}]
    with pytest.raises(UserError, match="no plain data") as caught:
        trainer(tmp_path, causal_lm, tokenizer, prompts=rows)
    assert "'answer'" in caught.value.found and "2" in caught.value.found
    assert not (tmp_path / "run").exists()


def test_a_reward_whose_name_cannot_be_logged_is_refused_before_anything_starts(
    tmp_path: Path, causal_lm: Any, tokenizer: Any
) -> None:
    target = "quartet.rewards.builtin:length"
    with pytest.raises(UserError, match="name of a reward"):
        trainer(tmp_path, causal_lm, tokenizer, rewards=({"type": "function", "target": target, "name": "my own"},))
    assert not (tmp_path / "run").exists()


def test_a_budget_below_the_longest_response_is_refused_before_anything_starts(
    tmp_path: Path, causal_lm: Any, tokenizer: Any
) -> None:
    check_budget(6, 6, "key")
    with pytest.raises(UserError, match=r"actor\.train\.token_budget"):
        trainer(tmp_path, causal_lm, tokenizer, actor={"train": {"token_budget": 5}})
    trainer(tmp_path, causal_lm, tokenizer, actor={"train": {"token_budget": 6}})


@pytest.mark.parametrize(
    ("algorithm", "found"),
    [
        (PPO(kl=KLConfig(target=1.0, horizon=5)), "horizon"),
        (PPO(kl=KLConfig(coef=0.0, target=1.0)), "target"),
        (RLOO(off_policy=OffPolicyConfig(level="token")), "off_policy.level"),
    ],
)
def test_settings_that_would_do_nothing_or_harm_are_refused(algorithm: AlgorithmConfig, found: str) -> None:
    with pytest.raises(UserError, match=found):
        RLRecipe(algorithm=algorithm, prompts_per_step=3, responses_per_prompt=2)


def test_a_reward_model_in_half_precision_gives_a_critic_in_full(
    tmp_path: Path, causal_lm: Any, tokenizer: Any, scalar_model: Any
) -> None:
    recipe = RLRecipe(output_dir=str(tmp_path / "run"), threads=1)
    reward = scalar_model().to(torch.bfloat16)
    run = RLTrainer(recipe, model=causal_lm(), tokenizer=tokenizer, rewards=[reward], prompts=["1+2="])
    assert run.roles.critic is not None
    assert {p.dtype for p in run.roles.critic.packed.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("text", ["=", "2026-13-45", "1:30"])
def test_a_recipe_with_words_of_older_yaml_can_be_resumed(tmp_path: Path, text: str) -> None:
    recipe = SFTRecipe(output_dir=str(tmp_path), data={"path": text})
    with RunDirectory(tmp_path, recipe):
        pass
    assert load_recipe("sft", tmp_path / "recipe.yaml") == recipe
    with RunDirectory(tmp_path, recipe, resume=True):
        pass


@pytest.mark.parametrize("content", ["not json", "[]", '{"name": "of another program"}'])
def test_a_run_file_of_another_program_is_left_alone(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    for resume in (False, True):
        with pytest.raises(UserError, match="holds no run"):
            RunDirectory(tmp_path, SFTRecipe(), resume=resume)
    assert (tmp_path / "run.json").read_text() == content
