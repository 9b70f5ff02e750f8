"""The arbiter: one place that grants pools, slots, bytes and weight versions, all of a lease at once.

A role works under a *lease* (role, mode) on its pool:

    async with arbiter.lease("actor", "train", reads={"actor": k}, writes="actor"):
        await actor.train(batch)          # inputs were awaited before, nothing else is awaited here

A request is *open* when its version window is: every version it names is the current one, and (for a writer)
no reader is still promised the version that it would replace. Being open depends on other requests that are yet
to come; what an open request lacks is only held by leases that end by themselves. So only open requests
compete, and:

* those whose role is resident go first, then those that came first;
* an open request is *passed over* when a later one is granted something that it needs (its role, a state, the
  pool's one movement of parts at a time, or so much of its slots and bytes that it would not fit beside).
  After `patience` times it is *urgent*: no later request is granted anything that an urgent one needs. So at
  most `patience` later requests ever hinder it.

Forward and train leases have their role to themselves. Generate leases of one role that write nothing share
it and its slot, because an engine batches its requests.

A *state* is a set of weights with a version number, such as `actor` (the trainer's) or `rollout` (the
engine's copy). Any number of leases read it at once; one lease writes it, alone, and a clean end advances the
version by one. A reservation is a promise that a version will still be read, and may be made before that
version exists: the writer that would advance past it waits.

Slots count *roles*, not leases: a role takes one slot for as long as it holds any lease. Bytes are
independent of slots: parts stay resident after their role has finished, until a role that needs the room has
them offloaded. The modes of a role are nested: one that needs more bytes contains the parts of those that
need fewer (training holds the parameters that forward needs), so a role resident for training is resident for
forward too. A role whose modes have disjoint parts is two roles.

A role's turn: a lease, and inside of it a span. Everything that computes, really or only on a clock, passes here.

From a resolved placement to the arbiter that grants its leases.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, Protocol

from quartet.config.errors import UserError
from quartet.config.placement import HEADS, ResolvedPlacement, ResolvedPool
from quartet.observe.spans import Span, SpanRecorder
from quartet.schedule.clock import Condition, await_uncancelled

# Versions of weights: who may read which, and who may advance it ----------------------------------------


class StaleVersion(RuntimeError):
    """A reader asked for a version that a writer has already replaced."""


@dataclass(frozen=True)
class LeaseAccess:
    """What a lease does to states. A read of `None` takes whatever version is current when it is granted."""

    reads: Mapping[str, int | None] = field(default_factory=dict)
    writes: str | None = None

    @property
    def states(self) -> set[str]:
        return set(self.reads) | ({self.writes} if self.writes is not None else set())

    def conflicts(self, other: LeaseAccess) -> bool:
        """Tells whether the two may not be held at once: one writes what the other reads or writes."""
        return self.writes in other.states or other.writes in self.states


@dataclass(eq=False)
class VersionReservation:
    """A promise that role `reader` will read `state` at `version` once."""

    state: str
    version: int
    reader: str


@dataclass
class _State:
    version: int
    readers: int = 0
    has_writer: bool = False
    reservations: list[VersionReservation] = field(default_factory=list)


class StateVersions:
    """The book of all states: versions, active readers and writers, outstanding reservations."""

    def __init__(self, initial: Mapping[str, int]) -> None:
        self._states = {name: _State(version) for name, version in initial.items()}

    def current(self, state: str) -> int:
        return self._states[state].version

    def missed(self, access: LeaseAccess) -> StaleVersion | None:
        for state, version in access.reads.items():
            if version is not None and version < self.current(state):
                return StaleVersion(
                    f"{state!r} is at version {self.current(state)}, version {version} is gone: "
                    f"reserve({state!r}, {version}, reader) before the writer of version {version + 1} asks"
                )
        return None

    def reserve(self, state: str, version: int, reader: str) -> VersionReservation:
        """Books a reservation; `StaleVersion` when that version is replaced or being replaced."""
        record = self._states[state]
        if missed := self.missed(LeaseAccess(reads={state: version})):
            raise missed
        if record.has_writer and version == record.version:
            raise StaleVersion(f"{state!r} at version {version} is being advanced now: reserve it earlier")
        reservation = VersionReservation(state, version, reader)
        record.reservations.append(reservation)
        return reservation

    def release(self, reservation: VersionReservation) -> None:
        """Drops a reservation that was not used."""
        reservations = self._states[reservation.state].reservations
        if reservation in reservations:
            reservations.remove(reservation)

    def reads_are_current(self, access: LeaseAccess) -> bool:
        return all(v is None or v == self.current(state) for state, v in access.reads.items())

    def is_reserved_against(self, role: str, access: LeaseAccess) -> bool:
        """Tells whether another's reservation of the current version forbids this write."""
        if access.writes is None:
            return False
        record = self._states[access.writes]
        promised = sum(r.version == record.version for r in record.reservations)
        own = self._own_reservation(access.writes, role, access)
        return promised > (1 if own is not None else 0)

    def is_free(self, access: LeaseAccess) -> bool:
        """Tells whether no active lease conflicts with this access."""
        if any(self._states[state].has_writer for state in access.states):
            return False
        return access.writes is None or self._states[access.writes].readers == 0

    def begin(self, role: str, access: LeaseAccess) -> dict[str, int]:
        """Takes the states, uses up reservations; returns the version of every state read."""
        for state in access.reads:
            record = self._states[state]
            if (own := self._own_reservation(state, role, access)) is not None:
                record.reservations.remove(own)
            record.readers += 1
        if access.writes is not None:
            self._states[access.writes].has_writer = True
        return {state: self.current(state) for state in access.reads}

    def end(self, access: LeaseAccess, *, advance: bool) -> None:
        """Gives the states back; the written one moves on by one version when `advance`."""
        for state in access.reads:
            self._states[state].readers -= 1
        if access.writes is not None:
            record = self._states[access.writes]
            record.has_writer = False
            record.version += 1 if advance else 0

    @property
    def is_idle(self) -> bool:
        """True when no lease reads or writes and nothing is reserved."""
        return not any(s.readers or s.has_writer or s.reservations for s in self._states.values())

    def _own_reservation(self, state: str, role: str, access: LeaseAccess) -> VersionReservation | None:
        for reservation in self._states[state].reservations:
            if reservation.reader == role and reservation.version == access.reads.get(state):
                return reservation
        return None


