"""The processes of one group: started, watched, called, ended and started again."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quartet.cluster.backend import Backend, Ref, WorkerHandle
from quartet.cluster.dispatch import CallPlan
from quartet.cluster.errors import ClusterError, Death, Failure, Lost, WorkerDied, WorkerError, last_error
from quartet.cluster.futures import BatchFuture, Pending
from quartet.cluster.manifests import is_large
from quartet.cluster.resource_pool import ResourcePool
from quartet.cluster.worker import LOOPBACK, RankInfo
from quartet.cluster.worker_process import CallHead, ClassWithArgs, ProcessInfo
from quartet.config.errors import UserError

LAST_LINES = 30


@dataclass(frozen=True)
class GroupSpec:
    """What it takes to start a group's processes, see ``WorkerGroup``; ``worker`` is made in each."""

    name: str
    pool: ResourcePool
    worker: ClassWithArgs
    max_restarts: int
    start_timeout_s: float


_known_processes: dict[str, tuple[str, int, ProcessInfo | None]] = {}
"""Key of a process → its group, rank and what is known of it: a call may fail because of another group's worker."""


_groups_of_pool: weakref.WeakKeyDictionary[ResourcePool, set[ProcessManager]] = weakref.WeakKeyDictionary()
"""The groups with processes in a pool, also where the group's handle is gone."""


