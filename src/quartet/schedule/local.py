"""Everything in one process: one pool with one slot, on which all roles take turns and nothing ever moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quartet.config.placement import ResolvedPlacement, ResolvedPool
from quartet.schedule.leases import Arbiter, Mode
from quartet.schedule.placement import placed_arbiter

POOL = "local"


def local_placement(roles: Iterable[str]) -> ResolvedPlacement:
    """What a run without a placement has."""
    names = list(roles)
    pool = ResolvedPool(POOL, processes=1, nodes=1, slots=1, budget_bytes=None)
    return ResolvedPlacement("local", (pool,), dict.fromkeys(names, POOL), dict.fromkeys(names, 1))


def local_arbiter(sizes: Mapping[str, Mapping[Mode, int]], *, version: int) -> Arbiter:
    """``sizes``: role → mode → bytes; every role that trains, and an engine's copy, is a state."""
    return placed_arbiter(local_placement(sizes), sizes, version=version)