# One pool: who computes, whose parts are resident, what must move before a role works --------------------

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
class PartMove:
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


class PoolAccount:
    """The accounts of one pool. Only one `PartMove` is under way at a time: bytes being offloaded still count."""

    def __init__(self, spec: PoolSpec, roles: Iterable[RoleSpec]) -> None:
        self.spec = spec
        self.peak_bytes = 0
        self._parts = {role.name: _Parts(role) for role in roles}
        self._move: PartMove | None = None
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
        """Tells whether `role` could work in `mode` without anything being moved."""
        if self._move is not None and (role == self._move.role or role in self._move.evict):
            return False
        parts = self._parts[role]
        return parts.resident_bytes >= parts.spec.resident_bytes[mode]

    def has_slot(self, role: str) -> bool:
        busy = self.busy_roles
        return role in busy or len(busy) < self.spec.slots

    def plan(self, role: str, mode: LeaseMode) -> PartMove | None:
        """Returns the move that lets `role` work in `mode` now (perhaps an empty one), or None if none does."""
        parts = self._parts[role]
        if self.is_resident(role, mode):
            return PartMove(role, mode, evict=())
        if self._move is not None:
            return None
        budget = self.spec.budget_bytes
        needed = self.resident_bytes - parts.resident_bytes + parts.spec.resident_bytes[mode]
        evict = self._choose_evictions(role, 0 if budget is None else needed - budget)
        return None if evict is None else PartMove(role, mode, evict)

    def has_room(self, claims: Mapping[str, int]) -> bool:
        """Tells whether these roles (name → bytes) could all work beside the busy ones, idle parts offloaded."""
        needed = {name: self._parts[name].claimed_bytes for name in self.busy_roles}
        for name, num_bytes in claims.items():
            needed[name] = max(num_bytes, needed.get(name, 0))
        budget = self.spec.budget_bytes
        return len(needed) <= self.spec.slots and (budget is None or sum(needed.values()) <= budget)

    def take(self, move: PartMove) -> bool:
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

    def drop(self, move: PartMove) -> None:
        """Forgets a move that ended, or never began because its lease was cancelled before it woke up."""
        if self._move is move:
            self._move = None
            self._parts[move.role].incoming_bytes = 0

    async def carry_out(self, move: PartMove, offloader: Offloader | None) -> None:
        """Moves the parts; without a mover in the accounts only. A cancelled caller is held until the step under way
        has really ended."""

        def abandon() -> None:
            move.abandoned = True

        await await_uncancelled(self._steps(move, offloader), abandon)

    async def _steps(self, move: PartMove, offloader: Offloader | None) -> None:
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
        """Chooses idle roles to offload to free `excess_bytes`, least recently used first; None if too few."""
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


