"""Worker groups: one handle on the driver for a class that runs in many processes, which are started, called, watched,
ended and started again."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quartet.cluster.dispatch import BROADCAST, CallPlan, DispatchInfo, DispatchMode, RankLayout, dispatched_methods
from quartet.cluster.errors import ClusterError, LostResult, WorkerDeath, WorkerDied, WorkerError, WorkerFailure
from quartet.cluster.futures import MAY_BE_LARGE, BatchFuture
from quartet.cluster.resource_pool import ResourcePool
from quartet.cluster.worker import LOOPBACK, CallHeader, ClassWithArgs, ProcessInfo, RankInfo
from quartet.config.errors import UserError

if TYPE_CHECKING:
    from quartet.cluster.ray_backend import RayBackend

_names = itertools.count()
connected: list[RayBackend] = []
"""Back ends of this process that are not closed; Ray is one connection for all of them."""
_known_processes: dict[str, tuple[str, int, ProcessInfo | None]] = {}
"""Key of a process → its group, rank and what is known of it: a call may fail because of another group's worker."""


def connect(address: str | None = None, **options: Any) -> RayBackend:
    """Makes the back end on which groups are started from now on, until it is closed.

    Args:
        address: of a running Ray cluster; see ``RayBackend``.
        options: of ``RayBackend``: ``num_cpus``, …

    Returns:
        The back end; as a context manager it closes itself.

    Raises:
        UserError: Ray is not installed, or its address does not answer.
    """
    try:
        from quartet.cluster.ray_backend import RayBackend
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UserError(
            "cluster.type: ray needs Ray",
            found="it is not installed",
            remedy="pip install 'quartet-rl[ray]', or set cluster.type=local (one process)",
        ) from error
    return RayBackend(address, **options)


