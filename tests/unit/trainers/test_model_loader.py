"""What is loaded for what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quartet.config.common import ModelConfig
from quartet.config.recipe import ActorConfig, RLRecipe
from quartet.models.loading import load_causal_lm
from quartet.trainers import model_loader
from quartet.trainers.model_loader import ModelLoader, UserObjects


def test_the_policys_texts_need_none_of_its_weights(
    causal_lm: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that holds a part of the actor writes its rollouts; one with a reward model alone reads them."""
    model = causal_lm()
    model.generation_config.eos_token_id = [2, 3]
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    loaded: list[bool] = []

    def load(path: str, *, empty: bool = False, **options: Any) -> Any:
        loaded.append(empty)
        return load_causal_lm(path, empty=empty, **options)

    monkeypatch.setattr(model_loader, "load_causal_lm", load)
    recipe = RLRecipe(actor=ActorConfig(model=ModelConfig(path=str(tmp_path / "model"))))
    before = ModelLoader(recipe, UserObjects())
    found = before.codec
    assert loaded == [True] and {2, 3} <= set(found.eos_ids)
    after = ModelLoader(recipe, UserObjects())
    assert after.actor_model is not None and after.codec.eos_ids == found.eos_ids
    assert loaded == [True, False], "where they are there already, nothing more is read"