# Leases ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Lease:
    """A lease from its request to its end.

    `ticket` counts requests and `grant_index` grants, both in order from 0. Once granted, `versions` holds the
    version of every state read; `passed_over` counts the later requests that hindered it (at most `patience`).
    `move` is to be carried out before the role may work.
    """

    role: RoleSpec
    mode: LeaseMode
    access: LeaseAccess
    ticket: int
    passed_over: int = 0
    grant_index: int = -1
    move: PartMove | None = None
    versions: dict[str, int] = field(default_factory=dict)
    missed: StaleVersion | None = None
    wake: asyncio.Future[None] = field(init=False)

    @property
    def needed_bytes(self) -> int:
        return self.role.resident_bytes[self.mode]

    @property
    def shares_role(self) -> bool:
        return self.mode == "generate" and self.access.writes is None


class Arbiter:
    """Grants leases on `pools` to `roles`. `versions` declares every state with its first version.

    Lives on one event loop; every decision is made without awaiting, so it needs no lock.
    """

    def __init__(
        self,
        pools: Iterable[PoolSpec],
        roles: Iterable[RoleSpec],
        *,
        versions: Mapping[str, int] | None = None,
        offloader: Offloader | None = None,
        patience: int = 4,
    ) -> None:
        self._roles = {role.name: role for role in roles}
        self._pools = {p.name: PoolAccount(p, [r for r in self._roles.values() if r.pool == p.name]) for p in pools}
        self._versions = StateVersions(versions or {})
        self._offloader = offloader
        self._patience = patience
        self._advanced = Condition()
        self._queue: list[Lease] = []
        self._held: list[Lease] = []
        self._tickets = count()
        self._grants = count()

    @asynccontextmanager
    async def lease(
        self,
        role: str,
        mode: LeaseMode,
        *,
        reads: Mapping[str, int | None] | None = None,
        writes: str | None = None,
    ) -> AsyncIterator[Lease]:
        """Waits for its turn, has the role's parts moved in, and holds all of it until the block ends.

        `reads` names the version each state must have (None: whatever is current); `writes` excludes that
        state's readers, and advances it by one when the block ends without an exception. Raises `UserError`
        at once for what can never be granted, `StaleVersion` when a version read is already replaced, and what the
        mover raises. A task that holds a lease asks for no other: two doing so could wait for each other for ever.
        """
        request = self._admit(role, mode, LeaseAccess(dict(reads or {}), writes))
        clean = False
        try:
            await request.wake
            if request.missed is not None:
                raise request.missed
            if request.move is not None:
                await self._pools[request.role.pool].carry_out(request.move, self._offloader)
                self._dispatch()
            yield request
            clean = True
        finally:
            self._retire(request, clean)

    @contextmanager
    def reserve(self, state: str, version: int, reader: str) -> Iterator[None]:
        """Promises that role `reader` will read `state` at `version`, which need not exist yet.

        The writer that would advance past it waits until a lease of `reader` that names this version has used the
        promise, or the block has ended.
        """
        reservation = self._versions.reserve(state, version, reader)
        try:
            yield
        finally:
            self._versions.release(reservation)
            self._dispatch()

    def version(self, state: str) -> int:
        return self._versions.current(state)

    async def until(self, state: str, version: int) -> None:
        """Waits, holding nothing, until `state` has reached `version`."""
        while self.version(state) < version:
            await self._advanced.wait()

    def peak_bytes(self) -> dict[str, int]:
        """Returns the most bytes that were resident at a time, by pool."""
        return {name: pool.peak_bytes for name, pool in self._pools.items()}

    @property
    def is_idle(self) -> bool:
        """True when nothing is held, asked for, moving or reserved."""
        quiet = not any(pool.busy_roles or pool.is_moving for pool in self._pools.values())
        return quiet and not (self._queue or self._held) and self._versions.is_idle

    def resident_bytes(self, pool: str) -> int:
        """Returns the bytes now on `pool`, parts on their way in or out included."""
        return self._pools[pool].resident_bytes

    def _admit(self, role_name: str, mode: LeaseMode, access: LeaseAccess) -> Lease:
        self.check_possible(role_name, mode)
        if missed := self._versions.missed(access):
            raise missed
        request = Lease(self._roles[role_name], mode, access, next(self._tickets))
        request.wake = asyncio.get_running_loop().create_future()
        self._queue.append(request)
        self._dispatch()
        return request

    def _dispatch(self) -> None:
        """Grants all that can be granted now, best first. Called after everything that could matter."""
        while (request := self._choose()) is not None:
            self._grant(request)

    def _choose(self) -> Lease | None:
        # A cancelled task's request leaves the queue only when that task runs again: it gets nothing any
        # more.
        waiting = [request for request in self._queue if not request.wake.done()]
        open_requests = [request for request in waiting if self._is_open(request)]
        urgent = [request for request in open_requests if request.passed_over >= self._patience]

        def preference(request: Lease) -> tuple[bool, bool, int]:
            if request.passed_over >= self._patience:
                return (False, False, request.ticket)
            resident = self._pools[request.role.pool].is_resident(request.role.name, request.mode)
            return (True, not resident, request.ticket)

        for request in sorted(open_requests, key=preference):
            before = [other for other in urgent if other.ticket < request.ticket]
            if self._fits(request) and not self._hinders(request, before):  # what the urgent ones need is left to them
                return request
        return None

    def _is_open(self, request: Lease) -> bool:
        """Tells whether the request's version window is open: see the module's docstring."""
        versions, access = self._versions, request.access
        return (
            versions.reads_are_current(access)
            and not versions.is_reserved_against(request.role.name, access)
            and not any(self._is_promised(reader, request) for reader in self._queue)
        )

    def _is_promised(self, reader: Lease, writer: Lease) -> bool:
        """Tells whether queued `reader` names the version that `writer` would replace, and is to have it first.

        A reader that is also a writer has that right only if it came first: two of them could otherwise wait
        for each other.
        """
        state = writer.access.writes
        if state is None or reader is writer or reader.access.reads.get(state) is None:
            return False
        if reader.access.writes is not None and reader.ticket > writer.ticket:
            return False
        return self._versions.reads_are_current(reader.access)

    def _fits(self, request: Lease) -> bool:
        """Tells whether everything that a request needs is there now."""
        pool, role = self._pools[request.role.pool], request.role.name
        shares = request.shares_role and all(h.shares_role for h in self._held if h.role.name == role)
        return (
            (shares or role not in pool.busy_roles)
            and pool.has_slot(role)
            and self._versions.is_free(request.access)
            and pool.plan(role, request.mode) is not None
        )

    def _hinders(self, request: Lease, others: list[Lease]) -> bool:
        claims = {request.role.name: request.needed_bytes}
        for other in others:
            if other.access.conflicts(request.access) or other.role.name == request.role.name:
                return True
            if other.role.pool == request.role.pool:
                if self._moves(other) and self._moves(request):
                    return True
                claims[other.role.name] = max(other.needed_bytes, claims.get(other.role.name, 0))
        return len(claims) > 1 and not self._pools[request.role.pool].has_room(claims)

    def _moves(self, request: Lease) -> bool:
        """Tells whether a request needs parts moved in; a pool moves those of one role at a time."""
        return not self._pools[request.role.pool].is_resident(request.role.name, request.mode)

    def _grant(self, request: Lease) -> None:
        """Takes everything at once; nothing in here may fail or await."""
        for other in self._queue:
            if other.ticket < request.ticket and self._is_open(other) and self._hinders(request, [other]):
                other.passed_over += 1
        pool = self._pools[request.role.pool]
        move = pool.plan(request.role.name, request.mode)
        assert move is not None, "a request is granted only after its move was found possible"
        request.move = move if pool.take(move) else None
        request.versions = self._versions.begin(request.role.name, request.access)
        request.grant_index = next(self._grants)
        self._queue.remove(request)
        self._held.append(request)
        request.wake.set_result(None)

    def _retire(self, request: Lease, clean: bool) -> None:
        """Takes all of it back, be the request queued, granted but not awake yet, or at work."""
        if request in self._held:
            self._held.remove(request)
            pool = self._pools[request.role.pool]
            if request.move is not None:
                pool.drop(request.move)
            pool.give_back(request.role.name)
            self._versions.end(request.access, advance=clean)
            self._advanced.notify_all()
        elif request in self._queue:
            self._queue.remove(request)
        self._fail_missed()
        self._dispatch()

    def _fail_missed(self) -> None:
        for request in list(self._queue):
            missed = self._versions.missed(request.access)
            if missed is not None:
                self._queue.remove(request)
                if not request.wake.done():
                    request.missed = missed
                    request.wake.set_result(None)

    def check_possible(self, role_name: str, mode: LeaseMode) -> None:
        """Raises `UserError` for a lease that could never be granted, however long one waits."""
        role = self._roles[role_name]
        budget, needed = self._pools[role.pool].spec.budget_bytes, role.resident_bytes[mode]
        if budget is None or needed <= budget:
            return
        raise UserError(
            f"role {role.name!r} can never work in mode {mode!r} on pool {role.pool!r}",
            found=f"it needs {needed:,} bytes, the pool has {budget:,}",
            remedy=f"give pool {role.pool!r} a budget of at least {needed:,} bytes",
        )


