"""Builds the cast of an RL run: models and functions are loaded and checked before anything is written."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quartet.config import UserError
from quartet.config.algorithms import Distillation, OnlineDPO, reads_reference
from quartet.config.common import TrainConfig
from quartet.config.recipe import RLRecipe
from quartet.data.datasets import PromptData
from quartet.envs.protocol import Environment, EnvironmentFactory, environment_factory
from quartet.models.loading import (
    load_causal_lm,
    load_scalar_model,
    packed_causal_lm,
    packed_scalar_model,
    scalar_model_from,
)
from quartet.models.packed import PackedCausalLM, PackedScalarModel
from quartet.text.tokenizer import TextCodec, check_vocabulary
from quartet.train.engine import TrainEngine
from quartet.trainers.cast import Cast, longest_sequence
from quartet.trainers.episodes import SOURCE
from quartet.trainers.process_roles import process_models
from quartet.trainers.reward_roles import (
    RewardFunctionRole,
    RewardModelRole,
    forward_budget,
    reward_functions,
    reward_models,
    reward_weights,
)
from quartet.trainers.sources import (
    check_budget,
    check_context,
    context_length,
    prompt_data,
    resolve_model,
    resolve_tokenizer,
)


def build_cast(
    recipe: RLRecipe,
    *,
    model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase | None,
    rewards: Sequence[Callable[..., Any] | PreTrainedModel],
    prompts: Sequence[Any] | None,
    evaluation_prompts: Sequence[Any] | None,
    critic: PreTrainedModel | None,
    evaluation_rewards: Sequence[Callable[..., Any] | PreTrainedModel] = (),
    environment: Callable[..., Environment] | None = None,
) -> Cast:
    """Loads and checks everything a run needs; functions and data first, because they fail fastest."""
    functions = reward_functions(recipe.rewards, rewards)
    episodes, make = recipe.environment, _environment(recipe, environment)
    tokenizer = resolve_tokenizer(recipe.actor.model, tokenizer)
    actor_model = resolve_model(recipe.actor.model, model, load_causal_lm, "actor.model")
    codec = TextCodec.of(tokenizer, actor_model.generation_config)
    check_vocabulary(tokenizer, int(actor_model.get_input_embeddings().weight.shape[0]))
    context = context_length(actor_model)
    data = prompt_data(recipe.data, prompts, codec, context, "data")
    _check_columns(functions, data)
    only_configs = recipe.evaluation.rewards if recipe.evaluation is not None else ()
    only_functions = reward_functions(only_configs, evaluation_rewards)
    evaluation = None
    if recipe.evaluation is not None or evaluation_prompts is not None:
        config = recipe.evaluation.data if recipe.evaluation is not None else None
        evaluation = prompt_data(config, evaluation_prompts, codec, context, "evaluation.data")
        _check_columns(functions + only_functions, evaluation)

    longest = min(context, max(len(item.token_ids) for item in data.items) + recipe.rollout.sampling.max_new_tokens)
    if episodes is not None:
        longest = longest_sequence(episodes, context)
    _check_budgets(recipe, longest)
    with contextlib.ExitStack() as taken:
        # When a later model does not fit, those taken over are given back as they were.
        actor = packed_causal_lm(
            actor_model,
            recipe.actor.train.precision,
            numerics=recipe.numerics,
            activation_checkpointing=recipe.actor.train.activation_checkpointing,
            lora=recipe.actor.train.lora,
            seed=recipe.seed,
        )
        taken.callback(actor.release)
        _check_pair_budget(recipe, data, context, share=actor.shares_prefixes and recipe.actor.train.share_prefixes)
        reference = _reference(recipe, actor)
        if reference is not None:
            check_context(reference.model, longest, "reference")
        models = reward_models(recipe.rewards, rewards, codec, recipe.actor.train)
        models += process_models(recipe.rewards, codec)
        for role in models:
            taken.callback(role.model.release)
            if role.codec is None:
                check_context(role.model.model, longest, f"reward model {role.name!r}")
        only_models = reward_models(only_configs, evaluation_rewards, codec, recipe.actor.train)
        only_models += process_models(only_configs, codec)
        for role in only_models:
            taken.callback(role.model.release)
        # Names are checked among all, so that none stands for two.
        played = {SOURCE: episodes.weight} if episodes is not None else {}
        reward_weights(models + only_models, functions + only_functions, played)
        weights = reward_weights(models, functions, played)
        if not weights and not isinstance(recipe.algorithm, Distillation):
            raise UserError(
                "there is no reward",
                found="rewards: []",
                remedy="name a reward model or a function under `rewards`",
            )
        updates = recipe.minibatches * recipe.epochs
        with actor.without_adapters():
            critic_engine = _critic(recipe, critic, actor_model, models, updates)
        if critic_engine is not None:
            taken.callback(critic_engine.packed.release)
            check_context(critic_engine.packed.model, longest, "critic")
        taken.pop_all()
    resting = recipe.critic.warmup_steps if recipe.algorithm.name == "ppo" else 0
    total_steps = max(1, recipe.steps - resting) * updates
    engine = TrainEngine(actor, recipe.actor.train, total_steps=total_steps, name="actor.train")
    return Cast(
        recipe=recipe,
        codec=codec,
        prompts=data,
        evaluation_prompts=evaluation,
        actor=engine,
        critic=critic_engine,
        reference=reference,
        reference_budget=forward_budget(recipe.actor.train),
        reward_models=models,
        reward_functions=functions,
        reward_weights=weights,
        emitted=torch.zeros(actor.vocab_size, dtype=torch.bool),
        evaluation_models=only_models,
        evaluation_functions=only_functions,
        evaluation_weights=reward_weights(only_models, only_functions),
        environment=make,
    )


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


def _check_pair_budget(recipe: RLRecipe, data: PromptData, context: int, *, share: bool) -> None:
    """Both responses of a pair have to lie in one micro-batch."""
    if not isinstance(recipe.algorithm, OnlineDPO):
        return
    num_new, lengths = recipe.rollout.sampling.max_new_tokens, [len(item.token_ids) for item in data.items]
    both = [(1 if share else 2) * n + 2 * min(num_new, context - n) for n in lengths]
    check_budget(max(both), recipe.actor.train.token_budget, "actor.train.token_budget")


def _reference(recipe: RLRecipe, actor: PackedCausalLM) -> PackedCausalLM | None:
    """Loaded only where it is read: by a KL term, or as the teacher. The default is the actor as it starts: a copy, or
    the actor itself where it is that without its adapters."""
    if not reads_reference(recipe.algorithm):
        return None
    path = recipe.reference.path
    if path is None and actor.adapters is not None:
        return actor
    model = load_causal_lm(path) if path is not None else copy.deepcopy(actor.model)
    model.requires_grad_(False)
    held, needed = (int(m.get_input_embeddings().weight.shape[0]) for m in (model, actor.model))
    if held != needed:
        raise UserError(
            "reference and actor have different vocabularies",
            found=f"{held} and {needed} ids",
            remedy="use a reference with the actor's tokenizer, or leave reference.path out",
        )
    return packed_causal_lm(model, recipe.actor.train.precision, numerics=recipe.numerics)


def _critic(
    recipe: RLRecipe,
    critic: PreTrainedModel | None,
    actor: PreTrainedModel,
    reward_models: Sequence[RewardModelRole],
    updates: int,
) -> TrainEngine[PackedScalarModel] | None:
    if recipe.algorithm.name != "ppo":
        if critic is not None:
            raise UserError(
                "a critic is passed that the method does not have",
                found=f"algorithm {recipe.algorithm.name}",
                remedy="leave the critic out, or use ppo",
            )
        return None
    native = [role.model.model for role in reward_models if role.codec is None]
    if critic is not None:
        model = critic
    elif recipe.critic.path is not None:
        model = load_scalar_model(recipe.critic.path)
    elif native:
        model = copy.deepcopy(native[0])
    else:
        model = scalar_model_from(actor, seed=recipe.seed)
    _check_apart(model, actor)
    # Master weights are fp32, also where an object came in half precision.
    model.float().requires_grad_(True)
    needed, held = (int(m.get_input_embeddings().weight.shape[0]) for m in (actor, model))
    if held < needed:
        raise UserError(
            "the critic's vocabulary is smaller than the actor's",
            found=f"{held} and {needed} ids",
            remedy="use a critic with the actor's tokenizer, or leave critic.path out",
        )
    config: TrainConfig = recipe.critic.train
    packed = packed_scalar_model(
        model,
        config.precision,
        activation_checkpointing=config.activation_checkpointing,
        lora=config.lora,
        seed=recipe.seed,
    )
    return TrainEngine(packed, config, total_steps=recipe.steps * updates, name="critic.train")


def _check_apart(critic: PreTrainedModel, actor: PreTrainedModel) -> None:
    """Refuses a critic on the actor's own body: each optimizer would move the other's weights, and adapters of the two
    would lie in one module and switch together."""
    own = {id(parameter) for parameter in actor.parameters()}
    shared = [name for name, parameter in critic.named_parameters() if id(parameter) in own]
    if shared:
        raise UserError(
            "the critic shares weights with the actor",
            found=f"{len(shared)} tensors, first {shared[0]}",
            remedy="pass a critic with weights of its own (copy.deepcopy), or none: it then starts as a copy",
        )
