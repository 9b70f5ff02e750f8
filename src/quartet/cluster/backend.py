"""What runs workers: one small interface, which ``ray_backend`` fills. Only that needs Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from quartet.cluster.resource_pool import Node, ResourcePool
from quartet.cluster.worker_process import ProcessInfo
from quartet.config.errors import UserError

Ref: TypeAlias = Any
"""A result that may not be there yet; lives where it was made."""


@dataclass(frozen=True)
class WorkerHandle:
    """A started process. ``key`` names it in ``Lost``; ``target`` is the back end's own."""

    key: str
    rank: int
    target: Any


class Backend(AbstractContextManager["Backend"], Protocol):
    """Starts processes and calls the methods of the ``Host`` in each.

    A value may be a ``Failure`` (the method raised) or ``Lost`` (its process is gone); none of these methods raises
    for what happened in a worker.
    """

    def grant(self, pool: ResourcePool, timeout_s: float) -> None:
        """Reserves what the pool needs, until this back end is closed; a second call does nothing.

        Raises:
            UserError: the pool can never be granted, or was not within the time.
        """

    def nodes(self) -> Sequence[Node]:
        """The living machines, with what they have."""

    def start(self, pool: ResourcePool, group: str) -> Sequence[WorkerHandle]:
        """Starts one process per rank, in a granted pool."""

    def stop(self, handles: Sequence[WorkerHandle]) -> None:
        """Ends the processes, whatever they are doing."""

    def call(self, handle: WorkerHandle, method: str, args: tuple[Any, ...], returns: int = 1) -> Sequence[Ref]:
        """Calls a method of the host; calls on one process run in the order in which they were made.

        Args:
            returns: the method returns a tuple of so many values, each of which gets a reference of its own.
        """

    def put(self, value: Any) -> Ref:
        """Stores a value that several calls have as an argument; they take the reference in its place."""

    def get(self, refs: Sequence[Ref], timeout_s: float | None = None) -> list[Any]:
        """
        Raises:
            TimeoutError: not all are there within the time.
        """

    def wait(self, refs: Sequence[Ref], timeout_s: float) -> list[bool]:
        """Waits until all are there, on this node, or the time is up: which are there."""

    def soon(self, ref: Ref) -> asyncio.Future[Any]:
        """The value as a future of the running event loop, which comes as soon as it is made."""

    def last_lines(self, info: ProcessInfo, count: int) -> list[str]:
        """The end of what a process wrote, also of one that is gone; nothing where it cannot be read."""

    def close(self) -> None:
        """Ends what this back end has started."""

    def __exit__(self, *exception: object) -> None:
        self.close()


_connected: list[Backend] = []


def connect(address: str | None = None, **options: Any) -> Backend:
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
    made = RayBackend(address, **options)
    _connected.append(made)
    return made


def current_backend() -> Backend:
    """
    Raises:
        UserError: none is connected.
    """
    if not _connected:
        raise UserError(
            "there is no cluster to start workers on",
            found="no call of connect before",
            remedy="call connect() first",
        )
    return _connected[-1]


def forget(backend: Backend) -> None:
    """The back end is closed."""
    if backend in _connected:
        _connected.remove(backend)
