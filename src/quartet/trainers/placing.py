"""The roles of an RL recipe and where they are placed; everything that can be said before a model is loaded."""

from __future__ import annotations

from transformers import PreTrainedModel

from quartet.config import UserError
from quartet.config.algorithms import reads_reference
from quartet.config.placement import AsynchronousPlacement, ResolvedPlacement, Role, resolve
from quartet.config.recipe import RLRecipe
from quartet.config.rewards import ModelReward, ProcessModelReward
from quartet.schedule.placement import local_placement
from quartet.trainers.loader import Passed, Rewards
from quartet.trainers.reward_roles import passed_names


def role_kinds(recipe: RLRecipe, passed: Passed) -> dict[str, Role]:
    """Kind of every role that works on devices, by its name: there may be several reward models."""
    kinds: dict[str, Role] = {"actor": "actor", "rollout": "rollout"}
    if recipe.algorithm.name == "ppo":
        kinds["critic"] = "critic"
    if reads_reference(recipe.algorithm):
        kinds["reference"] = "reference"
    only = recipe.evaluation.rewards if recipe.evaluation is not None else ()
    names = [*_reward_models(recipe.rewards, passed.rewards), *_reward_models(only, passed.evaluation_rewards)]
    return kinds | dict.fromkeys(names, "reward")


def _reward_models(configs: tuple[object, ...], rewards: Rewards) -> list[str]:
    named = [config.name for config in configs if isinstance(config, ModelReward | ProcessModelReward)]
    num_plain = sum(isinstance(config, ModelReward) for config in configs)
    num_passed = sum(isinstance(reward, PreTrainedModel) for reward in rewards)
    return named + passed_names(num_passed, after=num_plain)


def placement_of(recipe: RLRecipe, passed: Passed) -> ResolvedPlacement:
    """
    Raises:
        UserError: a placement that cannot work, with the numbers and what would.
    """
    kinds = role_kinds(recipe, passed)
    if recipe.placement is None:
        return local_placement(kinds)
    placement = resolve(recipe.placement, kinds)
    if recipe.cluster.type == "local":
        crowded = [pool for pool in placement.pools if pool.num_processes > 1]
        if crowded:
            raise UserError(
                "the placement needs more processes than there are",
                found=f"pool {crowded[0].name!r} with {crowded[0].num_processes} processes; cluster.type local has one "
                "for all pools",
                remedy="set cluster.type: ray, or leave processes and nodes out",
            )
    return placement


def shares_actor(recipe: RLRecipe, placement: ResolvedPlacement) -> bool:
    """Whether the engine computes with the actor's own tensors: nobody trains them meanwhile, and nothing moves."""
    pool = placement.pool(placement.pool_of["rollout"])
    is_alone = pool.slots == 1 and pool.budget_bytes is None and pool.num_processes == 1
    ahead = isinstance(recipe.placement, AsynchronousPlacement)
    return placement.pool_of["actor"] == pool.name and is_alone and not ahead


def shares_reference(placement: ResolvedPlacement) -> bool:
    """Whether a LoRA actor's reference may be that actor without its adapters: where both lie, and nothing moves."""
    if "reference" not in placement.pool_of:
        return True
    pool = placement.pool(placement.pool_of["reference"])
    return placement.pool_of["actor"] == pool.name and pool.budget_bytes is None
