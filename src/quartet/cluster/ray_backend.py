"""The back end: one actor of Ray per worker, one placement group per pool, data in Ray's object store.

Imported by ``connect`` alone: this module needs Ray, nothing else does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
from torch import Tensor

from quartet.cluster.errors import LostResult, WorkerFailure
from quartet.cluster.group import connected
from quartet.cluster.resource_pool import ClusterNode, ResourcePool, check_pool, pool_busy_error
from quartet.cluster.worker import NUM_NODES, ProcessInfo, WorkerWrapper
from quartet.config.errors import UserError
from quartet.processes import ProcessReaper, descendant_processes

NAMESPACE = "quartet"
_CONNECT_S = 10.0
_NODES_S, _POLL_S = 180.0, 0.2
_REASON_LINES = 6


class RayWorkerWrapper(WorkerWrapper):
    """The host as a Ray actor."""

    def __init__(self, group: str, rank: int) -> None:
        super().__init__(group, rank, fetch=fetch_references)
        self._host = ray.util.get_node_ip_address()
        register_tensor_serializer()

    def process_info(self) -> ProcessInfo:
        context = ray.get_runtime_context()
        devices = ",".join(context.get_accelerator_ids().get("GPU", []))
        return ProcessInfo(os.getpid(), self._host, context.get_node_id(), devices)


def fetch_references(refs: Sequence[Any]) -> list[Any]:
    """Fetches values of the references for a worker that needs all of them; ``WorkerFailure`` or ``LostResult`` where
    there is none.

    Where one is lost, the others are not waited for.
    """
    try:
        return list(ray.get(list(refs)))
    except RayError:
        troubles = [v for v in map(_value_of, _ended(refs)) if isinstance(v, (WorkerFailure, LostResult))]
        return troubles[:1] * len(refs)


def _ended(refs: Sequence[Any]) -> list[Any]:
    return list(ray.wait(list(refs), num_returns=len(refs), timeout=0)[0])


def _value_of(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayError as error:
        return _trouble_of(error)


def _trouble_of(error: BaseException) -> WorkerFailure | LostResult:
    if not isinstance(error, RayTaskError):
        return _lost(error)
    if isinstance(error.cause, (RayActorError, ObjectLostError)):
        return _lost(error.cause)
    # Not raised by a worker's method, which the host catches: a result that cannot be pickled, say.
    text = str(error).strip()
    pid, host, where = (getattr(error, name, None) for name in ("pid", "ip", "function_name"))
    return WorkerFailure("", -1, pid or 0, host or "", where or "a call", text.splitlines()[-1], text)


def _lost(error: BaseException) -> LostResult:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return LostResult(getattr(error, "actor_id", None), " ".join(lines[-_REASON_LINES:]))


@contextlib.contextmanager
def _out_of_reach() -> Iterator[None]:
    """Keeps SIGUSR1 from processes that are started inside: schedulers send it to all of a job's processes, and it
    would end these. Ray itself keeps SIGINT from them, and ends them by SIGTERM.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


