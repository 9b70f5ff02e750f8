"""The processes of one group, or of several fused ones: started, watched, called, ended and started again."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from quartet.cluster.backend import Backend, Ref, WorkerHandle
from quartet.cluster.dispatch import Call, CallPlan
from quartet.cluster.errors import (
    ClusterError,
    Death,
    Failure,
    Lost,
    WorkerDied,
    WorkerError,
    last_error,
    raise_failure,
    with_worker_name,
)
from quartet.cluster.layout import Layout
from quartet.cluster.manifests import PartRefs
from quartet.cluster.pending import Pending, Shared
from quartet.cluster.pool import ResourcePool
from quartet.cluster.worker import LOOPBACK, RankInfo
from quartet.cluster.worker_process import ClassWithArgs, ProcessInfo
from quartet.config.errors import UserError

LAST_LINES = 30


class StartOptions(TypedDict, total=False):
    """How a group's processes are started, see ``WorkerGroup``."""

    environment: Mapping[str, str]
    detached: bool
    max_restarts: int
    start_timeout_s: float


@dataclass(frozen=True)
class GroupSpec:
    """What it takes to start a group's processes: ``StartOptions`` and these.

    Args:
        name: of the group; a detached one is found by it.
        pool: where.
        roles: name → what to make in every process, in order.
        layout: the mesh of its ranks.
    """

    name: str
    pool: ResourcePool
    roles: Mapping[str, ClassWithArgs]
    layout: Layout
    environment: Mapping[str, str] = field(default_factory=dict)
    detached: bool = False
    max_restarts: int = 3
    start_timeout_s: float = 120.0


_known_processes: dict[str, tuple[str, int, ProcessInfo | None]] = {}
"""Key of a process → its group, rank and what is known of it: a call may fail because of another group's worker."""


_groups_of_pool: weakref.WeakKeyDictionary[ResourcePool, set[ProcessManager]] = weakref.WeakKeyDictionary()
"""The groups with processes in a pool, also where the group's handle is gone."""


