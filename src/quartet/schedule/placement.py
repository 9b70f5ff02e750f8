"""From a resolved placement to the arbiter that grants its leases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quartet.config.placement import HEADS, ResolvedPlacement, ResolvedPool
from quartet.schedule.leases import Arbiter, LeaseMode, Offloader, PoolSpec, RoleSpec

LOCAL_POOL = "local"


def local_placement(roles: Iterable[str]) -> ResolvedPlacement:
    """What a run without a placement has: one pool with one slot, on which all roles take turns and nothing moves."""
    pool = ResolvedPool(LOCAL_POOL, processes=1, nodes=1, slots=1, budget_bytes=None)
    return ResolvedPlacement("local", (pool,), dict.fromkeys(roles, LOCAL_POOL))


def placed_arbiter(
    placement: ResolvedPlacement,
    resident_bytes: Mapping[str, Mapping[LeaseMode, int]],
    *,
    version: int = 0,
    offloader: Offloader | None = None,
    patience: int = 4,
) -> Arbiter:
    """The arbiter of a placement.

    Args:
        resident_bytes: role name → mode → bytes that must be on the role's pool in it; a role of ``resolve`` each.
        version: that of every state as the run begins.

    Raises:
        UserError: a role that alone is larger than its pool's budget, with the bytes and what would do.
    """
    pools = [PoolSpec(pool.name, pool.slots, pool.budget_bytes) for pool in placement.pools]
    roles = [RoleSpec(name, placement.pool_of[name], sizes) for name, sizes in resident_bytes.items()]
    # Weights change of those that train, and of the engine's copy; the heads' parts are the actor's.
    states = [role.name for role in roles if role.resident_bytes.keys() & {"train", "generate"}]
    versions = dict.fromkeys([*states, *({HEADS} & placement.pool_of.keys())], version)
    arbiter = Arbiter(pools, roles, versions=versions, offloader=offloader, patience=patience)
    # The largest first: what it asks for is enough for the others.
    needs = [(size, role.name, mode) for role in roles for mode, size in role.resident_bytes.items()]
    for _, name, mode in sorted(needs, key=lambda need: -need[0]):
        arbiter.check_possible(name, mode)
    return arbiter


def local_arbiter(sizes: Mapping[str, Mapping[LeaseMode, int]], *, version: int) -> Arbiter:
    """The arbiter of ``local_placement``; ``sizes``: role → mode → bytes."""
    return placed_arbiter(local_placement(sizes), sizes, version=version)