class RayBackend(contextlib.AbstractContextManager["RayBackend"]):
    """Starts workers in a Ray cluster, and calls the methods of the ``WorkerWrapper`` in each.

    A value may be a ``WorkerFailure`` (the method raised) or ``LostResult`` (its process is gone); no method here
    raises for what happened in a worker.

    Args:
        address: ``host:port`` of a running cluster, ``auto`` for the one of this machine; None takes the variable
            ``RAY_ADDRESS`` (which a Ray job has), and without it starts Ray on this machine alone. A process that is
            connected already stays so.
        num_cpus, num_gpus: what a started Ray has to grant; by default what the machine has.
        log_to_driver: print what workers print.

    Raises:
        UserError: the address does not answer, or is no Ray cluster.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        num_cpus: int | None = None,
        num_gpus: int | None = None,
        log_to_driver: bool = True,
    ) -> None:
        self._grants: dict[ResourcePool, PlacementGroup | None] = {}
        self._handles: set[Any] = set()
        self._started_ray = not ray.is_initialized()
        self._is_private = False  # a cluster of this machine alone, which ends with us
        self._keeper: ProcessReaper | None = None
        if self._started_ray:
            address = address or os.environ.get("RAY_ADDRESS")
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            if address and address != "local":
                _join_cluster(address, log_to_driver)
                _await_nodes(int(os.environ.get(NUM_NODES, "1")))
            else:
                self._is_private = True
                others = descendant_processes(os.getpid())
                with _out_of_reach():
                    ray.init(
                        address="local",
                        num_cpus=num_cpus,
                        num_gpus=num_gpus,
                        namespace=NAMESPACE,
                        include_dashboard=False,
                        log_to_driver=log_to_driver,
                    )
                started = descendant_processes(os.getpid()).items() - others.items()
                self._keeper = ProcessReaper(dict(started))
        register_tensor_serializer()
        connected.append(self)

    @property
    def _is_open(self) -> bool:
        """After the end of Ray there is nothing to stop, and asking would start it anew."""
        return self in connected and ray.is_initialized()

    # Pools -----------------------------------------------------------------------------------------------

    def nodes(self) -> list[ClusterNode]:
        """Returns the living machines, with what they have."""
        own = ray.get_runtime_context().get_node_id()
        return [
            ClusterNode(f"node {node['NodeManagerAddress']}", node["Resources"], key, key == own)
            for node in ray.nodes()
            if node["Alive"] and (key := node["NodeID"])
        ]

    def grant(self, pool: ResourcePool, timeout_s: float) -> None:
        """Reserves what the pool needs, until this back end is closed; a second call does nothing.

        Raises:
            UserError: the pool can never be granted, or was not within the time.
        """
        if pool in self._grants:
            return
        reserved = None
        if not pool.nodes:
            check_pool(pool, self.nodes())
            reserved = placement_group(
                pool.bundles() if pool.needs else [{"CPU": 0.001}] * len(pool.processes),
                strategy="STRICT_SPREAD" if pool.strategy == "spread" else "PACK",
            )
            if not reserved.wait(timeout_s):
                remove_placement_group(reserved)
                raise pool_busy_error(pool, self.nodes(), ray.available_resources(), timeout_s)
        self._grants[pool] = reserved

    # Processes -------------------------------------------------------------------------------------------

    def start(self, pool: ResourcePool, group: str) -> list[Any]:
        """Starts one process per rank, in a granted pool; returns Ray's handles of them."""
        reserved, needs = self._grants[pool], pool.needs
        options: dict[str, Any] = {
            "num_cpus": needs.pop("CPU", 0),
            "num_gpus": needs.pop("GPU", 0),
            "resources": needs,
            "max_restarts": 0,
        }
        bundles = [bundle for bundle, count in enumerate(pool.processes) for _ in range(count)]
        handles = []
        for rank, bundle in enumerate(bundles):
            strategy: Any = PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=bundle)
            if pool.nodes:
                strategy = NodeAffinitySchedulingStrategy(pool.nodes[bundle], soft=False)
            handles.append(
                ray.remote(RayWorkerWrapper).options(scheduling_strategy=strategy, **options).remote(group, rank)
            )
        self._handles.update(handles)
        return handles

    def key(self, handle: Any) -> str:
        """Returns the key by which ``LostResult`` names a process."""
        return str(handle._actor_id.hex())

    def stop(self, handles: Sequence[Any]) -> None:
        """Ends the processes, whatever they are doing."""
        for handle in handles if self._is_open else ():
            self._handles.discard(handle)
            ray.kill(handle)

    # Calls -----------------------------------------------------------------------------------------------

    def call(self, handle: Any, method: str, args: tuple[Any, ...], returns: int = 1) -> Sequence[Any]:
        """Calls a method of the ``WorkerWrapper``; calls on one process run in the order in which they were made.

        Args:
            returns: the method returns a tuple of so many values, each of which gets a reference of its own.
        """
        called = getattr(handle, method)
        if returns == 1:
            return [called.remote(*args)]
        return list(called.options(num_returns=returns).remote(*args))

    def put(self, value: Any) -> Any:
        """Stores a value that several calls have as an argument; they take the reference in its place."""
        return ray.put(value)

    def get(self, refs: Sequence[Any]) -> list[Any]:
        """Waits for all of them."""
        try:
            return list(ray.get(list(refs)))
        except RayError:
            return [_value_of(ref) for ref in refs]

    def wait(self, refs: Sequence[Any], timeout_s: float) -> list[bool]:
        """Waits until all are there, on this node, or the time is up: which are there."""
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
        there = set(ready)
        return [ref in there for ref in refs]

    def soon(self, ref: Any) -> asyncio.Future[Any]:
        """Returns the value as a future of the running event loop, which comes as soon as it is made."""
        loop = asyncio.get_running_loop()
        coming: asyncio.Future[Any] = loop.create_future()

        def arrived(found: concurrent.futures.Future[Any]) -> None:
            """Settles what is coming; called in a thread of Ray's."""
            error = found.exception()
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(_settle, coming, found.result() if error is None else _trouble_of(error))

        ref.future().add_done_callback(arrived)
        return coming

    def close(self) -> None:
        """Ends the groups that this back end started; and Ray itself, if it started that."""
        try:
            # A private Ray ends as a whole. One that is gone already would be asked for a minute, which then ends this
            # process.
            if not (self._is_open and self._is_private):
                self.stop([*self._handles])
                while self._grants:
                    _, reserved = self._grants.popitem()
                    if self._is_open and reserved is not None:
                        remove_placement_group(reserved)
        finally:
            last_one = connected == [self]
            if self._is_open and self._started_ray:
                ray.shutdown()
                if self._keeper is not None:
                    self._keeper.close()
            elif self._is_open and last_one:
                deregister_tensor_serializer()
            if self in connected:
                connected.remove(self)

    def __exit__(self, *exception: object) -> None:
        self.close()


