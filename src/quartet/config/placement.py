"""Placements: which role works on which devices, what shares what, and what may overlap.

One class per placement, each with only its own fields. ``resolve_placement`` turns any of them into the same plain
structure (pools, role → pool, admission rule, when scoring begins), so that nothing behind it knows which placement was
asked for.

================== ======================================================== ==========================================
``type``           pools                                                    scoring begins
================== ======================================================== ==========================================
separated          one per role                                             when the step's generation has ended
forward_offload    rollout · actor + reference · critic + reward            when the step's generation has ended
homogeneous        rollout · all four models                                when the step's generation has ended
full_offload       one for everything                                       when the step's generation has ended
pipelined          any, by name                                             chunk by chunk
asynchronous       any, by name                                             chunk by chunk; generation runs ahead
================== ======================================================== ==========================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

from pydantic import Field

from quartet.config.common import StrictModel
from quartet.config.errors import UserError
from quartet.config.strict import Processes

Role = Literal["actor", "critic", "reference", "reward", "rollout", "heads", "vision"]
InFlight = Literal["pick_up", "finish_old"]

ROLES: tuple[Role, ...] = get_args(Role)
HEADS: Role = "heads"
"""A drafter's model that learns along with the actor, in its processes: what it learns from is there."""
VISION: Role = "vision"
"""What computes the features of pictures ahead of those who read them; without it, whoever needs them first does."""


# What a recipe says --------------------------------------------------------------------------------------


class DevicesConfig(StrictModel):
    """``nodes`` machines with ``processes`` each, one device per process."""

    processes: Processes = Field(1, ge=1, description="Processes on each node.")
    nodes: int = Field(1, ge=1, description="Machines of the pool.")
    budget_bytes: int | None = Field(
        None, ge=1, description="Bytes of models that may be resident, over all processes; no limit when left out."
    )


class PoolConfig(DevicesConfig):
    """Devices that several roles share."""

    slots: int = Field(1, ge=1, description="Roles that compute at once.")


class NamedPoolConfig(PoolConfig):
    """Devices and the roles on them."""

    roles: tuple[Role, ...] = Field(min_length=1, description="Roles that work on these devices.")


class SeparatedPlacement(StrictModel):
    """Every role on devices of its own."""

    type: Literal["separated"] = "separated"
    actor: DevicesConfig = Field(description="Devices of the actor.")
    rollout: DevicesConfig = Field(description="Devices of the rollout engine.")
    critic: DevicesConfig | None = Field(None, description="Devices of the critic; left out where a run has none.")
    reference: DevicesConfig | None = Field(
        None, description="Devices of the reference; left out where a run has none."
    )
    reward: DevicesConfig | None = Field(
        None, description="Devices of each reward model; left out where a run has none."
    )


class ForwardOffloadPlacement(StrictModel):
    """Two models share devices and take turns in forward passes; actor and critic train at the same time."""

    type: Literal["forward_offload"] = "forward_offload"
    rollout: DevicesConfig = Field(description="Devices of the rollout engine.")
    actor_reference: PoolConfig = Field(description="Devices of actor and reference.")
    critic_reward: PoolConfig | None = Field(
        None, description="Devices of critic and reward models; left out where a run has neither."
    )


class HomogeneousPlacement(StrictModel):
    """All four models take turns on one pool; the rollout engine has its own."""

    type: Literal["homogeneous"] = "homogeneous"
    rollout: DevicesConfig = Field(description="Devices of the rollout engine.")
    models: PoolConfig = Field(description="Devices of actor, critic, reference and reward models.")


class FullOffloadPlacement(StrictModel):
    """Everything takes turns on one pool; the engine gives up cache and weights while others work."""

    type: Literal["full_offload"] = "full_offload"
    pool: PoolConfig = Field(description="Devices of every role.")


class _Pools(StrictModel):
    pools: dict[str, NamedPoolConfig] = Field(min_length=1, description="Pools by name; each role is on one of them.")

    def _misfits(self) -> Iterator[str]:
        for role in ROLES:
            found = [name for name, pool in self.pools.items() for placed in pool.roles if placed == role]
            if len(found) > 1:
                yield f"role {role} is on {len(found)} pools ({', '.join(found)}): keep it on one of them"


class PipelinedPlacement(_Pools):
    """Scoring of finished chunks overlaps the generation of later ones."""

    type: Literal["pipelined"] = "pipelined"


class AsynchronousPlacement(_Pools):
    """Generation runs ahead of training by at most ``max_staleness`` versions of the weights."""

    type: Literal["asynchronous"] = "asynchronous"
    max_staleness: int = Field(1, ge=0, description="Versions that weights may have moved on since a group began.")
    in_flight: InFlight = Field(
        "pick_up",
        description="When weights arrive, responses go on with them, or finish on the old ones first.",
    )


PlacementConfig = Annotated[
    SeparatedPlacement
    | ForwardOffloadPlacement
    | HomogeneousPlacement
    | FullOffloadPlacement
    | PipelinedPlacement
    | AsynchronousPlacement,
    Field(discriminator="type"),
]


# What everything else reads ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResolvedPool:
    """``slots``: roles computing at once. ``budget_bytes`` None: no limit."""

    name: str
    processes: int
    nodes: int
    slots: int
    budget_bytes: int | None

    @property
    def num_processes(self) -> int:
        return self.processes * self.nodes

    @property
    def processes_per_node(self) -> tuple[int, ...]:
        return (self.processes,) * self.nodes


