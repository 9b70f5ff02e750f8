"""Properties of the arbiter over random placements, programs, delays, failures and cancellations.

An auditor outside the arbiter keeps its own books from what holders and the mover really do.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quartet.extras.simulation.simulation import run_virtual
from quartet.schedule.clock import loop_time
from quartet.schedule.leases import Arbiter, Lease, LeaseMode, PoolSpec, RoleSpec

MODES: list[LeaseMode] = ["generate", "forward", "train"]
QUICK = settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])


class Auditor:
    """Believes nobody: counts holders, bytes, readers and writers itself. Is the mover as well."""

    def __init__(self, pools: list[PoolSpec], roles: list[RoleSpec], move_s: Callable[[], float]) -> None:
        self.pools = {pool.name: pool for pool in pools}
        self.roles = {role.name: role for role in roles}
        self.move_s = move_s
        self.resident_bytes: Counter[str] = Counter()  # physically there, also while moving
        self.ready_bytes: Counter[str] = Counter()
        self.holders: Counter[str] = Counter()
        self.exclusive: set[str] = set()
        self.readers: Counter[str] = Counter()
        self.writers: Counter[str] = Counter()

    async def onload(self, role: str, mode: LeaseMode) -> None:
        assert not self.holders[role], f"{role} is moved in while it works"
        self.resident_bytes[role] = self.roles[role].resident_bytes[mode]
        self._check_bytes(role)
        await asyncio.sleep(self.move_s())
        self.ready_bytes[role] = self.resident_bytes[role]

    async def offload(self, role: str) -> None:
        assert not self.holders[role], f"{role} is offloaded while it works"
        self.ready_bytes[role] = 0
        await asyncio.sleep(self.move_s())
        self.resident_bytes[role] = 0

    @asynccontextmanager
    async def at_work(
        self, arbiter: Any, role: str, mode: LeaseMode, reads: Mapping[str, int | None], writes: str | None
    ) -> AsyncIterator[Lease]:
        """A lease under audit: from the holder's first moment to its last."""
        async with arbiter.lease(role, mode, reads=reads, writes=writes) as lease:
            shares = mode == "generate" and writes is None
            before = {state: arbiter.version(state) for state in reads}
            self._enter(role, mode, reads, writes, shares)
            try:
                assert lease.versions == before, "the lease reports another version than the current one"
                assert all(v is None or before[s] == v for s, v in reads.items()), "read a wrong version"
                yield lease
                assert before == {s: arbiter.version(s) for s in reads}, "a version moved under its reader"
            finally:
                self._leave(role, reads, writes, shares)

    def _enter(
        self, role: str, mode: LeaseMode, reads: Mapping[str, int | None], writes: str | None, shares: bool
    ) -> None:
        assert role not in self.exclusive and (shares or not self.holders[role]), f"{role} works twice"
        self.holders[role] += 1
        if not shares:
            self.exclusive.add(role)
        pool = self.pools[self.roles[role].pool]
        busy = [name for name, num in self.holders.items() if num and self.roles[name].pool == pool.name]
        assert len(busy) <= pool.slots, f"{busy} on {pool.slots} slots"
        assert self.ready_bytes[role] >= self.roles[role].resident_bytes[mode], f"{role} works without parts"
        self.readers.update(list(reads))
        if writes is not None:
            self.writers[writes] += 1
            others = self.readers[writes] - (1 if writes in reads else 0)
            assert self.writers[writes] == 1 and others == 0, f"{writes} is written while used"
        assert not any(self.writers[state] and state != writes for state in reads), "read while written"

    def _leave(self, role: str, reads: Mapping[str, int | None], writes: str | None, shares: bool) -> None:
        self.holders[role] -= 1
        if not shares:
            self.exclusive.remove(role)
        self.readers.subtract(list(reads))
        if writes is not None:
            self.writers[writes] -= 1

    def _check_bytes(self, role: str) -> None:
        pool = self.pools[self.roles[role].pool]
        used = sum(num for name, num in self.resident_bytes.items() if self.roles[name].pool == pool.name)
        assert pool.budget_bytes is None or used <= pool.budget_bytes, f"{used} > {pool.budget_bytes}"


@dataclass(frozen=True)
class Job:
    start: int
    role: str
    mode: LeaseMode
    seconds: int
    reads: tuple[str, ...]
    writes: str | None
    fails: bool
    cancel_after: int | None


@dataclass(frozen=True)
class Program:
    pools: list[PoolSpec]
    roles: list[RoleSpec]
    jobs: list[Job]
    move_s: list[int]
    patience: int


@st.composite
def placements(draw: st.DrawFn, names: list[str]) -> tuple[list[PoolSpec], list[RoleSpec]]:
    pool_names = [f"pool{i}" for i in range(draw(st.sampled_from([1, 1, 2, 3])))]
    roles = []
    for name in names:
        forward = draw(st.integers(0, 6))
        sizes: dict[LeaseMode, int] = {
            "generate": forward,
            "forward": forward,
            "train": forward + draw(st.integers(0, 3)),
        }
        roles.append(RoleSpec(name, draw(st.sampled_from(pool_names)), sizes))
    pools = []
    for pool_name in pool_names:
        largest = max((r.resident_bytes["train"] for r in roles if r.pool == pool_name), default=0)
        budget = draw(st.one_of(st.none(), st.integers(largest, largest + 3)))
        pools.append(PoolSpec(pool_name, draw(st.integers(1, 3)), budget))
    return pools, roles


