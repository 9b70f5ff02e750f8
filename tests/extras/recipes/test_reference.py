"""Every key of every recipe is described, found at its address, and shown with the default that it has there."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import Field

from quartet.config.common import StrictModel
from quartet.config.errors import UserError
from quartet.config.load import load_recipe
from quartet.config.plugins import recipe_classes
from quartet.config.strict import Tokens, dotted_fields
from quartet.config.yamls import parse_yaml
from quartet.extras.recipes.reference import sections, type_words


@pytest.mark.parametrize("job", recipe_classes())
def test_every_key_of_every_job_is_described(job: str) -> None:
    for section in sections(job, variants=True):
        words = {key.name: key.meaning for key in section.keys} | dict(section.variants)
        assert all(words.values()), f"{section.address}: {words}"


@pytest.mark.parametrize("job", recipe_classes())
def test_every_key_that_an_override_may_name_is_found(job: str) -> None:
    names = [
        name
        for name, _ in dotted_fields(recipe_classes()[job])
        if name.rpartition(".")[2] not in ("job", "name", "type")
    ]
    assert len(names) > 20
    for name in dict.fromkeys(names):
        assert sections(job, name), name


MADE = {
    "rl": ["algorithm.name=ppo"],
    "iterated-reward-model": [
        *("rl.actor.model.path=m", "reward_model.model.path=m"),
        *("collect.labeller.type=length", "collect.labeller.max=10"),
    ],
}


@pytest.mark.parametrize("job", recipe_classes())
def test_the_defaults_shown_are_those_of_a_loaded_recipe(job: str) -> None:
    recipe = load_recipe(job, None, MADE.get(job, ())).model_dump(mode="json")
    checked = 0
    for section in sections(job):
        values: Any = recipe
        for part in section.address.split(".") if section.address else ():
            values = values.get(part) if isinstance(values, dict) else None
        if not isinstance(values, dict) or section.variants:
            continue
        for key in section.keys:
            if key.section is None and key.default:
                assert parse_yaml(key.default) == values[key.name], f"{section.address}.{key.name}"
                checked += 1
    assert checked > 10


def test_defaults_of_the_place_are_shown_where_they_differ() -> None:
    shown = {f"{s.address}.{key.name}": (key.default, key.section) for s in sections("rl") for key in s.keys}
    assert shown["critic.train"] == ("", "critic.train") and shown["critic.train.optim.lr"][0] == "2e-5"
    assert shown["evaluation.sampling"] == ("", "rollout.sampling")
    dapo = {key.name: key.default for key in sections("rl", "algorithm.dapo")[0].keys}
    assert dapo["policy_loss"] == "{name: clipped, clip_eps_high: 0.28}" and dapo["dynamic_sampling"] == ""
    assert {k.name: k.default for k in sections("rl", "critic.train.optim")[0].keys}["lr"] == "2e-5"
    assert {k.name: k.default for k in sections("rl", "algorithm.grpo.kl")[0].keys}["estimator"] == "k3"


def test_a_choice_lists_its_variants_and_a_variant_its_keys() -> None:
    (choice,) = sections("rl", "algorithm")
    assert choice.tag == "name" and set(choice.variants) >= {"ppo", "grpo", "rloo", "online_dpo"}
    assert all(choice.variants.values())
    assert "gae_lambda" in {key.name for key in sections("rl", "algorithm.ppo")[0].keys}
    assert "gae_lambda" not in {key.name for key in sections("rl", "algorithm.grpo")[0].keys}


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("rollout.sampling.top_p", "rollout.sampling"),
        ("algorithm.kl.coef", "algorithm.ppo.kl"),
        ("algorithm.keep", "algorithm.best_of_n"),
        ("rewards.judge.retry", "rewards.judge.retry"),
        ("critic.train.optim", "critic.train.optim"),
    ],
)
def test_addresses_are_read_as_people_write_them(address: str, found: str) -> None:
    assert sections("rl", address)[0].address == found


@pytest.mark.parametrize(
    ("job", "address", "remedy"),
    [
        ("rll", "", "did you mean 'rl'?"),
        ("rl", "algoritm", "did you mean 'algorithm'?"),
        ("rl", "actor.train.optm", "did you mean 'actor.train.optim'?"),
        ("rl", "learning_rate", "quartet config rl lists its keys"),
    ],
)
def test_unknown_parts_lead_to_known_ones(job: str, address: str, remedy: str) -> None:
    with pytest.raises(UserError) as error:
        sections(job, address)
    assert remedy in error.value.remedy


def test_types_units_and_values_in_words() -> None:
    class Model(StrictModel):
        budget: Tokens | None = Field(None, ge=1)
        wait_s: float = Field(1e-6, gt=0, le=2)
        pair: tuple[float, float] = (0.5, 1.0)
        shares: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.5, 0.9)
        names: dict[str, tuple[str, ...]] = Field(default_factory=dict)

    fields = Model.model_fields
    assert type_words(fields["budget"]) == "integer (tokens) ≥ 1"
    assert type_words(fields["wait_s"]) == "number > 0, ≤ 2"
    assert type_words(fields["pair"]) == "[number, number]"
    assert type_words(fields["shares"]) == "[number ≥ 0, < 1, number ≥ 0, < 1]"
    assert type_words(fields["names"]) == "mapping of text to list of text"
