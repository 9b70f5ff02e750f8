"""The back end ``local``: workers are objects of this process and take turns.

Everything is as with Ray, except that values are passed and not copied, and that workers never run at the same time: a
non-blocking call is done when it returns, and workers that must meet (a process group of several) are refused.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from quartet.cluster.backend import Backend, WorkerHandle, forget
from quartet.cluster.errors import Lost
from quartet.cluster.futures import BatchFuture
from quartet.cluster.resource_pool import Node, ResourcePool, check_pool
from quartet.cluster.worker import TAKES_TURNS
from quartet.cluster.worker_process import ProcessInfo, WorkerProcess

_detached: dict[tuple[str, int], WorkerHandle] = {}
_numbers = itertools.count()


@dataclass(frozen=True)
class LocalRef:
    """A value that is already there."""

    value: Any


class LocalWorkerProcess(WorkerProcess):
    """Keeps its environment to itself."""

    def __init__(self, group: str, rank: int, environment: Mapping[str, str]) -> None:
        super().__init__(group, rank, fetch=lambda refs: [ref.value for ref in refs])
        self.environment = dict(environment)
        self.is_stopped = False

    def set_environment(self, environment: Mapping[str, str]) -> None:
        self.environment |= environment

    def rendezvous_port(self) -> int:
        return TAKES_TURNS

    def stop(self) -> None:
        """The worker is gone, and so is what it held."""
        self.is_stopped = True
        self._roles.clear()


class LocalBackend(Backend):
    """Workers in this process."""

    def __init__(self) -> None:
        self._handles: list[WorkerHandle] = []

    def nodes(self) -> list[Node]:
        here = {"CPU": 1.0}
        return [Node("this process", here, here)]

    def grant(self, pool: ResourcePool, timeout_s: float, name: str | None = None) -> None:
        """Any number of workers may take turns on the CPU; each GPU worker needs a device of its own."""
        here = {"GPU": float(torch.cuda.device_count())}
        wanted = {name: amount for name, amount in pool.needs.items() if name != "CPU"}
        if wanted:
            one = ResourcePool((pool.world_size,), cpus=0.0, gpus=pool.gpus, resources=pool.resources)
            check_pool(one, [Node("this process", here, here)])

    def release(self, pool: ResourcePool, name: str | None = None) -> None:
        """There is nothing to give back."""

    def start(
        self, pool: ResourcePool, group: str, *, environment: Mapping[str, str], detached: bool
    ) -> Sequence[WorkerHandle]:
        hosts = [LocalWorkerProcess(group, rank, environment) for rank in range(pool.world_size)]
        handles = [WorkerHandle(f"local-{next(_numbers)}", rank, host) for rank, host in enumerate(hosts)]
        if detached:
            _detached.update({(group, handle.rank): handle for handle in handles})
        else:
            self._handles += handles
        return handles

    def stop(self, handles: Sequence[WorkerHandle]) -> None:
        for handle in handles:
            handle.target.stop()
        for name, handle in list(_detached.items()):
            if handle.target.is_stopped:
                del _detached[name]

    def call(self, handle: WorkerHandle, method: str, args: tuple[Any, ...], returns: int = 1) -> Sequence[LocalRef]:
        host: LocalWorkerProcess = handle.target
        if host.is_stopped:
            return [LocalRef(Lost(handle.key, "it was stopped"))] * returns
        _check_no_future_inside(args)
        with _environment(host.environment):
            found = getattr(host, method)(*(value.value if isinstance(value, LocalRef) else value for value in args))
        return [LocalRef(value) for value in (found if returns > 1 else (found,))]

    def put(self, value: Any) -> LocalRef:
        return LocalRef(value)

    def get(self, refs: Sequence[LocalRef], timeout_s: float | None = None) -> list[Any]:
        return [ref.value for ref in refs]

    def wait(self, refs: Sequence[LocalRef], timeout_s: float) -> list[bool]:
        return [True] * len(refs)

    def soon(self, ref: LocalRef) -> asyncio.Future[Any]:
        there = asyncio.get_running_loop().create_future()
        there.set_result(ref.value)
        return there

    def last_lines(self, info: ProcessInfo, count: int) -> list[str]:
        return []

    def find(self, group: str, rank: int) -> WorkerHandle | None:
        return _detached.get((group, rank))

    def close(self) -> None:
        """Detached workers stay."""
        self.stop(self._handles)
        self._handles.clear()
        forget(self)


def _check_no_future_inside(args: tuple[Any, ...]) -> None:
    """With Ray it could not travel; here it would, as something that no worker can use."""
    for value in args:
        inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
        for each in inside:
            if isinstance(each, BatchFuture):
                each.__reduce__()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """The variables hold inside the block, and what was there before after it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