@st.composite
def programs(draw: st.DrawFn, *, cancels: bool = True) -> Program:
    names = [f"role{i}" for i in range(draw(st.integers(2, 4)))]
    pools, roles = draw(placements(names))
    states = ["s", "t"]
    job = st.builds(
        Job,
        start=st.integers(0, 4),
        role=st.sampled_from(names),
        mode=st.sampled_from(MODES),
        seconds=st.integers(0, 3),
        reads=st.lists(st.sampled_from(states), unique=True, max_size=2).map(tuple),
        writes=st.sampled_from([None, None, "s", "t"]),
        fails=st.booleans() if cancels else st.just(False),
        cancel_after=st.one_of(st.none(), st.integers(0, 6)) if cancels else st.none(),
    )
    return Program(
        pools=pools,
        roles=roles,
        jobs=draw(st.lists(job, min_size=1, max_size=12)),
        move_s=draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)),
        patience=draw(st.integers(0, 4)),
    )


@dataclass
class Record:
    """What one job saw. `asked` is its place among the requests, `began_s` when it had its lease."""

    job: Job
    asked: int
    began_s: float = -1.0
    lease: Lease | None = None
    failed: bool = False


@dataclass
class Outcome:
    records: list[Record] = field(default_factory=list)


async def execute(program: Program, make: Callable[..., Any]) -> Outcome:
    """Runs all jobs, cancels those that say so, and checks that nothing is left."""
    moves = 0

    def move_s() -> float:
        nonlocal moves
        moves += 1
        return program.move_s[moves % len(program.move_s)]

    auditor = Auditor(program.pools, program.roles, move_s)
    arbiter = make(
        program.pools,
        program.roles,
        versions={"s": 0, "t": 0},
        offloader=auditor,
        patience=program.patience,
    )
    outcome = Outcome()

    async def run(job: Job) -> None:
        await asyncio.sleep(job.start)
        record = Record(job, len(outcome.records))
        outcome.records.append(record)
        reads = dict.fromkeys(job.reads)
        async with auditor.at_work(arbiter, job.role, job.mode, reads, job.writes) as lease:
            record.began_s, record.lease = loop_time(), lease
            try:
                await asyncio.sleep(job.seconds)
            except asyncio.CancelledError:
                record.failed = True
                raise
            if job.fails:
                record.failed = True
                raise ZeroDivisionError("the job says so")

    async def cancel_later(task: asyncio.Task[None], after: int) -> None:
        await asyncio.sleep(after)
        task.cancel()

    tasks = [asyncio.create_task(run(job)) for job in program.jobs]
    cancellers = [
        asyncio.create_task(cancel_later(task, job.cancel_after))
        for task, job in zip(tasks, program.jobs, strict=True)
        if job.cancel_after is not None
    ]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*cancellers)
    for result, job in zip(results, program.jobs, strict=True):
        if isinstance(result, ZeroDivisionError):
            assert job.fails
        elif isinstance(result, asyncio.CancelledError):
            assert job.cancel_after is not None
        elif result is not None:
            raise result
    assert arbiter.is_idle
    for state in ("s", "t"):
        ended = [r for r in outcome.records if r.lease and r.job.writes == state and not r.failed]
        assert arbiter.version(state) == len(ended), "a version moved without a clean writer"
    return outcome


@QUICK
@given(programs())
def test_bytes_slots_versions_and_leaks(program: Program) -> None:
    """Budget and slots hold, readers see one version, cancelled and failed jobs leave nothing, others end."""
    run_virtual(execute(program, Arbiter))


def overtakers(outcome: Outcome, waiter: Record, program: Program) -> list[Record]:
    """Later requests granted before `waiter` that certainly took something it needed.

    Those of its role, those whose states conflict, and on a pool with a single slot everybody.
    """
    pools = {pool.name: pool for pool in program.pools}
    pool_of = {role.name: pools[role.pool] for role in program.roles}

    def hinders(other: Job, job: Job) -> bool:
        touched = {*job.reads, job.writes} - {None}
        conflict = (other.writes in touched) or (job.writes is not None and job.writes in other.reads)
        one_slot = pool_of[other.role] is pool_of[job.role] and pool_of[job.role].slots == 1
        return other.role == job.role or conflict or one_slot

    assert waiter.lease is not None
    return [
        other
        for other in outcome.records
        if other.lease is not None
        and other.asked > waiter.asked
        and other.lease.grant_index < waiter.lease.grant_index
        and hinders(other.job, waiter.job)
    ]


@QUICK
@given(programs(cancels=False))
def test_no_call_is_overtaken_more_often_than_patience_allows(program: Program) -> None:
    """The bound: at most `patience` later requests are granted something that a waiter needs before it.

    Why it holds: each such grant adds one to the waiter's count (the arbiter knows more ways of hindering
    than `overtakers`), and with `patience` of them on the count no later request that hinders it is granted.
    These programs name no versions, so that every request is open from its arrival.
    """
    outcome = run_virtual(execute(program, Arbiter))
    by_ticket = sorted(outcome.records, key=lambda record: record.asked)
    for ticket, record in enumerate(by_ticket):
        assert record.lease is not None and record.lease.ticket == ticket
        assert len(overtakers(outcome, record, program)) <= record.lease.passed_over <= program.patience
