"""What Python code passes: names in place of objects, one bare reward, from inside a running event loop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import quartet as q
from quartet.config.rewards import FunctionReward
from quartet.trainers.signals import run_async


@pytest.fixture
def saved(tmp_path: Path, causal_lm: Any, tokenizer: Any) -> Path:
    """A directory with the tiny model and its tokenizer."""
    causal_lm().save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def recipe(tmp_path: Path) -> q.RLRecipe:
    return q.RLRecipe(
        algorithm=q.RLOO(),
        rollout={"sampling": {"max_new_tokens": 2}},
        steps=1,
        prompts_per_step=2,
        log={"tensorboard": False},
        output_dir=str(tmp_path / "run"),
    )


def weights(model: Any) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


ROWS = [{"prompt": "1+1=", "completion": "2"}] * 4


def test_a_model_and_its_tokenizer_may_be_named(saved: Path, tmp_path: Path) -> None:
    recipe = q.SFTRecipe(steps=1, examples_per_step=4, log={"tensorboard": False})
    named = recipe.model_copy(update={"output_dir": str(tmp_path / "named")})
    found = q.SFTTrainer(named, model=saved, rows=ROWS).train()
    # The name is part of the recipe that the run keeps, so the command line can go on with it.
    kept = q.load_recipe("sft", found.path / "recipe.yaml")
    assert kept.model is not None and kept.model.path == str(saved)
    in_recipe = recipe.model_copy(
        update={"output_dir": str(tmp_path / "recipe"), "model": q.ModelConfig(path=str(saved))}
    )
    expected = q.SFTTrainer(in_recipe, rows=ROWS).train()
    assert all(map(torch.equal, weights(found.model), weights(expected.model)))


def test_a_reference_and_a_critic_may_be_named(
    saved: Path, tmp_path: Path, scalar_model: Any, tokenizer: Any, recipe: q.RLRecipe
) -> None:
    pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}] * 4
    preference = q.PreferenceRecipe(steps=1, pairs_per_step=4, output_dir=str(tmp_path / "dpo"))
    trainer = q.PreferenceTrainer(preference, model=str(saved), reference=saved, rows=pairs)
    assert trainer.recipe.reference.path == str(saved)
    scalar_model().save_pretrained(tmp_path / "critic")
    tokenizer.save_pretrained(tmp_path / "critic")
    ppo = recipe.model_copy(update={"algorithm": q.PPO(), "responses_per_prompt": 1})
    rl = q.RLTrainer(
        ppo,
        model=saved,
        critic=tmp_path / "critic",
        rewards=lambda completions: [0.0] * len(completions),
        prompts=["1"],
    )
    assert rl.recipe.critic.path == str(tmp_path / "critic")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"model": 3}, "model is not a model"),
        ({"rewards": [lambda completions: [], "x"]}, "rewards holds something that is not a reward"),
        ({"evaluation_rewards": [3]}, "evaluation_rewards holds something that is not a reward"),
        ({"model": "no/such/directory"}, "there is no model directory"),
    ],
)
def test_what_is_neither_object_nor_name_is_refused(recipe: q.RLRecipe, arguments: Any, problem: str) -> None:
    given = {"rewards": lambda completions: [0.0] * len(completions), "prompts": ["1"], **arguments}
    with pytest.raises(q.UserError, match=problem):
        q.RLTrainer(recipe, **given)
    assert not Path(str(recipe.output_dir)).exists()


def test_a_model_object_that_is_none(causal_lm: Any, tokenizer: Any) -> None:
    with pytest.raises(q.UserError, match="is not a model"):
        q.SFTTrainer(q.SFTRecipe(steps=1), model=torch.nn.Sequential(causal_lm()), tokenizer=tokenizer, rows=ROWS)


@pytest.mark.parametrize("rows", [5, "1+1=", {"prompt": "1+1="}])
def test_rows_that_are_no_rows(rows: Any, causal_lm: Any, tokenizer: Any, recipe: Any) -> None:
    with pytest.raises(q.UserError, match="passed from Python is not a list of rows"):
        q.SFTTrainer(q.SFTRecipe(steps=1), model=causal_lm(), tokenizer=tokenizer, rows=rows)
    with pytest.raises(q.UserError, match="passed from Python is not a list of rows"):
        q.RLTrainer(recipe, model=causal_lm(), tokenizer=tokenizer, prompts=rows, rewards=len)


def test_a_column_that_cannot_be_kept_is_named(causal_lm: Any, tokenizer: Any, recipe: Any) -> None:
    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "3+4=", "answer": [threading.Lock()]}]
    with pytest.raises(q.UserError, match="no plain data") as caught:
        q.RLTrainer(recipe, model=causal_lm(), tokenizer=tokenizer, prompts=rows, rewards=len)
    assert "'answer'" in caught.value.found and "2" in caught.value.found
    assert not Path(str(recipe.output_dir)).exists()


def test_a_reward_whose_name_cannot_be_logged_is_refused_before_anything_starts(
    causal_lm: Any, tokenizer: Any, recipe: Any
) -> None:
    named = FunctionReward(target="quartet.rewards.builtin:length", name="my own")
    recipe = recipe.model_copy(update={"rewards": (named,)})
    with pytest.raises(q.UserError, match="name of a reward"):
        q.RLTrainer(recipe, model=causal_lm(), tokenizer=tokenizer, prompts=["1+1="] * 2)
    assert not Path(str(recipe.output_dir)).exists()


def test_rl_trains_inside_a_running_event_loop(
    causal_lm: Any, tokenizer: Any, recipe: q.RLRecipe, tmp_path: Path
) -> None:
    def trained(name: str) -> list[torch.Tensor]:
        own = recipe.model_copy(update={"output_dir": str(tmp_path / name)})
        reward = lambda completions: [float(len(text)) for text in completions]  # noqa: E731
        trainer = q.RLTrainer(own, model=causal_lm(), tokenizer=tokenizer, rewards=reward, prompts=["1", "2"])
        return weights(trainer.train().model)

    async def notebook_cell() -> list[torch.Tensor]:
        return trained("cell")

    assert all(map(torch.equal, asyncio.run(notebook_cell()), trained("script")))


@pytest.fixture
def python_handles_ctrl_c() -> Iterator[None]:
    """Test runners may ignore the signal in their workers."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_an_interrupt_in_a_running_loop_cancels_the_work_and_waits_for_it() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            # Stands for a Ctrl-C, which Python raises in the main thread while it waits.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def cell() -> None:
        run_async(work())

    loop = asyncio.new_event_loop()  # like a notebook's: `asyncio.run` would handle the signal itself
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(cell())
    finally:
        loop.close()
    assert ended == ["cancelled"]


@pytest.mark.parametrize(
    "trainer",
    [
        *(q.SFTTrainer, q.RewardModelTrainer, q.ProcessRewardTrainer, q.PreferenceTrainer),
        *(q.RLTrainer, q.Evaluator, q.IteratedTrainer),
    ],
)
@pytest.mark.parametrize("recipe", [{"steps": 1}, q.OptimConfig()])
def test_another_recipe_than_the_trainers_is_refused(trainer: Any, recipe: Any) -> None:
    with pytest.raises(q.UserError, match=r"class .*Recipe\n.*found.*\n.*load_recipe"):
        trainer(recipe)


def test_two_names_for_one_model_are_refused(saved: Path) -> None:
    recipe = q.SFTRecipe(model=q.ModelConfig(path="other"))
    with pytest.raises(q.UserError, match="two models are named for one place"):
        q.SFTTrainer(recipe, model=str(saved), rows=ROWS)