@dataclass(frozen=True)
class LeaseContext:
    """Lease and span around a piece of work."""

    arbiter: Arbiter
    recorder: SpanRecorder

    @asynccontextmanager
    async def turn(
        self,
        role: str,
        mode: LeaseMode,
        name: str,
        *,
        step: int | None,
        chunk: int | None = None,
        tokens: int = 0,
        reads: Mapping[str, int | None] | None = None,
        writes: str | None = None,
        works_for: str | None = None,
    ) -> AsyncIterator[tuple[Lease, Span]]:
        """Waits for the lease; the span covers the block alone. Inputs are awaited before, never inside.

        Args:
            works_for: the span's role, where it is one that works with another's parts and so under its leases.
        """
        async with self.arbiter.lease(role, mode, reads=reads, writes=writes) as lease:
            with self.recorder.span(
                name, step=step, role=works_for or role, mode=mode, chunk=chunk, tokens=tokens
            ) as span:
                yield lease, span


LOCAL_POOL = "local"


def default_placement(roles: Iterable[str]) -> ResolvedPlacement:
    """Returns what a run without a placement has: one pool with one slot, on which all roles take turns and nothing
    moves."""
    pool = ResolvedPool(LOCAL_POOL, processes=1, nodes=1, slots=1, budget_bytes=None)
    return ResolvedPlacement("local", (pool,), dict.fromkeys(roles, LOCAL_POOL))


def arbiter_for_placement(
    placement: ResolvedPlacement,
    resident_bytes: Mapping[str, Mapping[LeaseMode, int]],
    *,
    version: int = 0,
    offloader: Offloader | None = None,
    patience: int = 4,
) -> Arbiter:
    """Makes the arbiter of a placement.

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


def default_arbiter(sizes: Mapping[str, Mapping[LeaseMode, int]], *, version: int) -> Arbiter:
    """Makes the arbiter of ``default_placement``; ``sizes``: role → mode → bytes."""
    return arbiter_for_placement(default_placement(sizes), sizes, version=version)