def _settle(coming: asyncio.Future[Any], value: Any) -> None:
    if not coming.done():  # the waiter may have been cancelled
        coming.set_result(value)


# The cluster's address, checked before Ray itself is asked, which would try for a minute ---------------------


def _join_cluster(address: str, log_to_driver: bool) -> None:
    if address.startswith("ray://"):
        raise UserError(
            "Ray's client protocol cannot carry worker groups",
            found=f"address={address!r}",
            remedy="submit the program as a Ray job, or run it on a node of the cluster with address='auto'",
        )
    if address not in ("auto", "local"):  # Ray itself would go on trying for a minute, or end the process
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        except (OSError, ValueError) as error:
            raise _unreachable(address, str(error)) from error
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=log_to_driver)
    except (ConnectionError, RuntimeError) as error:
        raise _unreachable(address, str(error).strip().splitlines()[0]) from error


def _await_nodes(num_nodes: int) -> None:
    deadline = time.monotonic() + _NODES_S
    while (num := sum(node["Alive"] for node in ray.nodes())) < num_nodes:
        if time.monotonic() > deadline:
            raise UserError(
                "the nodes of the allocation did not come together",
                found=f"{num} of {num_nodes} have joined within {_NODES_S:g} s",
                remedy="look at the output of the others; every node must reach the first one's ports",
            )
        time.sleep(_POLL_S)


def _unreachable(address: str, why: str) -> UserError:
    return UserError(
        "the Ray cluster does not answer",
        found=f"address={address!r}: {why}",
        remedy="check the address and that `ray status --address …` answers from this machine, start one with "
        "`ray start --head`, or leave the address out to start Ray on this machine",
    )


# Tensors in Ray's object store ---------------------------------------------------------------------------

# As raw bytes beside the pickle, which Ray writes once and without copies. Its default would pickle a tensor's whole
# storage, also of a small view, through several copies in memory.


def register_tensor_serializer() -> None:
    """Registers how tensors cross the wire, for this process; needs a connection to Ray."""
    ray.util.register_serializer(Tensor, serializer=serialize_tensor, deserializer=deserialize_tensor)


def deregister_tensor_serializer() -> None:
    ray.util.deregister_serializer(Tensor)


def serialize_tensor(tensor: Tensor) -> Any:
    """Returns the bytes, dtype, shape and whether it wants gradients, of a dense tensor.

    What was on a GPU arrives on the CPU: the reader may see other devices.
    """
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # A single element counts as contiguous with any stride, but only with 1 can its bytes be viewed.
    flat = dense.as_strided((dense.numel(),), (1,))
    array = flat.view(torch.uint8).numpy()
    return array, tensor.dtype, tuple(tensor.shape), tensor.requires_grad


def deserialize_tensor(wire: Any) -> Tensor:
    """Makes a tensor of the reader's own: what lies in the store is shared by all readers and must not be
    written to.
    """
    array, dtype, shape, requires_grad = wire
    # In torch's memory and not in numpy's, which begins where a product may have other bits (quartet/models/memory.py).
    own = torch.empty(shape, dtype=dtype)
    if len(array):
        np.copyto(own.reshape(-1).view(torch.uint8).numpy(), array)
    return own.requires_grad_() if requires_grad else own
