"""What runs in each process of a pool: the workers of all roles that are placed there."""

from __future__ import annotations

import os
from dataclasses import dataclass

from quartet.config.recipe import RLRecipe
from quartet.models.packed import PackedCausalLM
from quartet.rollout.engine import NativeEngine
from quartet.rollout.weights import own_copy
from quartet.schedule.model_worker import ModelWorker
from quartet.schedule.role_group import RolesWorker
from quartet.schedule.rollout_worker import NativeRolloutWorker
from quartet.schedule.writer import Writer
from quartet.text.tokenizer import TextCodec
from quartet.train.data_parallel import Peers
from quartet.trainers.devices import worker_device
from quartet.trainers.loader import Loader, Passed
from quartet.trainers.ptx import PTX
from quartet.trainers.run import use_threads

TRAINED = ("actor", "critic")
WRITER = "writer of rollouts"
"""Among the roles of a process; no reward model can be called that, as their names have no spaces."""


def rollout_worker(
    recipe: RLRecipe, actor: PackedCausalLM, codec: TextCodec, *, shares_actor: bool, is_own: bool
) -> NativeRolloutWorker:
    """The rollout role's worker in this process.

    Args:
        actor: the actor's model, or (``is_own``) one that is the engine's alone.
        shares_actor: the engine computes with ``actor`` as it is; otherwise with a copy where it is not its own.
    """
    config = recipe.rollout
    packed = actor if shares_actor or is_own else own_copy(actor)
    engine = NativeEngine(
        packed,
        owns_weights=not shares_actor,
        max_running=config.max_running,
        max_prefill_tokens=config.max_prefill_tokens,
        cache_tokens=config.cache_tokens,
        decode=codec.decode,
    )
    return NativeRolloutWorker(engine, codec)


@dataclass(frozen=True)
class Part:
    """What a pool's workers play.

    Args:
        roles: names, ``rollout`` among them where it is placed here.
        moves: the pool has a budget, so parts of its roles are moved out and in.
        directory: of the driver; paths of the recipe begin there, where a node has it.
    """

    roles: tuple[str, ...]
    shares_actor: bool
    shares_reference: bool
    moves: bool
    directory: str


def _made_after(role: str) -> int:
    """A critic may start as a copy of a reward model, everything else as one of the actor."""
    return {"critic": 0, "reference": 1, "rollout": 3, "actor": 4}.get(role, 2)


class PoolWorker(RolesWorker):
    """All roles of one pool. Loads only their models (and, for a moment, what a critic starts from).

    Args:
        ptx: the demonstrations, for the actor if it is placed here.
    """

    def __init__(self, recipe: RLRecipe, passed: Passed, part: Part, ptx: PTX | None = None) -> None:
        if os.path.isdir(part.directory):
            os.chdir(part.directory)
        use_threads(1 if recipe.numerics == "exact" else recipe.threads)
        trains = any(role in TRAINED for role in part.roles)
        if self.world_size > 1 and trains:
            self.init_process_group()
        loader = Loader(
            recipe,
            passed,
            device=worker_device(self.device, recipe),
            moves_passed=True,
            shares_reference=part.shares_reference,
            peers=Peers.of_world() if self.world_size > 1 and trains else None,
        )
        self.roles: dict[str, ModelWorker | NativeRolloutWorker | Writer] = {}
        # Each leaves before the next one comes; those that others start from come last.
        for role in sorted(part.roles, key=_made_after):
            worker: ModelWorker | NativeRolloutWorker
            if role == "rollout":
                is_own = "actor" not in part.roles
                worker = rollout_worker(
                    recipe, loader.actor, loader.codec, shares_actor=part.shares_actor, is_own=is_own
                )
            else:
                worker = loader.worker(role, ptx)
            if part.moves:
                worker.make_movable(recipe.offload)
                worker.offload()
            self.roles[role] = worker
        if "actor" in part.roles:
            self.roles[WRITER] = Writer(loader.codec)
