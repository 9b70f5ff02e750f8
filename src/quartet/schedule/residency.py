"""Slots and bytes of one pool: who computes, whose parts are resident, what must move before a role works.

Slots count *roles*, not leases: a role takes one slot for as long as it holds any lease. Bytes are
independent of slots: parts stay resident after their role has finished, until a role that needs the room has
them offloaded. The modes of a role are nested: one that needs more bytes contains the parts of those that
need fewer (training holds the parameters that forward needs), so a role resident for training is resident for
forward too. A role whose modes have disjoint parts is two roles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, Protocol

from quartet.config.errors import UserError
from quartet.schedule.clock import now

Mode = Literal["generate", "forward", "train"]


@dataclass(frozen=True)
class PoolSpec:
    """A set of devices that roles share. `slots`: roles computing at once. `budget_bytes` None: unlimited."""

    name: str
    slots: int = 1
    budget_bytes: int | None = None


@dataclass(frozen=True)
class RoleSpec:
    """A role on its pool. `resident_bytes[mode]` must be on the device in it; other modes are unused."""

    name: str
    pool: str
    resident_bytes: Mapping[Mode, int]


@dataclass(frozen=True)
class HandOver:
    """One movement of a role's parts, in seconds of the loop's clock; `mode` is None for an offload."""

    role: str
    mode: Mode | None
    moved_bytes: int
    duration_s: float


class Mover(Protocol):
    """Really moves parts. A call may take long; one that raises must leave the role's parts as they were.

    `onload` is also called to add to what is resident (forward → train). A call is never cancelled midway by
    the arbiter.
    """

    async def onload(self, role: str, mode: Mode) -> None: ...

    async def offload(self, role: str) -> None: ...


class BookkeepingMover:
    """Moves nothing: for roles whose parts stay where they are, and for tests of the accounts."""

    async def onload(self, role: str, mode: Mode) -> None:
        return None

    async def offload(self, role: str) -> None:
        return None


@dataclass
class Move:
    """What moves before `role` can work in `mode`: offloads first, then an onload up to `target_bytes`."""

    role: str
    mode: Mode
    target_bytes: int
    evict: tuple[str, ...]
    abandoned: bool = False


class _Parts:
    """A role's side of the account."""

    def __init__(self, spec: RoleSpec) -> None:
        self.spec = spec
        self.resident_bytes = 0
        self.incoming_bytes = 0  # granted, but not moved in yet
        self.num_leases = 0
        self.last_used = 0

    @property
    def claimed_bytes(self) -> int:
        return max(self.resident_bytes, self.incoming_bytes)


