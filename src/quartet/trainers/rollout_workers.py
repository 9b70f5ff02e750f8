"""The rollout role's worker of a recipe: around the native engine in its process, or around engines elsewhere."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import chain

import torch

from quartet.config.engines import VLLMEngineConfig, is_served
from quartet.config.placement import AsynchronousPlacement, ResolvedPlacement
from quartet.config.recipe import RLRecipe
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.drafter import DrafterModel, load_drafter_model
from quartet.rollout.engine import own_copy
from quartet.rollout.staging import StagedWeights
from quartet.schedule.rollout_worker import NativeRolloutWorker
from quartet.schedule.served_rollout_worker import ServedRolloutWorker
from quartet.text.tokenizer import TextCodec
from quartet.trainers.devices import precision_on
from quartet.trainers.engines import Policy, model_folder, native_engine, open_engine, runs_own_code, vllm_dtype

AnyRolloutWorker = NativeRolloutWorker | ServedRolloutWorker


def shares_actor(recipe: RLRecipe, placement: ResolvedPlacement) -> bool:
    """Whether the engine uses the actor's weights without a copy: both share a pool, and nothing is offloaded."""
    pool = placement.pool(placement.pool_of["rollout"])
    is_alone = pool.slots == 1 and pool.budget_bytes is None and pool.num_processes == 1
    ahead = isinstance(recipe.placement, AsynchronousPlacement)
    return placement.pool_of["actor"] == pool.name and is_alone and not ahead and not is_served(recipe.rollout.engine)


def native_rollout_worker(
    recipe: RLRecipe,
    actor: PackedCausalLM,
    codec: TextCodec,
    *,
    shares_actor: bool,
    is_own: bool,
    drafter_model: DrafterModel | None,
) -> NativeRolloutWorker:
    """Around an engine in this process.

    Args:
        actor: the actor's model, or (``is_own``) one that is the engine's alone.
        shares_actor: the engine computes with ``actor`` as it is; otherwise with a copy where it is not its own.
        drafter_model: that learns along with ``actor``, of an engine that shares it.
    """
    packed = actor if shares_actor or is_own else own_copy(actor)
    engine = native_engine(
        packed,
        recipe.rollout.engine,
        codec.decode_completion,
        owns_weights=not shares_actor,
        speculation=recipe.rollout.speculation,
        model=drafter_model,
    )
    return NativeRolloutWorker(engine, codec)


def served_rollout_worker(
    recipe: RLRecipe,
    placement: ResolvedPlacement,
    actor: PackedCausalLM,
    codec: TextCodec,
    device: torch.device,
    *,
    drafter_model: DrafterModel | None,
) -> ServedRolloutWorker:
    """Around engines in processes or on servers of their own, which are started now and wait for weights.

    Args:
        actor: its names and shapes count; contents only where the recipe names no directory with it.
        drafter_model: that learns along with it; names and shapes count.
        device: of this process.

    Raises:
        UserError, EngineFailed: they cannot be had, or do not fit the recipe.
    """
    config, pool = recipe.rollout.engine, placement.pool(placement.pool_of["rollout"])
    speculation = recipe.rollout.speculation
    if drafter_model is None and isinstance(config, VLLMEngineConfig):
        load_drafter_model(speculation, actor)  # which refuses another policy's
    precision = precision_on(device, recipe.actor.train.precision)
    dtype = getattr(torch, vllm_dtype(config, precision)) if isinstance(config, VLLMEngineConfig) else None
    adapters, num_engines = actor.adapters, config.engines if isinstance(config, VLLMEngineConfig) else 1
    named = actor.model.named_parameters(remove_duplicate=False) if adapters is None else adapters.trained.items()
    with ExitStack() as made:
        folder = made.enter_context(model_folder(recipe.actor.model, actor, codec))
        staging = StagedWeights(chain(named, drafter_model.weights() if drafter_model is not None else ()), dtype)
        made.callback(staging.close)
        policy = Policy(
            folder,
            actor.vocab_size,
            codec.decode_completion,
            precision,
            recipe.numerics,
            recipe.actor.train.lora,
            recipe.seed,
            device,
            staging,
            pool.budget_bytes is not None,
            speculation,
            runs_own_code(recipe.actor.model, actor),
        )
        router = open_engine(config, policy)
        made.callback(router.close)
        worker = ServedRolloutWorker(
            router,
            codec,
            weight_bytes=num_engines * sum(p.numel() * (dtype or p.dtype).itemsize for p in actor.model.parameters()),
            lease_s=config.lease_s,
            shares_devices=[*placement.pool_of.values()].count(pool.name) > 1,
            sleep_level=getattr(config, "sleep_level", 1),
            close=made.pop_all().close,
        )
        return worker
