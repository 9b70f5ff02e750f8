"""Slots and bytes of one pool: who computes, whose parts are resident, what must move before a role works.

Slots count *roles*, not leases: a role takes one slot for as long as it holds any lease. Bytes are
independent of slots: parts stay resident after their role has finished, until a role that needs the room has
them offloaded. The modes of a role are nested: one that needs more bytes contains the parts of those that
need fewer (training holds the parameters that forward needs), so a role resident for training is resident for
forward too. A role whose modes have disjoint parts is two roles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from quartet.schedule.clock import drained

LeaseMode = Literal["generate", "forward", "train"]


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
    resident_bytes: Mapping[LeaseMode, int]


class Offloader(Protocol):
    """Really moves parts. A call may take long; one that raises must leave the role's parts as they were.

    `onload` is also called to add to what is resident (forward → train). A call is never cancelled midway by
    the arbiter.
    """

    async def onload(self, role: str, mode: LeaseMode) -> None: ...

    async def offload(self, role: str) -> None: ...


@dataclass
class Move:
    """What moves before `role` can work in `mode`: offloads first, then an onload of what is not there yet."""

    role: str
    mode: LeaseMode
    evict: tuple[str, ...]
    abandoned: bool = False


@dataclass(eq=False)
class _Parts:
    """A role's side of the account."""

    spec: RoleSpec
    resident_bytes: int = 0
    incoming_bytes: int = 0  # granted, but not moved in yet
    num_leases: int = 0
    last_used: int = 0

    @property
    def claimed_bytes(self) -> int:
        return max(self.resident_bytes, self.incoming_bytes)


class Pool:
    """The accounts of one pool. Only one `Move` is under way at a time: bytes being offloaded still count."""

    def __init__(self, spec: PoolSpec, roles: Iterable[RoleSpec]) -> None:
        self.spec = spec
        self.peak_bytes = 0
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

    def is_resident(self, role: str, mode: LeaseMode) -> bool:
        """True when `role` could work in `mode` without anything being moved."""
        if self._move is not None and (role == self._move.role or role in self._move.evict):
            return False
        parts = self._parts[role]
        return parts.resident_bytes >= parts.spec.resident_bytes[mode]

    def has_slot(self, role: str) -> bool:
        busy = self.busy_roles
        return role in busy or len(busy) < self.spec.slots

    def plan(self, role: str, mode: LeaseMode) -> Move | None:
        """The move that lets `role` work in `mode` now (perhaps an empty one), or None if none does."""
        parts = self._parts[role]
        if self.is_resident(role, mode):
            return Move(role, mode, evict=())
        if self._move is not None:
            return None
        budget = self.spec.budget_bytes
        needed = self.resident_bytes - parts.resident_bytes + parts.spec.resident_bytes[mode]
        evict = self._choose_evictions(role, 0 if budget is None else needed - budget)
        return None if evict is None else Move(role, mode, evict)

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
        target_bytes = parts.spec.resident_bytes[move.mode]
        if target_bytes <= parts.resident_bytes:
            return False
        parts.incoming_bytes = target_bytes
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

    async def carry_out(self, move: Move, offloader: Offloader | None) -> None:
        """Moves the parts; without a mover in the accounts only. A cancelled caller is held until the step under way
        has really ended."""

        def abandon() -> None:
            move.abandoned = True

        await drained(self._steps(move, offloader), abandon)

    async def _steps(self, move: Move, offloader: Offloader | None) -> None:
        try:
            for name in move.evict:
                if move.abandoned:
                    return
                if offloader is not None:
                    await offloader.offload(name)
                self._parts[name].resident_bytes = 0
            if move.abandoned:
                return
            parts = self._parts[move.role]
            before_bytes = parts.resident_bytes
            parts.resident_bytes = parts.incoming_bytes  # the room is taken from the first byte on
            self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
            try:
                if offloader is not None:
                    await offloader.onload(move.role, move.mode)
            except BaseException:
                parts.resident_bytes = before_bytes
                raise
        finally:
            self.drop(move)

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

    def _touch(self, parts: _Parts) -> None:
        self._uses += 1
        parts.last_used = self._uses
