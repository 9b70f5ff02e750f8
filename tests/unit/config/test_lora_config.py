"""The section ``lora`` of a recipe: off by default, its defaults, what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from quartet.config.common import LoRAConfig
from quartet.config.errors import UserError
from quartet.config.load import dump_recipe, load_recipe
from quartet.config.recipe import SFTRecipe

SFT = ["model.path=m", "data.path=d.jsonl"]


def sft(*overrides: str) -> SFTRecipe:
    recipe = load_recipe("sft", None, [*SFT, *overrides])
    assert isinstance(recipe, SFTRecipe)
    return recipe


def test_all_weights_are_trained_unless_asked() -> None:
    assert sft().train.lora is None
    assert sft("train.lora={}").train.lora == LoRAConfig()
    one = sft("train.lora.rank=8")
    assert one.train.lora == LoRAConfig(rank=8)


@pytest.mark.parametrize("given", ["q_proj", "[q_proj]", "['q_proj']"])
def test_one_name_is_a_list_of_one(given: str, tmp_path: Path) -> None:
    recipe = sft(f"train.lora.target_modules={given}")
    assert recipe.train.lora is not None and recipe.train.lora.target_modules == ("q_proj",)
    path = tmp_path / "again.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe("sft", path) == recipe


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.lora.target_modules=[all-linear, q_proj]", "stands alone"),
        ("train.lora.r=8", "unknown key 'r'"),
    ],
)
def test_what_is_refused(override: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe("sft", None, [*SFT, override])
    assert said in str(caught.value)
    assert override.split("=")[0].rpartition(".")[0] in str(caught.value), "the place is named"
