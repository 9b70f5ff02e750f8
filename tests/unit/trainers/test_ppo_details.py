"""What makes PPO train and is in no formula: how the critic starts, learns, is held back; where whitening looks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.config.algorithms import PPO, KLConfig
from quartet.config.common import OptimConfig, SamplingConfig, TrainConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.load import load_recipe
from quartet.config.recipe import ActorConfig, CriticConfig, RLRecipe, RolloutConfig
from quartet.observe.rollouts import read_step
from quartet.observe.trackers import read_metrics
from quartet.trainers.rl import RLTrainer

RECIPES = Path(__file__).parents[3] / "recipes"
PPO_RECIPES = sorted(path.name for path in RECIPES.glob("*.yaml") if "name: ppo" in path.read_text(encoding="utf-8"))


def _train(lr: float) -> TrainConfig:
    return TrainConfig(optim=OptimConfig(lr=lr))


@pytest.fixture
def trainer(tiny_rl: Callable[..., RLTrainer], digits: Any) -> Callable[..., RLTrainer]:
    def make(path: Path, rewards: list[Any] | None = None, **changes: Any) -> RLTrainer:
        values: dict[str, Any] = {
            "algorithm": PPO(kl=KLConfig(coef=0.0)),
            "actor": ActorConfig(train=_train(3e-3)),
            "critic": CriticConfig(train=_train(1e-2)),
            "rollout": RolloutConfig(
                sampling=SamplingConfig(max_new_tokens=4), engine=NativeEngineConfig(max_running=8)
            ),
            "steps": 2,
            "prompts_per_step": 6,
            "responses_per_prompt": 2,
            "minibatches": 2,
            "epochs": 3,
            **changes,
        }
        return tiny_rl(path, *([digits] if rewards is None else rewards), **values)

    return make


def test_the_critic_learns_faster_by_default() -> None:
    recipe = RLRecipe()
    assert recipe.actor.train.optim.lr < recipe.critic.train.optim.lr


@pytest.mark.parametrize("name", PPO_RECIPES)
def test_the_critic_learns_faster_in_every_recipe(name: str) -> None:
    recipe = load_recipe("rl", RECIPES / name, [])
    assert isinstance(recipe, RLRecipe)
    assert recipe.actor.train.optim.lr < recipe.critic.train.optim.lr


@pytest.mark.parametrize(("actor", "critic", "said"), [(1e-3, 2e-3, False), (1e-3, 1e-3, True), (2e-3, 1e-3, True)])
def test_a_critic_that_does_not_is_remarked_on(
    actor: float, critic: float, said: bool, tmp_path: Path, trainer: Callable[..., RLTrainer]
) -> None:
    parts = {"actor": ActorConfig(train=_train(actor)), "critic": CriticConfig(train=_train(critic))}
    result = trainer(tmp_path / "run", steps=1, epochs=1, **parts).train()
    assert any("not above the actor's" in note for note in result.summary["notes"]) == said


def test_a_critic_that_starts_as_the_reward_model_knows_the_scores_before_it_learns(
    tmp_path: Path, trainer: Callable[..., RLTrainer], scalar_model: Any, tolerances: Any
) -> None:
    """Its value at a response's end, which the reward model scores, is that score."""
    reward = scalar_model()
    torch.nn.init.normal_(reward.score.weight, std=0.5, generator=torch.Generator().manual_seed(3))
    used = trainer(tmp_path / "run", [reward], steps=1)
    assert used.roles.critic is not None
    body = used.roles.critic.packed.model
    for owned in used.roles.models():
        owned.release()
    ids = torch.tensor([used.roles.codec.encode_prompt(used.roles.item(0).prompt)])
    with torch.no_grad():
        expected, found = (
            model.score(model.model(input_ids=ids).last_hidden_state)[0, :, 0] for model in (reward, body)
        )
    assert body is not reward
    assert float(expected.abs().max()) > 0.5
    atol, rtol = tolerances[torch.float32]
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)


def test_value_clipping_holds_the_critic_back(tmp_path: Path, trainer: Callable[..., RLTrainer]) -> None:
    fractions, heads = {}, {}
    for clip in (None, 0.5, 1e-4):
        used = trainer(tmp_path / f"run{clip}", algorithm=PPO(kl=KLConfig(coef=0.0), value_clip=clip), steps=1)
        used.train()
        assert used.roles.critic is not None
        heads[clip] = used.roles.critic.packed.model.score.weight.clone()
        fractions[clip] = read_metrics(tmp_path / f"run{clip}" / "metrics.jsonl")[1]["critic/clip_frac"]
    assert fractions[None] == 0.0 and fractions[1e-4] > max(0.2, fractions[0.5])
    assert not torch.equal(heads[None], heads[1e-4])


def test_advantages_are_whitened_over_the_rollout_batch_and_not_over_mini_batches(
    tmp_path: Path, trainer: Callable[..., RLTrainer]
) -> None:
    trainer(tmp_path / "run", steps=1).train()
    records = read_step(tmp_path / "run" / "rollouts", 1)
    advantages = [torch.tensor(record.columns["advantages"], dtype=torch.float64) for record in records]
    whole = torch.cat(advantages)
    assert float(whole.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(whole.std()) == pytest.approx(1.0, abs=1e-4)
    halves = [torch.cat(advantages[:6]), torch.cat(advantages[6:])]
    assert all(abs(float(half.mean())) > 1e-3 for half in halves), "each mini-batch keeps its own mean"