class Pool:
    """The accounts of one pool. Only one `Move` is under way at a time: bytes being offloaded still count."""

    def __init__(self, spec: PoolSpec, roles: Iterable[RoleSpec]) -> None:
        self.spec = spec
        self.peak_bytes = 0
        self.onloaded_bytes = 0
        self.offloaded_bytes = 0
        self.hand_overs: list[HandOver] = []
        self._parts = {role.name: _Parts(role) for role in roles}
        self._move: Move | None = None
        self._uses = 0

    @property
    def resident_bytes(self) -> int:
        return sum(parts.resident_bytes for parts in self._parts.values())

    @property
    def busy_roles(self) -> set[str]:
        return {name for name, parts in self._parts.items() if parts.num_leases}

    @property
    def is_moving(self) -> bool:
        return self._move is not None

    def is_resident(self, role: str, mode: Mode) -> bool:
        """True when `role` could work in `mode` without anything being moved."""
        if self._move is not None and (role == self._move.role or role in self._move.evict):
            return False
        parts = self._parts[role]
        return parts.resident_bytes >= parts.spec.resident_bytes[mode]

    def has_slot(self, role: str) -> bool:
        busy = self.busy_roles
        return role in busy or len(busy) < self.spec.slots

    def plan(self, role: str, mode: Mode) -> Move | None:
        """The move that lets `role` work in `mode` now (perhaps an empty one), or None if none does."""
        parts = self._parts[role]
        if self.is_resident(role, mode):
            return Move(role, mode, parts.resident_bytes, evict=())
        if self._move is not None:
            return None
        target = parts.spec.resident_bytes[mode]
        if self.spec.budget_bytes is None:
            return Move(role, mode, target, evict=())
        excess = self.resident_bytes - parts.resident_bytes + target - self.spec.budget_bytes
        evict = self._choose_evictions(role, excess)
        return None if evict is None else Move(role, mode, target, evict)

    def has_room(self, claims: Mapping[str, int]) -> bool:
        """True when these roles (name → bytes) could all work beside the busy ones, idle parts offloaded."""
        needed = {name: self._parts[name].claimed_bytes for name in self.busy_roles}
        for name, num_bytes in claims.items():
            needed[name] = max(num_bytes, needed.get(name, 0))
        budget = self.spec.budget_bytes
        return len(needed) <= self.spec.slots and (budget is None or sum(needed.values()) <= budget)

    def take(self, move: Move) -> bool:
        """Books a granted lease; True when its move has to be carried out before the role may work."""
        parts = self._parts[move.role]
        parts.num_leases += 1
        self._touch(parts)
        if move.target_bytes <= parts.resident_bytes:
            return False
        parts.incoming_bytes = move.target_bytes
        self._move = move
        return True

    def give_back(self, role: str) -> None:
        parts = self._parts[role]
        parts.num_leases -= 1
        self._touch(parts)

    def drop(self, move: Move) -> None:
        """Forgets a move that ended, or never began because its lease was cancelled before it woke up."""
        if self._move is move:
            self._move = None
            self._parts[move.role].incoming_bytes = 0

    async def carry_out(self, move: Move, mover: Mover) -> None:
        """Moves the parts. A cancelled caller is held until the step under way has really ended."""
        task = asyncio.ensure_future(self._steps(move, mover))
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
                move.abandoned = True
        if cancelled is not None:
            raise cancelled from (None if task.cancelled() else task.exception())
        task.result()

    async def _steps(self, move: Move, mover: Mover) -> None:
        try:
            for name in move.evict:
                if move.abandoned:
                    return
                started_s = now()
                await mover.offload(name)
                parts = self._parts[name]
                self._record(name, None, parts.resident_bytes, started_s)
                parts.resident_bytes = 0
            if not move.abandoned:
                await self._bring_in(move, mover)
        finally:
            self.drop(move)

    async def _bring_in(self, move: Move, mover: Mover) -> None:
        parts = self._parts[move.role]
        before_bytes = parts.resident_bytes
        parts.resident_bytes = move.target_bytes  # the room is taken from the first byte on
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
        started_s = now()
        try:
            await mover.onload(move.role, move.mode)
        except BaseException:
            parts.resident_bytes = before_bytes
            raise
        self._record(move.role, move.mode, move.target_bytes - before_bytes, started_s)

    def _choose_evictions(self, besides: str, excess_bytes: int) -> tuple[str, ...] | None:
        """Idle roles to offload to free `excess_bytes`, least recently used first; None if too few."""
        idle = [p for n, p in self._parts.items() if n != besides and p.resident_bytes and not p.num_leases]
        chosen: list[_Parts] = []
        for parts in sorted(idle, key=lambda p: p.last_used):
            if excess_bytes <= 0:
                break
            chosen.append(parts)
            excess_bytes -= parts.resident_bytes
        for parts in list(chosen):  # a later, larger one may have made an earlier one unnecessary
            if excess_bytes + parts.resident_bytes <= 0:
                chosen.remove(parts)
                excess_bytes += parts.resident_bytes
        return None if excess_bytes > 0 else tuple(parts.spec.name for parts in chosen)

    def _record(self, role: str, mode: Mode | None, moved_bytes: int, started_s: float) -> None:
        if mode is None:
            self.offloaded_bytes += moved_bytes
        else:
            self.onloaded_bytes += moved_bytes
        self.hand_overs.append(HandOver(role, mode, moved_bytes, now() - started_s))

    def _touch(self, parts: _Parts) -> None:
        self._uses += 1
        parts.last_used = self._uses


def check_placement(pools: list[PoolSpec], roles: list[RoleSpec]) -> None:
    """Raises `UserError` for double names, unknown pools and impossible numbers."""
    for kind, names in (("pool", [p.name for p in pools]), ("role", [r.name for r in roles])):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(f"two {kind}s have one name", found=", ".join(twice), remedy=f"rename one {kind}")
    for pool in pools:
        if pool.slots < 1:
            raise UserError(f"pool {pool.name!r} has no slot", found=f"slots={pool.slots}", remedy="use at least 1")
        if pool.budget_bytes is not None and pool.budget_bytes < 0:
            raise UserError(
                f"pool {pool.name!r} has a negative budget",
                found=f"budget_bytes={pool.budget_bytes}",
                remedy="use 0 or more, or None for no limit",
            )
    known = [pool.name for pool in pools]
    for role in roles:
        if role.pool not in known:
            nearest = get_close_matches(role.pool, known, n=1)
            raise UserError(
                f"role {role.name!r} is on an unknown pool {role.pool!r}",
                found=f"known pools: {', '.join(sorted(known)) or 'none'}",
                remedy=f"use {nearest[0]!r}" if nearest else "declare the pool",
            )
        negative = {mode: size for mode, size in role.resident_bytes.items() if size < 0}
        if negative:
            raise UserError(
                f"role {role.name!r} has a negative size", found=f"{negative}", remedy="use 0 or more bytes"
            )
