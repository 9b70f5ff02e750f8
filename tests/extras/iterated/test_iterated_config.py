"""The recipe of the iterated reward model: both jobs as sections, and what it refuses."""

from __future__ import annotations

import pytest

from quartet.config import UserError
from quartet.config.load import load_recipe
from quartet.extras.iterated.config import IteratedRecipe

LOOP = ["rl.actor.model.path=m", "reward_model.model.path=m", "collect.labeller.type=exact_match"]


def complaint(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe("iterated-reward-model", None, [*LOOP, *overrides])
    return str(caught.value)


def test_the_loop_takes_both_jobs_as_sections() -> None:
    recipe = load_recipe("iterated-reward-model", None, [*LOOP, "rl.steps=3", "rounds=4"])
    assert isinstance(recipe, IteratedRecipe)
    assert recipe.rounds == 4 and recipe.rl.steps == 3 and recipe.collect.labeller.type == "exact_match"


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["rl.output_dir=x"], "rl.output_dir"),
        (["reward_model.seed=3"], "reward_model.seed"),
        (["rl.rewards=[{type: model, path: rm}]"], "'reward_model'"),
        (["reward_model.data={sources: [{path: a, weight: 1}, {path: b, weight: 2}]}"], "learns from all pairs"),
        (["rl.actor.model=null"], "rl.actor.model.path"),
        (["collect.labeller=null"], "collect.labeller"),
    ],
)
def test_what_the_loop_refuses(overrides: list[str], part: str) -> None:
    assert part in complaint(*overrides)
