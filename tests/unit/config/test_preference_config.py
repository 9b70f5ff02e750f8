"""Recipes of preference training: which losses there are, what does not fit together."""

from __future__ import annotations

from pathlib import Path

import pytest

from quartet.config.errors import UserError
from quartet.config.load import dump_recipe, load_recipe
from quartet.config.preference import DPOLoss, KTOLoss, PreferenceRecipe


def load(*overrides: str) -> PreferenceRecipe:
    recipe = load_recipe("preference", None, overrides)
    assert isinstance(recipe, PreferenceRecipe)
    return recipe


def test_dpo_is_the_default() -> None:
    assert load().loss == DPOLoss()


@pytest.mark.parametrize("name", ["dpo", "robust_dpo", "ipo", "hinge", "simpo", "orpo", "kto"])
def test_one_line_picks_the_loss(name: str, tmp_path: Path) -> None:
    recipe = load(f"loss.name={name}")
    assert recipe.loss.name == name
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe("preference", tmp_path / "recipe.yaml") == recipe


def test_a_field_of_another_loss_is_unknown() -> None:
    with pytest.raises(UserError, match="not valid") as caught:
        load("loss.name=ipo", "loss.gamma=1.0")
    assert "gamma" in caught.value.found and "another choice of loss" in caught.value.remedy
    with pytest.raises(UserError) as caught:
        load("loss.name=dpi")
    assert "dpo" in caught.value.remedy


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (("loss.name=simpo", "reference.path=x"), "loss simpo has no reference: leave out reference.path"),
        (("loss.name=orpo", "reference.path=x"), "leave out reference.path"),
        (("loss.name=kto", "pairs_per_step=1"), "set pairs_per_step to 2 or more"),
    ],
)
def test_what_does_not_fit(overrides: tuple[str, ...], found: str) -> None:
    with pytest.raises(UserError, match="not valid") as caught:
        load(*overrides)
    assert found in caught.value.found


def test_kto_keeps_its_own_defaults() -> None:
    assert load("loss.name=kto", "loss.undesirable_weight=2.0").loss == KTOLoss(undesirable_weight=2.0)
