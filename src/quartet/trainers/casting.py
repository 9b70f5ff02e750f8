"""Builds the cast of an RL run: models and functions are loaded and checked before anything is written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quartet.config import UserError
from quartet.config.algorithms import Distillation
from quartet.config.recipe import RLRecipe
from quartet.data.datasets import PromptData
from quartet.envs.protocol import Environment, EnvironmentFactory, environment_factory
from quartet.envs.transcript import SOURCE
from quartet.text.tokenizer import check_vocabulary
from quartet.trainers.cast import Cast, check_pair_budget, longest_sequence
from quartet.trainers.devices import CPU, EMPTY
from quartet.trainers.loader import Loader, Passed
from quartet.trainers.ptx import build_ptx
from quartet.trainers.reward_roles import RewardFunctionRole, reward_functions, reward_weights
from quartet.trainers.sources import check_budget, check_context, context_length, prompt_data


def build_cast(
    recipe: RLRecipe,
    passed: Passed,
    *,
    prompts: Sequence[Any] | None = None,
    evaluation_prompts: Sequence[Any] | None = None,
    environment: Callable[..., Environment] | None = None,
    ptx_rows: Sequence[Any] | None = None,
    shares_reference: bool = True,
    computes: torch.device = CPU,
) -> Cast:
    """Loads and checks everything a run needs; functions and data first, because they fail fastest.

    Args:
        computes: the run's device; where workers compute, the models made here have no contents.
        shares_reference: as for ``Loader``.
    """
    functions = reward_functions(recipe.rewards, passed.rewards)
    make = _environment(recipe, environment)
    loader = Loader(
        recipe,
        passed,
        device=computes if recipe.cluster.type == "local" else EMPTY,
        moves_passed=recipe.cluster.type == "local" and recipe.device != "auto",
        computes=computes,
        shares_reference=shares_reference,
    )
    check_vocabulary(loader.tokenizer, int(loader.actor_model.get_input_embeddings().weight.shape[0]))
    codec, context = loader.codec, context_length(loader.actor_model)
    data = prompt_data(recipe.data, prompts, codec, context, "data")
    _check_columns(functions, data)
    only_configs = recipe.evaluation.rewards if recipe.evaluation is not None else ()
    only_functions = reward_functions(only_configs, passed.evaluation_rewards)
    evaluation = None
    if recipe.evaluation is not None or evaluation_prompts is not None:
        config = recipe.evaluation.data if recipe.evaluation is not None else None
        evaluation = prompt_data(config, evaluation_prompts, codec, context, "evaluation.data")
        _check_columns(functions + only_functions, evaluation)
    longest = _longest(recipe, data, context)
    _check_budgets(recipe, longest)
    with contextlib.ExitStack() as taken:
        # When a later model does not fit, those taken over are given back as they were.
        taken.callback(loader.release)
        check_pair_budget(recipe, data, context, loader.actor.shares_prefixes)
        _check_contexts(loader, longest)
        # Names are checked among all, so that none stands for two.
        played = {SOURCE: recipe.environment.weight} if recipe.environment is not None else {}
        only_models = loader.evaluation_models
        reward_weights(loader.reward_models + only_models, functions + only_functions, played)
        weights = reward_weights(loader.reward_models, functions, played)
        if not weights and not isinstance(recipe.algorithm, Distillation):
            raise UserError(
                "there is no reward",
                found="rewards: []",
                remedy="name a reward model or a function under `rewards`",
            )
        if loader.critic_engine is not None:
            check_context(loader.critic_engine.packed.model, longest, "critic")
        ptx = build_ptx(recipe, ptx_rows, codec, context)
        taken.pop_all()
    return Cast(
        recipe=recipe,
        codec=codec,
        prompts=data,
        evaluation_prompts=evaluation,
        workers={name: loader.worker(name, ptx) for name in loader.roles()},
        actor=loader.actor_engine,
        critic=loader.critic_engine,
        reference=loader.reference,
        reward_models=loader.reward_models,
        reward_functions=functions,
        reward_weights=weights,
        evaluation_models=only_models,
        evaluation_functions=only_functions,
        evaluation_weights=reward_weights(only_models, only_functions),
        environment=make,
        ptx=ptx,
    )


def _longest(recipe: RLRecipe, data: PromptData, context: int) -> int:
    """Tokens of the longest sequence that the run may make."""
    if recipe.environment is not None:
        return longest_sequence(recipe.environment, context)
    return min(context, max(item.num_tokens for item in data.items) + recipe.rollout.sampling.max_new_tokens)


def _check_contexts(loader: Loader, longest: int) -> None:
    """Those of the models that only read."""
    if loader.reference is not None:
        check_context(loader.reference.model, longest, "reference")
    for role in loader.reward_models + loader.evaluation_models:
        if role.codec is None:
            check_context(role.model.model, longest, f"reward model {role.name!r}")


def _check_columns(functions: Sequence[RewardFunctionRole], data: PromptData) -> None:
    names = sorted({name for item in data.items for name in item.columns})
    for function in functions:
        function.reward.check_columns(names)


def _environment(recipe: RLRecipe, environment: Callable[..., Environment] | None) -> EnvironmentFactory | None:
    if recipe.environment is not None:
        return environment_factory(recipe.environment, environment)
    if environment is not None:
        raise UserError(
            "an environment is passed that the recipe does not know of",
            found="the recipe's `environment` is left out",
            remedy="give the recipe environment=EnvironmentConfig(…), with target left out",
        )
    return None


def _check_budgets(recipe: RLRecipe, longest: int) -> None:
    roles = {"actor": recipe.actor.train}
    if recipe.algorithm.name == "ppo":
        roles["critic"] = recipe.critic.train
    for role, config in roles.items():
        check_budget(longest, config.token_budget, f"{role}.train.token_budget")
        check_budget(longest, config.forward_token_budget, f"{role}.train.forward_token_budget")
