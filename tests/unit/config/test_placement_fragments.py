"""The fragments of recipes/placements: each joins a PPO recipe, and resolves for its roles."""

from __future__ import annotations

from pathlib import Path

import pytest

from quartet.config.load import load_recipe
from quartet.config.placement import resolve_placement
from quartet.config.recipe import RLRecipe

ROOT = Path(__file__).parents[3] / "recipes"
FRAGMENTS = sorted((ROOT / "placements").glob("*.yaml"))
ROLES = {"actor": "actor", "rollout": "rollout", "critic": "critic", "reference": "reference", "helpful": "reward"}


@pytest.mark.parametrize("path", FRAGMENTS, ids=lambda path: path.stem)
def test_a_fragment_joins_a_recipe(path: Path) -> None:
    plain = load_recipe("rl", ROOT / "rl-ppo.yaml")
    recipe = load_recipe("rl", ROOT / "rl-ppo.yaml", [f"@{path}"])
    assert isinstance(recipe, RLRecipe) and isinstance(plain, RLRecipe) and recipe.placement is not None
    assert recipe.placement.type == path.stem
    assert resolve_placement(recipe.placement, ROLES).pool_of.keys() == ROLES.keys()  # type: ignore[arg-type]
    assert recipe.actor == plain.actor and recipe.rewards == plain.rewards, "the rest of the recipe stays"
    assert recipe.algorithm.name == "ppo"


def test_an_override_after_a_fragment_wins(tmp_path: Path) -> None:
    (tmp_path / "few.yaml").write_text("steps: 7\nrollout: {engine: {max_running: 3}}\n")
    recipe = load_recipe("rl", ROOT / "rl-ppo.yaml", [f"@{tmp_path / 'few.yaml'}", "steps=9"])
    assert isinstance(recipe, RLRecipe)
    assert (recipe.steps, recipe.rollout.engine.max_running) == (9, 3)
    plain = load_recipe("rl", ROOT / "rl-ppo.yaml")
    assert isinstance(plain, RLRecipe) and recipe.rollout.sampling == plain.rollout.sampling


def test_a_section_of_another_kind_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("placement: {type: full_offload, pool: {}}\n")
    (tmp_path / "two.yaml").write_text("placement: {type: separated, actor: {}, rollout: {}}\n")
    recipe = load_recipe("rl", ROOT / "rl-ppo.yaml", [f"@{tmp_path / name}" for name in ("one.yaml", "two.yaml")])
    assert isinstance(recipe, RLRecipe) and recipe.placement is not None and recipe.placement.type == "separated"


def test_a_section_that_names_no_kind_keeps_the_one_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "few.yaml").write_text("cluster: {cpus_per_process: 0.1}\nalgorithm: {name: grpo}\n")
    recipe = load_recipe(
        "rl",
        ROOT / "rl-ppo.yaml",
        [f"@{ROOT / 'placements' / 'pipelined.yaml'}", f"@{tmp_path / 'few.yaml'}", "responses_per_prompt=2"],
    )
    assert isinstance(recipe, RLRecipe)
    assert recipe.cluster.type == "ray" and recipe.cluster.cpus_per_process == 0.1
    assert recipe.algorithm.name == "grpo", "another method brings nothing of the former one along"