@dataclass(frozen=True)
class ResolvedPlacement:
    """A placement for the roles of one run.

    Args:
        pool_of: role name → pool name, for every role of the run.
        max_staleness: None for synchronous generation.
        in_flight: what new weights do to responses that are being generated.
        scores_early: a chunk is scored as soon as it is complete, else when the step's generation has ended.
    """

    type: str
    pools: tuple[ResolvedPool, ...]
    pool_of: Mapping[str, str]
    max_staleness: int | None = None
    in_flight: InFlight = "pick_up"
    scores_early: bool = True

    def pool(self, name: str) -> ResolvedPool:
        return next(pool for pool in self.pools if pool.name == name)

    @property
    def num_processes(self) -> int:
        return sum(pool.num_processes for pool in self.pools)


def resolve_placement(config: PlacementConfig, roles: Mapping[str, Role]) -> ResolvedPlacement:
    """Makes the placement of a run whose roles are ``roles`` (name → kind: there may be several reward models).

    Raises:
        UserError: a role without a pool, a pool without a role, or heads apart from the actor.
    """
    pools = _pools_of(config)
    home = {kind: name for name, (_, on_it) in pools.items() for kind in on_it}
    kinds = set(roles.values())
    for name, kind in roles.items():
        if kind not in home and kind not in (HEADS, VISION):
            placed = ", ".join(f"{role} on {pool}" for role, pool in sorted(home.items()))
            raise UserError(
                f"role {name!r} has no pool",
                found=f"placement {config.type}: {placed}",
                remedy=f"give the {kind} a pool, or put it on one that is there",
            )
    if HEADS in kinds and home.setdefault(HEADS, home["actor"]) != home["actor"]:
        raise UserError(
            "heads that learn along work in the actor's processes",
            found=f"heads on pool {home[HEADS]!r}, actor on {home['actor']!r}",
            remedy=f"put heads beside the actor, or leave them out of placement.pools.{home[HEADS]}.roles",
        )
    home.setdefault(VISION, home["rollout"])
    for name, (pool, on_it) in pools.items():
        if not kinds.intersection(on_it):
            raise UserError(
                f"pool {name!r} would do nothing",
                found=f"{pool.processes * pool.nodes} processes for {' and '.join(on_it)}, "
                "which this run does not have",
                remedy="leave the pool out, or use a placement without it",
            )
    resolved = ResolvedPlacement(
        type=config.type,
        pools=tuple(
            ResolvedPool(
                name, pool.processes, pool.nodes, pool.slots if isinstance(pool, PoolConfig) else 1, pool.budget_bytes
            )
            for name, (pool, _) in pools.items()
        ),
        pool_of={name: home[kind] for name, kind in roles.items()},
        scores_early=isinstance(config, _Pools),
    )
    if isinstance(config, AsynchronousPlacement):
        return replace(resolved, max_staleness=config.max_staleness, in_flight=config.in_flight)
    return resolved


def check_devices(placement: ResolvedPlacement, devices_per_node: Sequence[int]) -> None:
    """Raises `UserError` when the pools cannot fit on nodes with so many devices each; pools share no device. Some that
    pass cannot be placed all the same: these end with ``cluster.start_timeout_s``.
    """
    fits = all(sum(n >= pool.processes for n in devices_per_node) >= pool.nodes for pool in placement.pools)
    if fits and placement.num_processes <= sum(devices_per_node):
        return
    asked = ", ".join(f"{pool.name} {pool.nodes} × {pool.processes}" for pool in placement.pools)
    raise UserError(
        "the placement needs more processes than there are devices",
        found=f"{placement.num_processes} processes (nodes × processes: {asked}); "
        f"{sum(devices_per_node)} devices on {len(devices_per_node)} nodes of {', '.join(map(str, devices_per_node))}",
        remedy="give the pools fewer processes, put the roles on fewer pools (full_offload needs one), or add nodes",
    )


_ON: dict[str, tuple[Role, ...]] = {
    **{role: (role,) for role in ROLES},
    "actor_reference": ("actor", "reference"),
    "critic_reward": ("critic", "reward"),
    "models": ("actor", "critic", "reference", "reward"),
    "pool": ROLES,
}
"""Roles on the pools that are keys of a placement of their own."""


def _pools_of(config: PlacementConfig) -> dict[str, tuple[DevicesConfig, tuple[Role, ...]]]:
    """Returns the pools by name, each with the roles on it."""
    if isinstance(config, _Pools):
        return {name: (pool, pool.roles) for name, pool in config.pools.items()}
    given = {name: getattr(config, name) for name in type(config).model_fields}
    return {name: (part, _ON[name]) for name, part in given.items() if isinstance(part, DevicesConfig)}


def num_processes_of(config: PlacementConfig | None, kind: Role) -> int:
    """Counts the processes of the pool that roles of this kind are on; 1 where they have none, or there is no
    placement.
    """
    pool = _pool_with(config, kind)
    return pool.processes * pool.nodes if pool is not None else 1


def has_memory_budget(config: PlacementConfig | None, kind: Role) -> bool:
    """Tells whether roles of this kind leave their devices for others."""
    pool = _pool_with(config, kind)
    return pool is not None and pool.budget_bytes is not None


def _pool_with(config: PlacementConfig | None, kind: Role) -> DevicesConfig | None:
    pools = _pools_of(config).values() if config is not None else ()
    return next((pool for pool, on_it in pools if kind in on_it), None)