class WorkerGroup:
    """Starts a worker class in every process of a pool and binds its marked methods.

    ``WorkerGroup(pool, Accumulator, 3)`` makes ``Accumulator(3)`` in every process; ``group.add(1)`` then calls ``add``
    in the way that its ``dispatch`` mark says.

    Attributes:
        processes: process id, node and devices of each rank.

    Args:
        pool: where. It holds one group at a time.
        worker: the class, or a ``ClassWithArgs``.
        args: for the class.
        name: of the group, in messages.
        backend: where the pool is; by default what ``connect`` made last.
        start_timeout_s: to be granted the pool, and again to start the processes.

    Raises:
        UserError: the pool cannot be granted, or the class raised one.
        WorkerError, WorkerDied: a worker raised or ended while it was made.
        TimeoutError: a process did not start within the time.
    """

    def __init__(
        self,
        pool: ResourcePool,
        worker: type | ClassWithArgs,
        *args: Any,
        name: str | None = None,
        backend: RayBackend | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        self._worker = worker if isinstance(worker, ClassWithArgs) else ClassWithArgs(worker, *args)
        cls = self._worker.cls
        if backend is None and not connected:
            raise UserError(
                "there is no cluster to start workers on",
                found="no call of connect before",
                remedy="call connect() first",
            )
        self.backend = backend or connected[-1]
        self.name = name or f"{cls.__name__.lower()}-{next(_names)}"
        self.handles: list[Any] = []
        self.processes: tuple[ProcessInfo, ...] = ()
        self._pool, self._start_timeout_s = pool, start_timeout_s
        self._gone: WorkerDeath | None = None  # of those before, until a restart has succeeded
        self._pings: dict[int, Any] = {}
        self._marks = dispatched_methods(cls)
        for method, mark in self._marks.items():
            setattr(self, method, partial(self._called, method, mark))
        self._start()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Has the worker's marked methods."""

    @property
    def world_size(self) -> int:
        return self._pool.world_size

    # Life ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Starts the processes, tells each its place, and makes the workers."""
        self.backend.grant(self._pool, self._start_timeout_s)
        self.handles = list(self.backend.start(self._pool, self.name))
        try:
            for rank, handle in enumerate(self.handles):
                _known_processes[self.backend.key(handle)] = (self.name, rank, None)
            self.processes = tuple(self._asked(self.handles, "process_info", timeout_s=self._start_timeout_s))
            for rank, (handle, info) in enumerate(zip(self.handles, self.processes, strict=True)):
                _known_processes[self.backend.key(handle)] = (self.name, rank, info)
            for handle, place in zip(self.handles, self._places(), strict=True):
                # A process runs its calls in order, so this one need not be waited for.
                self.backend.call(handle, "set_environment", (place.environment(),))
            # Stored once: arguments may be large, a state dictionary say.
            self._asked(self.handles, "build", self.backend.put(self._worker))
        except BaseException:
            self.stop()
            raise

    def _places(self) -> list[RankInfo]:
        """Returns every rank's place; rank 0 names the port at which all meet, on its own node."""
        (port,) = self._asked(self.handles[:1], "rendezvous_port")
        nodes = [info.node for info in self.processes]
        address = LOOPBACK if len({info.host for info in self.processes}) == 1 else self.processes[0].host
        return [
            RankInfo(
                rank=rank,
                world_size=len(nodes),
                local_rank=nodes[:rank].count(node),
                local_world_size=nodes.count(node),
                master_addr=address,
                master_port=port,
                devices=self.processes[rank].devices,
            )
            for rank, node in enumerate(nodes)
        ]

    def _asked(self, handles: Sequence[Any], method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Returns what a method of the host returns in each of these processes, which are being started."""
        began_s = time.monotonic()
        refs = {rank: ref for rank, handle in enumerate(handles) for ref in self.backend.call(handle, method, args)}
        plan = CallPlan([], [*refs], lambda results, shares: results)
        return BatchFuture(self, refs, plan, [], "starting", began_s).wait(timeout_s)

    def stop(self) -> None:
        """Ends the workers, whatever they are doing. The pool stays granted until the back end is closed."""
        self.backend.stop(self.handles)
        self.handles = []
        self._pings.clear()

    def restart(self) -> None:
        """Ends what is left of the workers and makes all anew, with a new rendezvous.

        All of them, because the living ones wait in collectives for the dead one. What a worker had learnt is for its
        owner to load again.

        Raises:
            UserError, WorkerError, WorkerDied: as when the group was made.
        """
        self._gone = WorkerDeath(self.name, 0, None, "unknown host", "a call", "the group is being started anew")
        try:
            self.stop()
            self._start()
            self._gone = None
        except WorkerDied as error:
            self._gone = error.death
            raise
        except WorkerError as error:
            failed = error.failure
            reason = f"it raised as it was started anew: {failed.summary}"
            self._gone = WorkerDeath(failed.group, failed.rank, None, failed.host, "starting", reason)
            raise

    def dead(self, timeout_s: float = 1.0) -> list[WorkerDeath]:
        """Returns the workers that are dead. One that is busy for all of the time counts as living.

        Where the last restart failed it is who made it fail.
        """
        if self._gone is not None:
            return [self._gone]
        self._check_started()
        # Who was asked and has not answered is busy: it answers when it is idle again, and its call fails when it dies.
        for rank, handle in enumerate(self.handles):
            if rank not in self._pings:
                (self._pings[rank],) = self.backend.call(handle, "ping", ())
        ranks = sorted(self._pings)
        ready = self.backend.wait([self._pings[rank] for rank in ranks], timeout_s)
        ended = [self._pings.pop(rank) for rank, is_there in zip(ranks, ready, strict=True) if is_there]
        lost = [value for value in self.backend.get(ended) if isinstance(value, LostResult)]
        return [self._death(each, "a look at whether it lives") for each in lost]

    # Calls -----------------------------------------------------------------------------------------------

    def call(
        self,
        method: str | Callable[..., Any],
        *args: Any,
        mode: DispatchMode = BROADCAST,
        blocking: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Calls any method, by name or as a function of the class.

        Raises:
            WorkerError: a worker's method raised; it lives on.
            WorkerDied: a worker's process is gone.
            UserError: raised by a worker's method.
            ValueError: the arguments do not fit the dispatch mode.
        """
        return self._called(_name_of(method), DispatchInfo(mode, blocking), *args, **kwargs)

    def ask(
        self, method: str | Callable[..., Any], *args: Any, mode: DispatchMode = BROADCAST, **kwargs: Any
    ) -> BatchFuture:
        """Makes a ``call`` for a coroutine, which awaits the result; that comes to the driver. The shortest way for
        small ones.
        """
        return self._submit(_name_of(method), mode, args, kwargs, stays=False)

    def _called(self, method: str, mark: DispatchInfo, /, *args: Any, **kwargs: Any) -> Any:
        future = self._submit(method, mark.mode, args, kwargs, stays=not mark.blocking)
        return future.result() if mark.blocking else future

    def _submit(
        self, method: str, mode: DispatchMode, args: tuple[Any, ...], kwargs: dict[str, Any], *, stays: bool
    ) -> BatchFuture:
        """Calls a method in every process that the mode names, without waiting.

        Args:
            stays: results stay where they are made; otherwise they come to the driver.

        Raises:
            WorkerDied: the group is being started anew, or could not be.
            ValueError: an argument is a future of several ranks' results, or does not fit the mode.
        """
        handles = self.handles
        if self._gone is not None:  # another thread may start the group anew: calls meanwhile are of what died
            raise WorkerDied(self._gone)
        self._check_started()
        plan = mode.plan(RankLayout(self.world_size), args, kwargs)
        readers = Counter(id(value) for call in plan.calls if call is not None for value in call.values())
        stored: dict[int, Any] = {}

        def sent(value: Any) -> Any:
            """Returns what stands for an argument: a future's reference; of a large value of several ranks,
            its copy.
            """
            if isinstance(value, BatchFuture):
                return value.reference()
            if readers[id(value)] < 2 or not isinstance(value, MAY_BE_LARGE):
                return value
            if id(value) not in stored:
                stored[id(value)] = self.backend.put(value)
            return stored[id(value)]

        began_s = time.monotonic()
        status: dict[int, Any] = {}
        parts: dict[int, Any] = {}
        for rank, call in enumerate(plan.calls):
            if call is not None:
                answers = rank in plan.answers
                head = CallHeader(method, tuple(call.kwargs), answers, answers and stays)
                refs = self.backend.call(handles[rank], "call", (head, *map(sent, call.values())), 1 + head.stays)
                status[rank], parts[rank] = refs[0], refs[-1]
        results = [parts[rank] for rank in plan.answers] if stays else []
        return BatchFuture(self, status, plan, results, f"{self.name}.{method}", began_s)

    def _check_started(self) -> None:
        if not self.handles:
            raise ClusterError(f"group {self.name!r} was stopped; restart it, or make a new one")

    # Trouble ---------------------------------------------------------------------------------------------

    def raise_for(self, troubles: Mapping[int, WorkerFailure | LostResult], during: str) -> None:
        """Raises the cause: a death before an exception, which is often only how the others noticed."""
        lost = [t for t in troubles.values() if isinstance(t, LostResult)]
        failures = [
            t if t.rank >= 0 else replace(t, group=self.name, rank=rank)  # a sender that did not know its rank
            for rank, t in troubles.items()
            if isinstance(t, WorkerFailure)
        ]
        if lost:
            # Lost data says less than the process that was lost.
            raise WorkerDied(min((self._death(t, during) for t in lost), key=lambda death: death.rank is None))
        raise min(failures, key=lambda failure: failure.is_echo).error()

    def _death(self, lost: LostResult, during: str) -> WorkerDeath:
        group, rank, info = _known_processes.get(lost.key or "", (self.name, None, None))
        pid, host = (info.pid, info.host) if info is not None else (None, "unknown host")
        return WorkerDeath(group, rank, pid, host, during, lost.reason)


def _name_of(method: str | Callable[..., Any]) -> str:
    return method if isinstance(method, str) else method.__name__
