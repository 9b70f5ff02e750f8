"""What of an RL recipe does not fit together: one small check per reason.

A check returns the reason, or None. All reasons are reported at once. What fits and yet does nothing is a remark.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quartet.config.algorithms import (
    SEQUENCE_LOSSES,
    BestOfN,
    Distillation,
    GroupAlgorithm,
    OnlineDPO,
    PolicyGradient,
    ReMax,
    ScoredAlgorithm,
    Selection,
    SequenceClippedLoss,
    kl_term,
    reads_reference,
)
from quartet.config.cluster import device_misfit
from quartet.config.placement import ROLES, AsynchronousPlacement
from quartet.config.rewards import ModelReward, ProcessModelReward

if TYPE_CHECKING:
    from quartet.config.recipe import RLRecipe

Check = Callable[["RLRecipe"], str | None]


# Sizes ---------------------------------------------------------------------------------------------------


def _minibatches(recipe: RLRecipe) -> str | None:
    if recipe.prompts_per_step % recipe.minibatches == 0:
        return None
    return (
        f"minibatches ({recipe.minibatches}) must divide prompts_per_step ({recipe.prompts_per_step}): "
        "every mini-batch holds whole groups"
    )


def _group_size(recipe: RLRecipe) -> str | None:
    algorithm = recipe.algorithm
    if not isinstance(algorithm, GroupAlgorithm | Selection) or recipe.responses_per_prompt >= 2:
        return None
    return (
        f"{algorithm.name} compares the responses of a group; responses_per_prompt is "
        f"{recipe.responses_per_prompt}, set it to 2 or more"
    )


def _kept_of_group(recipe: RLRecipe) -> str | None:
    algorithm = recipe.algorithm
    if not isinstance(algorithm, BestOfN) or algorithm.keep < recipe.responses_per_prompt:
        return None
    return (
        f"algorithm.keep ({algorithm.keep}) must be less than responses_per_prompt ({recipe.responses_per_prompt}): "
        "nothing would be selected"
    )


def _overlong(recipe: RLRecipe) -> str | None:
    algorithm, longest = recipe.algorithm, recipe.rollout.sampling.max_new_tokens
    overlong = algorithm.overlong if isinstance(algorithm, ScoredAlgorithm) else None
    if overlong is None or overlong.buffer < longest:
        return None
    return (
        f"algorithm.overlong.buffer ({overlong.buffer}) must be less than rollout.sampling.max_new_tokens "
        f"({longest}): every response would be too long"
    )


# Numerics and sampling -----------------------------------------------------------------------------------


def _exact_precision(recipe: RLRecipe) -> str | None:
    if recipe.numerics != "exact" or "bf16" not in (recipe.actor.train.precision, recipe.critic.train.precision):
        return None
    return "numerics: exact needs precision: fp32 for actor and critic; found bf16"


def _exact_device(recipe: RLRecipe) -> str | None:
    if recipe.numerics != "exact":
        return None
    if recipe.device.startswith("cuda"):
        return f"numerics: exact needs the CPU; found device: {recipe.device}"
    gpus = recipe.cluster.gpus_per_process if recipe.cluster.type == "ray" else 0
    return f"numerics: exact needs the CPU; found cluster.gpus_per_process: {gpus:g}" if gpus else None


def _exact_compiled(recipe: RLRecipe) -> str | None:
    if recipe.numerics != "exact" or not (recipe.actor.train.compile or recipe.critic.train.compile):
        return None
    return "numerics: exact needs the model's own layers, whose sums were examined: leave out train.compile"


def _exact_threads(recipe: RLRecipe) -> str | None:
    if recipe.numerics != "exact" or recipe.threads in (None, 1):
        return None
    return f"numerics: exact needs threads: 1; found {recipe.threads}"


def _temperature(recipe: RLRecipe) -> str | None:
    if recipe.rollout.sampling.temperature > 0:
        return None
    return "rollout.sampling.temperature is 0: greedy rollouts cannot be trained on; use e.g. 1.0"


# Advantages and losses -----------------------------------------------------------------------------------


def _sequence_ratio_and_advantages(recipe: RLRecipe) -> str | None:
    algorithm = recipe.algorithm
    if not isinstance(algorithm, PolicyGradient) or isinstance(algorithm, GroupAlgorithm):
        return None
    if not isinstance(algorithm.policy_loss, SEQUENCE_LOSSES):
        return None
    return (
        f"algorithm.policy_loss {algorithm.policy_loss.name} has one ratio per response, {algorithm.name} one "
        "advantage per token, which the ratio would average away; use clipped, cispo or reinforce"
    )


def _sequence_ratio_and_correction(recipe: RLRecipe) -> str | None:
    algorithm = recipe.algorithm
    if not isinstance(algorithm, PolicyGradient) or not isinstance(algorithm.policy_loss, SEQUENCE_LOSSES):
        return None
    if algorithm.off_policy is None or algorithm.off_policy.level == "sequence":
        return None
    return (
        f"algorithm.policy_loss {algorithm.policy_loss.name} has a ratio of the sequence: "
        "set algorithm.off_policy.level: sequence"
    )


def _aggregation_without_effect(recipe: RLRecipe) -> str | None:
    algorithm = recipe.algorithm
    if not isinstance(algorithm, PolicyGradient) or not isinstance(algorithm.policy_loss, SequenceClippedLoss):
        return None
    is_default = algorithm.aggregation == type(algorithm).model_fields["aggregation"].default
    kl = kl_term(algorithm)
    if is_default or algorithm.entropy_coef > 0 or (kl.coef > 0 and kl.place == "loss"):
        return None
    return (
        "algorithm.policy_loss sequence_clipped is the mean over responses, and there is no entropy or KL term in the "
        f"loss: algorithm.aggregation ({algorithm.aggregation}) would do nothing; leave it out"
    )


# KL and the reference ------------------------------------------------------------------------------------


def _kl_target(recipe: RLRecipe) -> str | None:
    kl = kl_term(recipe.algorithm)
    if kl.target is None or kl.coef > 0:
        return None
    return "algorithm.kl.coef is 0, so algorithm.kl.target has nothing to adapt; set a first coef"


def _kl_horizon(recipe: RLRecipe) -> str | None:
    kl, responses = kl_term(recipe.algorithm), recipe.prompts_per_step * recipe.responses_per_prompt
    if kl.target is None or kl.horizon >= responses:
        return None
    return (
        f"algorithm.kl.horizon ({kl.horizon}) is less than the responses of one step ({responses}): the "
        "coefficient would jump, and could turn negative"
    )


def _teacher(recipe: RLRecipe) -> str | None:
    if not isinstance(recipe.algorithm, Distillation) or recipe.reference.path is not None:
        return None
    return "distillation needs reference.path, the teacher: from itself the actor has nothing to learn"


# Environments ------------------------------------------------------------------------------------------


def _greedy_episodes(recipe: RLRecipe) -> str | None:
    if recipe.environment is None or not isinstance(recipe.algorithm, ReMax):
        return None
    return "remax has no greedy episodes for its baseline; with an environment use ppo, or rloo and several responses"


def _overlong_episodes(recipe: RLRecipe) -> str | None:
    algorithm = recipe.algorithm
    if recipe.environment is None or not isinstance(algorithm, ScoredAlgorithm) or algorithm.overlong is None:
        return None
    return (
        "algorithm.overlong is about one response of at most max_new_tokens, which holds for each turn of an episode; "
        "let the environment's rewards charge for length"
    )


def _pairs_of_episodes(recipe: RLRecipe) -> str | None:
    if recipe.environment is None or not isinstance(recipe.algorithm, OnlineDPO):
        return None
    return "online_dpo compares two answers to one prompt; episodes see different states: use best_of_n, grpo or rloo"


def _refreshed_reference(recipe: RLRecipe) -> str | None:
    algorithm = recipe.algorithm
    if not isinstance(algorithm, OnlineDPO) or algorithm.refresh_steps is None:
        return None
    if not reads_reference(algorithm):
        return f"algorithm.loss {algorithm.loss.name} has no reference, so algorithm.refresh_steps would do nothing"
    if recipe.reference.path is None and recipe.actor.train.lora is not None:
        return (
            "with actor.train.lora the reference is the actor without its adapters, which never changes: leave out "
            "algorithm.refresh_steps"
        )
    return None


# Rewards -------------------------------------------------------------------------------------------------


def _reward_names(recipe: RLRecipe) -> str | None:
    sources = (*recipe.rewards, *(recipe.evaluation.rewards if recipe.evaluation is not None else ()))
    models = {source.name for source in sources if isinstance(source, ModelReward | ProcessModelReward)}
    if clash := sorted(models & set(ROLES) - {"reward"}):
        return f"a reward model is called {clash[0]!r}, as a role of every run is: give it another name"
    names = [source.name for source in recipe.rewards if source.name]
    names += ["environment"] if recipe.environment is not None else []
    return f"two rewards have the same name: {names}" if len(set(names)) != len(names) else None


def _greedy_baseline_and_steps(recipe: RLRecipe) -> str | None:
    steps = [source.name for source in recipe.rewards if isinstance(source, ProcessModelReward)]
    if not isinstance(recipe.algorithm, ReMax) or not steps:
        return None
    return (
        f"algorithm remax takes the greedy response's whole score off every token, but the process reward {steps[0]!r} "
        "pays steps one by one: after the first step the baseline would count what is paid already; use "
        "reinforce_pp, ppo or a group method"
    )


# Placements ----------------------------------------------------------------------------------------------


def _stale_without_correction(recipe: RLRecipe) -> str | None:
    placement, algorithm = recipe.placement, recipe.algorithm
    if not isinstance(placement, AsynchronousPlacement) or placement.max_staleness == 0:
        return None
    if not isinstance(algorithm, PolicyGradient) or algorithm.off_policy is not None:
        return None
    return (
        f"an asynchronous placement trains on answers of weights up to {placement.max_staleness} versions old: set "
        "algorithm.off_policy (importance weights), say {level: token, mode: truncate, cap: 2.0}"
    )


def _cut_models(recipe: RLRecipe) -> str | None:
    cut = [role for role, of in (recipe.placement.sharding if recipe.placement else {}).items() if of.processes > 1]
    if not cut:
        return None
    return f"placement.sharding: models cannot be cut over processes yet ({', '.join(cut)}); leave it out"


def _cluster_without_placement(recipe: RLRecipe) -> str | None:
    if recipe.cluster.type == "local" or recipe.placement is not None:
        return None
    return "cluster.type ray needs a placement: say which role works where, {type: full_offload, pool: {}} say"


def _compiled_and_replaced(recipe: RLRecipe) -> str | None:
    compiles, cluster = recipe.actor.train.compile or recipe.critic.train.compile, recipe.cluster
    if not compiles or cluster.type != "ray" or cluster.max_restarts == 0:
        return None
    return (
        "train.compile cannot go on from a checkpoint with equal bits, which is what a replaced worker does: set "
        "cluster.max_restarts: 0, or leave train.compile out"
    )


def _device_of_workers(recipe: RLRecipe) -> str | None:
    return device_misfit(recipe.cluster, recipe.device)


CHECKS: tuple[Check, ...] = (
    _minibatches,
    _group_size,
    _kept_of_group,
    _overlong,
    _exact_precision,
    _exact_threads,
    _exact_device,
    _exact_compiled,
    _temperature,
    _sequence_ratio_and_advantages,
    _sequence_ratio_and_correction,
    _aggregation_without_effect,
    _kl_target,
    _kl_horizon,
    _teacher,
    _greedy_episodes,
    _overlong_episodes,
    _pairs_of_episodes,
    _refreshed_reference,
    _reward_names,
    _greedy_baseline_and_steps,
    _stale_without_correction,
    _cut_models,
    _cluster_without_placement,
    _device_of_workers,
    _compiled_and_replaced,
)


def misfits(recipe: RLRecipe) -> list[str]:
    """Every reason why the recipe's parts do not fit together."""
    return [reason for check in CHECKS if (reason := check(recipe)) is not None]


# Without effect ------------------------------------------------------------------------------------------


def without_effect(recipe: RLRecipe) -> list[str]:
    """What the recipe says and its method does not read, or what cannot do what it is there for, in words.

    It is not refused: one line of a recipe picks another method, and the sections of the former one may stay.
    """
    algorithm, critic, kl = recipe.algorithm, recipe.critic, kl_term(recipe.algorithm)
    found = []
    if algorithm.name != "ppo" and critic != type(critic)():
        found.append(f"critic: not read, {algorithm.name} has none")
    if algorithm.name == "ppo" and critic.warmup_steps >= recipe.steps:
        found.append(f"critic: its {critic.warmup_steps} warm-up steps leave no step in which the actor learns")
    if recipe.reference.path is not None and not reads_reference(algorithm):
        found.append(f"reference: not loaded, {algorithm.name} reads none with these settings (see algorithm.kl.coef)")
    if kl.coef > 0 and kl.place == "loss" and kl.estimator == "k1":
        found.append("kl: in the loss the gradient of k1 is 0 on average and holds nothing back; use k2 or k3")
    return found