class ProcessManager:
    """Started processes with the worker of a spec in each."""

    def __init__(self, backend: Backend, spec: GroupSpec) -> None:
        self.backend = backend
        self.spec = spec
        self.restarts = 0
        self.handles: list[WorkerHandle] = []
        self.infos: list[ProcessInfo] = []
        self._last_failures: dict[int, Failure] = {}
        self._last_death: Death | None = None
        self._gone: Death | None = None  # of those before, until a restart has succeeded
        self._pings: dict[int, Ref] = {}

    # Life ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the processes, tells each its place, and makes the workers.

        Raises:
            UserError: the pool cannot be granted, or the worker's class raised one.
            WorkerError: the worker's class raised.
            WorkerDied: a process ended while it started.
            TimeoutError: a process did not start within the time.
        """
        spec = self.spec
        self._check_room()
        self.backend.grant(spec.pool, spec.start_timeout_s)
        self.handles = list(self.backend.start(spec.pool, spec.name))
        try:
            self._introduce()
            for handle, place in zip(self.handles, self._places(), strict=True):
                # A process runs its calls in order, so this one need not be waited for.
                self.backend.call(handle, "set_environment", (place.environment(),))
            # Stored once: arguments may be large, a state dictionary say.
            self._asked(self.handles, "build", self.backend.put(spec.worker))
        except BaseException:
            self.stop()
            raise

    def _check_room(self) -> None:
        """Processes for which the pool has no share left would wait for ever."""
        there = _groups_of_pool.setdefault(self.spec.pool, set())
        if others := [p.spec.name for p in there if p.handles and p.backend is self.backend]:
            raise UserError(
                f"the pool {list(self.spec.pool.processes)} is taken",
                found=f"running there: {', '.join(map(repr, others))}",
                remedy="stop that group, or use a pool for each",
            )
        there.add(self)

    def _introduce(self) -> None:
        for handle in self.handles:
            _known_processes[handle.key] = (self.spec.name, handle.rank, None)
        self.infos = self._asked(self.handles, "process_info", timeout_s=self.spec.start_timeout_s)
        for handle, info in zip(self.handles, self.infos, strict=True):
            _known_processes[handle.key] = (self.spec.name, handle.rank, info)

    def _places(self) -> list[RankInfo]:
        """Every rank's place; rank 0 names the port at which all meet, on its own node."""
        (port,) = self._asked(self.handles[:1], "rendezvous_port")
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
                devices=self.infos[rank].devices,
            )
            for rank in range(len(nodes))
        ]

    def _asked(
        self, handles: Sequence[WorkerHandle], method: str, *args: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """What a method of the host returns in each of these processes, which are being started."""
        began_s = time.monotonic()
        refs = {handle.rank: ref for handle in handles for ref in self.backend.call(handle, method, args)}
        return Pending(self, refs, list(refs), "starting", began_s).wait(timeout_s)

    def stop(self) -> None:
        """Ends the processes, whatever they are doing. The pool stays granted."""
        self.backend.stop(self.handles)
        self.handles = []
        self._pings.clear()
        _groups_of_pool.get(self.spec.pool, set()).discard(self)

    def restart(self) -> None:
        """Ends what is left of the processes and starts all anew, with a new rendezvous and new workers.

        All of them, because the living ones wait in collectives for the dead one. What a worker had learnt is for its
        owner to load again.

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
        self._gone = Death(self.spec.name, 0, None, "unknown host", "a call", "the group is being started anew", None)
        try:
            self.stop()
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

    def dead(self, timeout_s: float = 1.0) -> list[Death]:
        """The workers that are dead. One that is busy for all of the time counts as living.

        Where the last restart failed it is who made it fail.
        """
        if self._gone is not None:
            return [self._gone]
        self._check_started()
        # Who was asked and has not answered is busy: it answers when it is idle again, and its call fails when it dies.
        for handle in self.handles:
            if handle.rank not in self._pings:
                (self._pings[handle.rank],) = self.backend.call(handle, "ping", ())
        ranks = sorted(self._pings)
        ready = self.backend.wait([self._pings[rank] for rank in ranks], timeout_s)
        ended = [self._pings.pop(rank) for rank, is_there in zip(ranks, ready, strict=True) if is_there]
        lost = [value for value in self.backend.get(ended) if isinstance(value, Lost)]
        return [self._death(each, "a look at whether it lives") for each in lost]

    # Calls -----------------------------------------------------------------------------------------------

    def submit(self, method: str, plan: CallPlan, *, stays: bool) -> BatchFuture:
        """Calls a method in every process that the plan names, without waiting.

        Args:
            stays: results stay where they are made; otherwise they come to the driver.

        Raises:
            WorkerDied: the group is being started anew, or could not be.
            ValueError: an argument is a future of several ranks' results.
        """
        handles = self.handles
        if self._gone is not None:  # another thread may start the group anew: calls meanwhile are of what died
            raise WorkerDied(self._gone)
        self._check_started()
        readers = Counter(id(value) for call in plan.calls if call is not None for value in call.values())
        stored: dict[int, Ref] = {}

        def sent(value: Any) -> Any:
            """What stands for an argument: a future's reference; of a large value of several ranks, the stored one."""
            if isinstance(value, BatchFuture):
                return value.reference()
            if readers[id(value)] < 2 or not is_large(value):
                return value
            if id(value) not in stored:
                stored[id(value)] = self.backend.put(value)
            return stored[id(value)]

        began_s = time.monotonic()
        status: dict[int, Ref] = {}
        parts: dict[int, Ref] = {}
        for rank, call in enumerate(plan.calls):
            if call is not None:
                answers = rank in plan.answers
                head = CallHead(method, tuple(call.kwargs), answers, answers and stays)
                refs = self.backend.call(handles[rank], "call", (head, *map(sent, call.values())), 1 + head.stays)
                status[rank], parts[rank] = refs[0], refs[-1]
        results = [parts[rank] for rank in plan.answers] if stays else []
        return BatchFuture(self, status, plan, results, f"{self.spec.name}.{method}", began_s)

    def _check_started(self) -> None:
        if not self.handles:
            raise ClusterError(f"group {self.spec.name!r} was stopped; restart it, or make a new one")

    # Trouble ---------------------------------------------------------------------------------------------

    def raise_for(self, troubles: Mapping[int, Failure | Lost], during: str) -> None:
        """Raises the cause: a death before an exception, which is often only how the others noticed."""
        name = self.spec.name
        lost = [t for t in troubles.values() if isinstance(t, Lost)]
        failures = [
            t if t.rank >= 0 else replace(t, group=name, rank=rank)  # a sender that did not know its rank
            for rank, t in troubles.items()
            if isinstance(t, Failure)
        ]
        self._last_failures.update({failure.rank: failure for failure in failures if failure.group == name})
        others = list(dict.fromkeys(failure.brief() for failure in failures))
        if lost:
            deaths = {death.brief(): death for death in (self._death(t, during) for t in lost)}
            # Lost data says less than the process that was lost.
            first, *more = sorted(deaths.values(), key=lambda death: death.rank is None)
            raise WorkerDied(first, [*(death.brief() for death in more), *others])
        first_failed = min(failures, key=lambda failure: failure.is_echo)
        raise first_failed.error([line for line in others if line != first_failed.brief()])

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
