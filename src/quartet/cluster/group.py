"""Worker groups: one handle on the driver for a class that runs in many processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from quartet.cluster.backend import Backend, current_backend
from quartet.cluster.dispatch import BROADCAST, DispatchMode, Mark, marks_of
from quartet.cluster.errors import Death
from quartet.cluster.futures import BatchFuture
from quartet.cluster.layout import Layout
from quartet.cluster.processes import GroupSpec, ProcessManager
from quartet.cluster.resource_pool import ResourcePool
from quartet.cluster.worker_process import ClassWithArgs, ProcessInfo

_names = itertools.count()


class GroupMethod:
    """A worker's method, called on the group in the way that its mark says."""

    def __init__(self, processes: ProcessManager, name: str, mark: Mark) -> None:
        self._processes = processes
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
        return self.ask(*args, **kwargs).result()

    def ask(self, *args: Any, **kwargs: Any) -> BatchFuture:
        """``run`` for a coroutine: results come to the driver as they are made. The shortest way for small ones."""
        return self._submit(args, kwargs, stays=False)

    def submit(self, *args: Any, **kwargs: Any) -> BatchFuture:
        """Returns at once, whatever the mark says; the future raises what ``run`` would raise."""
        return self._submit(args, kwargs, stays=True)

    def _submit(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, stays: bool) -> BatchFuture:
        plan = self._mark.mode.plan(Layout.fit(self._processes.spec.pool.world_size), args, kwargs)
        return self._processes.submit(self._name, plan, stays=stays)


class WorkerGroup:
    """Starts a worker class in every process of a pool and binds its marked methods.

    ``WorkerGroup(pool, Accumulator, 3)`` makes ``Accumulator(3)`` in every process; ``group.add(1)`` then calls ``add``
    in the way that its ``dispatch`` mark says.

    Args:
        pool: where.
        worker: the class, or a ``ClassWithArgs``.
        args: for the class.
        name: of the group, in messages.
        backend: where the pool is; by default what ``connect`` made last.
        max_restarts: how often ``restart`` may be called.
        start_timeout_s: to be granted the pool, and again to start the processes.

    Raises:
        UserError: the pool cannot be granted, or the class raised one.
        WorkerError, WorkerDied: a worker raised or ended while it was made.
    """

    def __init__(
        self,
        pool: ResourcePool,
        worker: type | ClassWithArgs,
        *args: Any,
        name: str | None = None,
        backend: Backend | None = None,
        max_restarts: int = 3,
        start_timeout_s: float = 120.0,
    ) -> None:
        deferred = worker if isinstance(worker, ClassWithArgs) else ClassWithArgs(worker, *args)
        self._cls = deferred.cls
        self.name = name or f"{self._cls.__name__.lower()}-{next(_names)}"
        spec = GroupSpec(self.name, pool, deferred, max_restarts, start_timeout_s)
        self._processes = ProcessManager(backend or current_backend(), spec)
        for method, mark in marks_of(self._cls).items():
            if hasattr(type(self), method):
                raise ValueError(f"{self._cls.__name__}.{method} has the name of a method that every group has")
            setattr(self, method, GroupMethod(self._processes, method, mark))
        self._processes.start()

    def __getattr__(self, name: str) -> Any:
        # Only reached where there is no such attribute; a copy that is being made has none of ours either.
        if name.startswith("_"):
            raise AttributeError(name)
        if hasattr(self._cls, name):
            raise AttributeError(
                f"{self._cls.__name__}.{name} is not marked with dispatch; mark it, or use call({name!r}, …)"
            )
        raise AttributeError(f"group {self.name!r} of {self._cls.__name__} has no method {name!r}")

    @property
    def backend(self) -> Backend:
        return self._processes.backend

    @property
    def world_size(self) -> int:
        return self._processes.spec.pool.world_size

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
        """Calls any method, by name or as a function of the class."""
        return GroupMethod(self._processes, _name_of(method), Mark(mode, blocking))(*args, **kwargs)

    def ask(
        self, method: str | Callable[..., Any], *args: Any, mode: DispatchMode = BROADCAST, **kwargs: Any
    ) -> BatchFuture:
        """``call`` for a coroutine, which awaits the result; that comes to the driver. The shortest way for small
        ones."""
        return GroupMethod(self._processes, _name_of(method), Mark(mode)).ask(*args, **kwargs)

    def dead(self, timeout_s: float = 1.0) -> list[Death]:
        """The workers that are dead. One that is busy for all of the time counts as living."""
        return self._processes.dead(timeout_s)

    def restart(self) -> None:
        """Ends what is left of the workers and makes all anew.

        Raises:
            ClusterError: this was done ``max_restarts`` times already.
            UserError, WorkerError, WorkerDied: as when the group was made.
        """
        self._processes.restart()

    def stop(self) -> None:
        """Ends the workers, whatever they are doing. The pool stays granted until the back end is closed."""
        self._processes.stop()


def _name_of(method: str | Callable[..., Any]) -> str:
    return method if isinstance(method, str) else method.__name__
