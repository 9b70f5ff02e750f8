"""What runs in each process of a pool: the hosts of all roles that are placed there."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from quartet.cluster import Worker
from quartet.config.recipe import RLRecipe
from quartet.models.packed import PackedCausalLM
from quartet.observe.memory import held_bytes
from quartet.rollout.engine import NativeEngine
from quartet.rollout.weights import num_bytes_of, own_copy
from quartet.schedule.engine_host import EngineHost
from quartet.schedule.leases import Mode
from quartet.schedule.model_host import FrozenHost, TrainedHost
from quartet.schedule.movable import Movable
from quartet.schedule.weight_ends import TakesWeights
from quartet.text.tokenizer import TextCodec
from quartet.train.data_parallel import Peers
from quartet.train.offload import Moved, Offload, Store
from quartet.trainers.loader import Loader, Passed
from quartet.trainers.run import use_threads

TRAINED = ("actor", "critic")


class PlacedEngine(EngineHost, TakesWeights, Movable):
    """An engine under a placement: it takes weights of its own, and gives up cache and weights while others work."""

    def __init__(self, engine: NativeEngine) -> None:
        super().__init__(engine)
        self.engine: NativeEngine = engine

    def sizes(self) -> dict[Mode, int]:
        """Bytes that must be on the device to generate: its own weights; the cache grows with the requests."""
        return {"generate": num_bytes_of(self.engine.packed.model) if self.engine.owns_weights else 0}

    def offload(self) -> Moved:
        """The cache is destroyed, the weights leave. Requests are kept: their keys and values are computed again."""
        before, device = held_bytes(self.engine.packed.device), self.engine.packed.device
        cached = self.engine.resident_bytes() - self.sizes()["generate"]
        self.engine.release_cache()
        moved = super().offload()
        return replace(moved, num_bytes=moved.num_bytes + cached, freed_bytes=before - held_bytes(device))

    def _offload(self, store: Store) -> Offload:
        return Offload(self.engine.packed, store)


Host = FrozenHost | TrainedHost | PlacedEngine


def rollout_host(
    recipe: RLRecipe, actor: PackedCausalLM, codec: TextCodec, *, shares_actor: bool, is_own: bool
) -> PlacedEngine:
    """The engine's host.

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
    return PlacedEngine(engine)


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


class PoolWorker(Worker):
    """All roles of one pool. Loads only their models (and, for a moment, what a critic starts from)."""

    def __init__(self, recipe: RLRecipe, passed: Passed, part: Part) -> None:
        if os.path.isdir(part.directory):
            os.chdir(part.directory)
        use_threads(1 if recipe.numerics == "exact" else recipe.threads)
        trains = any(role in TRAINED for role in part.roles)
        if self.world_size > 1 and trains:
            self.init_process_group()
        loader = Loader(
            recipe,
            passed,
            device=self.device if self.device.type == "cuda" else None,
            shares_reference=part.shares_reference,
            peers=Peers.of_world() if self.world_size > 1 and trains else None,
        )
        self._hosts: dict[str, Host] = {}
        # Each leaves before the next one comes; those that others start from come last.
        for role in sorted(part.roles, key=_made_after):
            host: Host
            if role == "rollout":
                is_own = "actor" not in part.roles
                host = rollout_host(recipe, loader.actor, loader.codec, shares_actor=part.shares_actor, is_own=is_own)
            else:
                host = loader.host(role)
            if part.moves:
                host.make_movable(recipe.offload)
                host.offload()
            self._hosts[role] = host

    def on(self, role: str, method: str, *args: Any) -> Any:
        """A method of a role's host."""
        return getattr(self._hosts[role], method)(*args)
