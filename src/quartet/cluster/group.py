"""Worker groups: one handle on the driver for a class that runs in many processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, Unpack

from quartet.cluster.backend import Backend, current_backend
from quartet.cluster.dispatch import BROADCAST, DispatchMode, Mark, marks_of
from quartet.cluster.errors import Death
from quartet.cluster.futures import BatchFuture
from quartet.cluster.layout import Layout
from quartet.cluster.processes import GroupSpec, ProcessManager, StartOptions
from quartet.cluster.resource_pool import ResourcePool
from quartet.cluster.worker_process import ClassWithArgs, ProcessInfo
from quartet.config.errors import UserError

_names = itertools.count()


class GroupMethod:
    """A worker's method, called on the group in the way that its mark says."""

    def __init__(self, processes: ProcessManager, role: str, name: str, mark: Mark) -> None:
        self._processes = processes
        self._role = role
        self._name = name
        self._mark = mark

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs) if self._mark.blocking else self.submit(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Waits for the result, whatever the mark says.

        Raises:
            WorkerError: a worker's method raised; it lives on.
            WorkerDied: a worker's process is gone.
            UserError: raised by a worker's method.
            ValueError: the arguments do not fit the dispatch mode.
        """
        return self._submit(args, kwargs, None).result()

    def ask(self, *args: Any, **kwargs: Any) -> BatchFuture:
        """``run`` for a coroutine: results come to the driver as they are made. The shortest way for small ones."""
        return self._submit(args, kwargs, None)

    def submit(self, *args: Any, **kwargs: Any) -> BatchFuture:
        """Returns at once, whatever the mark says; the future raises what ``run`` would raise."""
        return self._submit(args, kwargs, self._mark.chunks)

    def _submit(self, args: tuple[Any, ...], kwargs: dict[str, Any], chunks: int | None) -> BatchFuture:
        plan = self._mark.mode.plan(self._processes.spec.layout, args, kwargs)
        if plan.partition is not None and None in plan.shares:  # only manifests will say which items are whose
            chunks = self._mark.chunks
        return self._processes.submit(self._role, self._name, plan, chunks)


class WorkerGroup:
    """Starts a worker class in every process of a pool and binds its marked methods.

    ``WorkerGroup(pool, Accumulator, 3)`` makes ``Accumulator(3)`` in every process; ``group.add(1)`` then calls ``add``
    in the way that its ``dispatch`` mark says.

    Args:
        pool: where; groups on the same pool share what it was granted.
        worker: the class, or a ``ClassWithArgs``.
        args: for the class.
        name: of the group, in messages, and to find a detached group by.
        layout: mesh of the ranks, or sizes of its axes other than ``data``: ``{"tensor": 2}``. By default the class's
            attribute ``layout_axes``, or all ranks data-parallel.
        backend: where the pool is; by default what ``connect`` made last.
        environment: variables that every process has from its start.
        detached: the processes outlive this driver, and are found again with ``WorkerGroup.find``.
        max_restarts: how often ``restart`` may be called.
        start_timeout_s: to be granted the pool, and again to start the processes.

    Raises:
        UserError: the pool cannot be granted, the layout does not divide the processes, or the class raised one.
        WorkerError, WorkerDied: a worker raised or ended while it was made.
    """

    def __init__(
        self,
        pool: ResourcePool,
        worker: type | ClassWithArgs,
        *args: Any,
        name: str | None = None,
        layout: Layout | Mapping[str, int] | None = None,
        backend: Backend | None = None,
        **options: Unpack[StartOptions],
    ) -> None:
        deferred = worker if isinstance(worker, ClassWithArgs) else ClassWithArgs(worker, *args)
        role = name or f"{deferred.cls.__name__.lower()}-{next(_names)}"
        self._bind(_processes(role, pool, {role: deferred}, layout, backend, options), role)
        self._processes.start()

    def _bind(self, processes: ProcessManager, role: str) -> None:
        self._processes = processes
        self._role = role
        self._cls = processes.spec.roles[role].cls
        for name, mark in marks_of(self._cls).items():
            if hasattr(type(self), name):
                raise ValueError(f"{self._cls.__name__}.{name} has the name of a method that every group has")
            setattr(self, name, GroupMethod(processes, role, name, mark))

    @classmethod
    def _of(cls, processes: ProcessManager, role: str) -> WorkerGroup:
        group = cls.__new__(cls)
        group._bind(processes, role)
        return group

    def __getattr__(self, name: str) -> Any:
        # Only reached where there is no such attribute; a copy that is being made has none of ours either.
        if name.startswith("_"):
            raise AttributeError(name)
        if hasattr(self._cls, name):
            raise AttributeError(
                f"{self._cls.__name__}.{name} is not marked with dispatch; mark it, or use call({name!r}, …)"
            )
        raise AttributeError(f"group {self._role!r} of {self._cls.__name__} has no method {name!r}")

    @property
    def name(self) -> str:
        return self._role

    @property
    def backend(self) -> Backend:
        return self._processes.backend

    @property
    def layout(self) -> Layout:
        return self._processes.spec.layout

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def processes(self) -> tuple[ProcessInfo, ...]:
        """Process id, node and devices of each rank."""
        return tuple(self._processes.infos)

    def call(
        self,
        method: str | Callable[..., Any],
        *args: Any,
        mode: DispatchMode = BROADCAST,
        blocking: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Calls any method, by name or as a function of the class: with one value for all workers, or of a ``PerRank``
        each its own."""
        bound = GroupMethod(self._processes, self._role, _name_of(method), Mark(mode, blocking))
        return bound(*args, **kwargs)

    def ask(
        self, method: str | Callable[..., Any], *args: Any, mode: DispatchMode = BROADCAST, **kwargs: Any
    ) -> BatchFuture:
        """``call`` for a coroutine, which awaits the result; that comes to the driver. The shortest way for small
        ones."""
        return GroupMethod(self._processes, self._role, _name_of(method), Mark(mode)).ask(*args, **kwargs)

    def dead(self, timeout_s: float = 1.0) -> list[Death]:
        """The workers that are dead. One that is busy for all of the time counts as living."""
        return self._processes.dead(timeout_s)

    async def died(self, every_s: float = 0.5) -> list[Death]:
        """Waits until workers are dead, busy or idle, and names them; looks every so often.

        Raises:
            ClusterError: the group was stopped.
        """
        return await self._processes.died(every_s)

    def restart(self) -> None:
        """Ends what is left of the workers and makes all anew; for fused roles, all of them.

        Raises:
            ClusterError: this was done ``max_restarts`` times already.
            UserError, WorkerError, WorkerDied: as when the group was made.
        """
        self._processes.restart()

    def stop(self) -> None:
        """Ends the workers, whatever they are doing; for fused roles, all of them.

        The pool stays granted until the back end is closed; a detached group's is given back.
        """
        self._processes.stop()

    @classmethod
    def find(cls, name: str, *, backend: Backend | None = None, timeout_s: float = 30.0) -> WorkerGroup:
        """A detached group, by its name; for fused roles, by the role's.

        Raises:
            UserError: there is none.
            ClusterError: its first worker is there, another is gone.
            TimeoutError: its first worker is busy for longer than the time.
        """
        backend = backend or current_backend()
        group, _, role = name.rpartition("/")
        processes = ProcessManager.found(backend, group or role, timeout_s)
        if processes is None:
            raise UserError(
                "there is no such group",
                found=f"no detached group named {name!r}",
                remedy="start it with detached=True and this name, and look on the same cluster",
            )
        return cls._of(processes, role)


def colocate(
    pool: ResourcePool,
    roles: Mapping[str, type | ClassWithArgs],
    *,
    name: str | None = None,
    layout: Layout | Mapping[str, int] | None = None,
    backend: Backend | None = None,
    **options: Unpack[StartOptions],
) -> dict[str, WorkerGroup]:
    """Several roles fused into one process per rank, with a handle each: ``colocate(pool, {"actor": …, "ref": …})``.

    They share the process, its device and its process group, take turns, and are restarted together. Arguments and
    errors are those of ``WorkerGroup``. A detached one is found by ``WorkerGroup.find("name/role")``.
    """
    deferred = {role: w if isinstance(w, ClassWithArgs) else ClassWithArgs(w) for role, w in roles.items()}
    if not deferred:
        raise ValueError("colocate needs at least one role")
    processes = _processes(name or f"{'-'.join(deferred)}-{next(_names)}", pool, deferred, layout, backend, options)
    groups = {role: WorkerGroup._of(processes, role) for role in deferred}
    processes.start()
    return groups


def _processes(
    name: str,
    pool: ResourcePool,
    roles: Mapping[str, ClassWithArgs],
    layout: Layout | Mapping[str, int] | None,
    backend: Backend | None,
    options: StartOptions,
) -> ProcessManager:
    """Those of a group, not started yet. The first role's class says the layout where none is given."""
    if layout is None:
        layout = getattr(next(iter(roles.values())).cls, "layout_axes", {})
    if not isinstance(layout, Layout) or layout.world_size != pool.world_size:
        layout = Layout.fit(pool.world_size, dict(layout.axes) if isinstance(layout, Layout) else layout)
    return ProcessManager(backend or current_backend(), GroupSpec(name, pool, roles, layout, **options))


def _name_of(method: str | Callable[..., Any]) -> str:
    return method if isinstance(method, str) else method.__name__