class ProcessManager:
    """Started processes with the roles of a spec in each; or those of a detached group that was found."""

    def __init__(self, backend: Backend, spec: GroupSpec) -> None:
        self.backend = backend
        self.spec = spec
        self.restarts = 0
        self.handles: list[WorkerHandle] = []
        self.infos: list[ProcessInfo] = []
        self._last_failures: dict[int, Failure] = {}
        self._last_death: Death | None = None
        self._is_restarting = False
        self._gone: Death | None = None  # of those before, until a restart has succeeded
        self._pings: dict[int, Ref] = {}

    # Life ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the processes, tells each its place, and makes the roles.

        Raises:
            UserError: the pool cannot be granted, or a role's class raised one.
            WorkerError: a role's class raised.
            WorkerDied: a process ended while it started.
            TimeoutError: a process did not start within the time.
        """
        spec = self.spec
        self._check_room()
        self.backend.grant(spec.pool, spec.start_timeout_s, spec.name if spec.detached else None)
        self.handles = list(
            self.backend.start(spec.pool, spec.name, environment=spec.environment, detached=spec.detached)
        )
        try:
            self._introduce()
            for handle, place in zip(self.handles, self._places(), strict=True):
                # A process runs its calls in order, so this one need not be waited for.
                self.backend.call(handle, "set_environment", (place.environment(),))
            # Stored once: arguments may be large, a state dictionary say.
            self._all("build", "starting", None, self.backend.put(dict(spec.roles)))
            if spec.detached:
                self._all("remember", "starting", None, spec)
        except BaseException:
            self.stop()
            raise

    def _check_room(self) -> None:
        """Processes for which the pool has no share left would wait for ever."""
        there = _groups_of_pool.setdefault(self.spec.pool, set())
        others = sorted(p.spec.name for p in there if p.handles and p.backend is self.backend)
        if len(others) >= self.spec.pool.groups:
            raise UserError(
                f"the pool {list(self.spec.pool.processes)} is taken",
                found=f"groups={self.spec.pool.groups}; running there: {', '.join(map(repr, others))}",
                remedy=f"set groups={len(others) + 1} on the pool, stop one, fuse them with colocate, "
                "or use a pool for each",
            )
        there.add(self)

    @classmethod
    def found(cls, backend: Backend, name: str, timeout_s: float) -> ProcessManager | None:
        """Those of the detached group with that name.

        Raises:
            TimeoutError: its first worker is busy for longer than the time.
        """
        first = backend.find(name)
        if not first:
            return None
        spec = backend.get([backend.call(first[0], "recall", ())], timeout_s)[0]
        if not isinstance(spec, GroupSpec):  # it died meanwhile, or is only being started
            return None
        processes = cls(backend, spec)
        processes.handles = [*first, *(backend.handle_of(name, rank) for rank in range(1, spec.layout.world_size))]
        processes._introduce()
        return processes

    def _introduce(self) -> None:
        for handle in self.handles:
            _known_processes[handle.key] = (self.spec.name, handle.rank, None)
        self.infos = self._all("process_info", "starting", self.spec.start_timeout_s)
        for handle, info in zip(self.handles, self.infos, strict=True):
            _known_processes[handle.key] = (self.spec.name, handle.rank, info)

    def _places(self) -> list[RankInfo]:
        """Every rank's place; rank 0 names the port at which all meet, on its own node."""
        port = self._outcomes([self.backend.call(self.handles[0], "rendezvous_port", ())], [0], "starting", None)[0]
        nodes = [info.node for info in self.infos]
        hosts = {info.host for info in self.infos}
        address = LOOPBACK if len(hosts) == 1 else self.infos[0].host
        return [
            RankInfo(
                rank=rank,
                world_size=len(nodes),
                local_rank=nodes[:rank].count(nodes[rank]),
                local_world_size=nodes.count(nodes[rank]),
                master_addr=address,
                master_port=port,
                layout=self.spec.layout,
                devices=self.infos[rank].devices,
            )
            for rank in range(len(nodes))
        ]

    def _all(self, method: str, during: str, timeout_s: float | None, *args: Any) -> list[Any]:
        refs = [self.backend.call(handle, method, args) for handle in self.handles]
        return self._outcomes(refs, range(len(refs)), during, timeout_s)

    def stop(self) -> None:
        """Ends the processes, whatever they are doing. The pool stays granted, but for a detached group's."""
        self._end()
        if self.spec.detached:
            self.backend.release(self.spec.pool, self.spec.name)

    def _end(self) -> None:
        self.backend.stop(self.handles)
        self.handles = []
        self._pings.clear()
        _groups_of_pool.get(self.spec.pool, set()).discard(self)

    def restart(self) -> None:
        """Ends what is left of the processes and starts all anew, with a new rendezvous and new roles.

        All of them, because the living ones wait in collectives for the dead one, and roles in one process fail
        together. What a role had learnt is for its owner to load again.

        Raises:
            ClusterError: the processes were restarted ``max_restarts`` times already.
            UserError, WorkerError, WorkerDied: as when they were started.
        """
        if self.restarts >= self.spec.max_restarts:
            last = self._last_death
            raise ClusterError(
                f"group {self.spec.name!r} was restarted {self.restarts} times already, which is its limit"
                + (f"; {last.brief()}, its last error: {last.last_error or last.reason}" if last is not None else "")
            )
        self.restarts += 1
        self._is_restarting = True
        self._gone = Death(self.spec.name, 0, None, "unknown host", "a call", "the group is being started anew", None)
        try:
            self._end()
            self._last_failures.clear()  # they say nothing of the new processes
            self.start()
            self._gone = None
        except WorkerDied as error:
            self._gone = error.death
            raise
        except WorkerError as error:
            failed = error.failure
            reason = "it raised as it was started anew"
            self._gone = Death(failed.group, failed.rank, None, failed.host, "starting", reason, failed.summary)
            raise
        finally:
            self._is_restarting = False

    def dead(self, timeout_s: float = 1.0) -> list[Death]:
        """The workers that are dead. One that is busy for all of the time counts as living.

        Where the last restart failed it is who made it fail.
        """
        if self._gone is not None:
            return [self._gone]
        self._check_started()
        for handle in self.handles:
            if handle.rank not in self._pings:
                self._pings[handle.rank] = self.backend.call(handle, "ping", ())
        ranks = list(self._pings)
        ready = self.backend.wait([self._pings[rank] for rank in ranks], timeout_s, fetch=True)
        ended = [rank for rank, is_there in zip(ranks, ready, strict=True) if is_there]
        values = self.backend.get([self._pings.pop(rank) for rank in ended])
        lost = {rank: v for rank, v in zip(ended, values, strict=True) if isinstance(v, Lost)}
        return [self._death(lost[rank], "a look at whether it lives") for rank in sorted(lost)]

    async def died(self, every_s: float) -> list[Death]:
        """Waits until workers are dead, whether they were busy or not: who they are.

        Raises:
            ClusterError: the group was stopped.
        """
        watched: list[WorkerHandle] = []
        coming: dict[int, asyncio.Future[Any]] = {}
        while True:
            if not self._is_restarting:
                self._check_started()
            if watched is not self.handles:  # those that a restart ended do not count
                watched, coming = self.handles, {}
            for handle in watched:
                if handle.rank not in coming:
                    coming[handle.rank] = self.backend.soon(self.backend.call(handle, "ping", ()))
            # A busy worker answers when it is idle again, and fails to at once when it dies.
            await asyncio.sleep(every_s)
            ended = {rank: coming.pop(rank).result() for rank in list(coming) if coming[rank].done()}
            lost = [value for value in ended.values() if isinstance(value, Lost)]
            if lost and watched is self.handles:
                return [await asyncio.to_thread(self._death, each, "a watch over whether it lives") for each in lost]

    # Calls -----------------------------------------------------------------------------------------------

    def call(self, role: str, method: str, plan: CallPlan) -> Any:
        """Calls and waits; the plan's collected result. Raises as ``Pending.outcomes``."""
        return plan.collect(self._called(role, method, plan).outcomes())

    async def ask(self, role: str, method: str, plan: CallPlan) -> Any:
        """``call`` without blocking the event loop."""
        return plan.collect(await self._called(role, method, plan).outcomes_soon())

    def _called(self, role: str, method: str, plan: CallPlan) -> Pending:
        """A call whose results come to the driver as they are made."""
        refs = {}
        for rank, handle, _, names, values in self._arguments(plan):
            head = (role, method, rank in plan.answers, names)
            refs[rank] = self.backend.call(handle, "call", (head, *values))
        return Pending(self, refs, plan.answers, f"{role}.{method}")

    def submit(self, role: str, method: str, plan: CallPlan, chunks: int) -> tuple[Pending, list[PartRefs]]:
        """Calls without waiting: the call in flight, and the references to each answering rank's part."""
        status: dict[int, Ref] = {}
        parts: dict[int, PartRefs] = {}
        for rank, handle, call, names, values in self._arguments(plan):
            number = chunks if rank in plan.answers else 0
            given = ((role, method, number, names), call.share, *values)
            status[rank], *pieces = self.backend.call_many(handle, "call_parts", given, 1 + number)
            parts[rank] = PartRefs(status[rank], tuple(pieces))
        pending = Pending(self, status, plan.answers, f"{role}.{method}")
        return pending, [parts[rank] for rank in plan.answers]

    def _arguments(self, plan: CallPlan) -> Iterator[tuple[int, WorkerHandle, Call, tuple[str, ...], list[Any]]]:
        """Of each rank that is called: its handle and call, the names of the keyword arguments, all arguments in a row.

        Raises:
            WorkerDied: the group is being started anew, or could not be.
        """
        handles = self.handles
        if self._gone is not None:  # another thread may start the group anew: calls meanwhile are of what died
            raise WorkerDied(self._gone)
        self._check_started()
        shared = Shared(self.backend, plan.calls)
        for rank, call in enumerate(plan.calls):
            if call is not None:
                yield rank, handles[rank], call, *shared.flat(call)

    def _check_started(self) -> None:
        if not self.handles:
            raise ClusterError(f"group {self.spec.name!r} was stopped; restart it, or make a new one")

    def _outcomes(self, refs: Sequence[Ref], ranks: Sequence[int], during: str, timeout_s: float | None) -> list[Any]:
        return Pending(self, dict(zip(ranks, refs, strict=True)), ranks, during).outcomes(timeout_s)

    # Trouble ---------------------------------------------------------------------------------------------

    def raise_for(self, troubles: Mapping[int, Failure | Lost], during: str) -> None:
        """Raises the cause: a death before an exception, which is often only how the others noticed."""
        lost = {rank: t for rank, t in troubles.items() if isinstance(t, Lost)}
        failures = {
            rank: with_worker_name(t, self.spec.name, rank) for rank, t in troubles.items() if isinstance(t, Failure)
        }
        self._last_failures.update({f.rank: f for f in failures.values() if f.group == self.spec.name})
        others = list(dict.fromkeys(failure.brief() for failure in failures.values()))
        if lost:
            deaths = {death.brief(): death for death in (self._death(t, during) for t in lost.values())}
            # Lost data says less than the process that was lost.
            first, *more = sorted(deaths.values(), key=lambda death: death.rank is None)
            raise WorkerDied(first, [*(death.brief() for death in more), *others])
        first_failed = min(failures.values(), key=lambda failure: failure.is_echo)
        raise_failure(first_failed, [line for line in others if line != first_failed.brief()])

    def _death(self, lost: Lost, during: str) -> Death:
        group, rank, info = _known_processes.get(lost.key or "", (self.spec.name, None, None))
        lines = self.backend.last_lines(info, LAST_LINES) if info is not None else []
        pid, host = (info.pid, info.host) if info is not None else (None, "unknown host")
        known = self._last_failures.get(rank) if rank is not None and group == self.spec.name else None
        said = last_error(lines) or (known.summary if known is not None else None)
        death = Death(group, rank, pid, host, during, lost.reason, said, tuple(lines))
        if group == self.spec.name:
            self._last_death = death
        return death
