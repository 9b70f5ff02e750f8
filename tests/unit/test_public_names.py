"""What `import quartet` offers: every name, cheaply, with the command line's help for mistakes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import BaseModel

import quartet as q
from quartet.config.plugins import recipe_classes
from quartet.config.strict import item_annotation, union_members


def _reachable() -> set[type[BaseModel]]:
    found: set[type[BaseModel]] = set()
    waiting: list[type[BaseModel]] = list(recipe_classes().values())
    while waiting:
        model = waiting.pop()
        if model not in found:
            found.add(model)
            for field in model.model_fields.values():
                waiting += union_members(field.annotation) + union_members(item_annotation(field.annotation))
    return found


def test_every_section_of_every_recipe_can_be_written_in_python() -> None:
    models = _reachable()
    assert len(models) > 80
    assert {model.__name__ for model in models} <= set(dir(q))
    assert all(getattr(q, model.__name__) is model for model in models)


def test_every_public_name_exists_and_is_listed() -> None:
    assert set(q.__all__) == set(dir(q))
    assert all(getattr(q, name) is not None for name in q.__all__)
    assert q.__version__[0].isdigit()
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = q.no_such_name


def test_importing_quartet_imports_nothing_large() -> None:
    script = "import quartet, sys; assert not {'torch', 'transformers', 'pydantic', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("make", "found", "remedy"),
    [
        (lambda: q.RLRecipe(stepz=4), "'stepz'", "did you mean 'steps'?"),
        (
            lambda: q.RLRecipe(actor={"train": {"optim": {"lrr": 1}}}),
            "'lrr' in actor.train.optim",
            "did you mean 'lr'?",
        ),
        (lambda: q.RLRecipe(algorithm={"name": "grppo"}), "algorithm.name: grppo", "did you mean 'grpo'?"),
        (lambda: q.GRPO(aggregation="mean"), "aggregation: 'mean'", "token_mean"),
    ],
)
def test_a_mistake_in_python_is_a_user_error_with_the_command_lines_help(make, found: str, remedy: str) -> None:
    with pytest.raises(q.UserError) as caught:
        make()
    assert found in caught.value.found
    assert remedy in caught.value.remedy


def test_all_mistakes_in_nested_sections_are_told_at_once() -> None:
    with pytest.raises(q.UserError, match="RLRecipe is not valid in 2 places") as caught:
        q.RLRecipe(actor={"train": {"optim": {"lr": -1}}}, rollout={"engine": "vlm"})
    assert "actor.train.optim.lr" in caught.value.found
    assert "rollout.engine" in caught.value.found


def test_each_method_has_a_sensible_number_of_responses() -> None:
    defaults = {
        q.PPO: 1,
        q.ReMax: 1,
        q.ReinforcePlusPlus: 1,
        q.RLOO: 4,
        q.ReinforcePlusPlusBaseline: 4,
        q.OnlineDPO: 4,
        q.GRPO: 8,
        q.DrGRPO: 8,
        q.DAPO: 8,
        q.GSPO: 8,
        q.CISPO: 8,
        q.GPG: 8,
        q.OPO: 8,
        q.SAPO: 8,
        q.GMPO: 8,
        q.GDPO: 8,
        q.PassAtK: 8,
        q.OptimalTokenBaseline: 8,
        q.BestOfN: 8,
    }
    for method, expected in defaults.items():
        assert q.RLRecipe(algorithm=method()).responses_per_prompt == expected
        assert q.load_recipe("rl", None, [f"algorithm.name={method().name}"]).responses_per_prompt == expected
    assert q.RLRecipe(algorithm=q.GRPO(), responses_per_prompt=3).responses_per_prompt == 3
    assert q.load_recipe("rl", None, ["algorithm.name=grpo", "responses_per_prompt=3"]).responses_per_prompt == 3


def test_the_number_of_responses_follows_the_method_inside_another_recipe() -> None:
    overrides = ["rl.algorithm={name: rloo}", "rl.actor.model.path=m", "reward_model.model.path=m"]
    labeller = "collect.labeller={type: length, target: 3}"
    loaded = q.load_recipe("iterated-reward-model", None, [*overrides, labeller])
    assert loaded.rl.responses_per_prompt == 4
