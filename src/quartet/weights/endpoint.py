"""The two ends of a weight sync, and what the driver asks of them, one request at a time.

================= ======================================================== ===========================================
request           meaning, and its answer where it has one                 of
================= ======================================================== ===========================================
``describe``      where the end computes, and what an engine wants:        both
                  ``Endpoint``
``connect``       the transport to use from now on                         both
``prepare``       what will be sent and where to find it: ``Announcement`` the sender
``announce``      everything fits; nothing has been written yet            receivers
``move``          the data move, each end digests what it has; from the    both at once (``shared``: the sender first)
                  sender the ``WeightManifest``
``verify``        every digest is as the sender's                          receivers
``commit``        the new version is served                                receivers
``abort``         the sync has failed; ignored by an end that is not in it both
``disconnect``    lets go of the transport; engines keep what they have    both
================= ======================================================== ===========================================

Nothing is written before every receiver has said that all names and shapes fit, and no new version is served before
every receiver has found every digest right: the driver sees to the order, the ends to what each request allows.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from quartet.weights.collective import CollectiveReceive, CollectiveSend
from quartet.weights.cuda_ipc import CudaIpcReceive, CudaIpcSend
from quartet.weights.errors import WeightSyncError
from quartet.weights.in_process import SharedReceive, SharedSend
from quartet.weights.manifest import DTYPES, WeightManifest, dtype_name
from quartet.weights.progress import machine_id
from quartet.weights.shared_memory import SharedMemoryReceive, SharedMemorySend
from quartet.weights.sink import TensorSink
from quartet.weights.source import NamedSource
from quartet.weights.transport import Announcement, ReceiveTransport, SendTransport

Transport = Literal["shared", "shared_memory", "cuda_ipc", "collective"]
TRANSPORTS: dict[Transport, tuple[type[SendTransport], type[ReceiveTransport]]] = {
    "shared": (SharedSend, SharedReceive),
    "shared_memory": (SharedMemorySend, SharedMemoryReceive),
    "cuda_ipc": (CudaIpcSend, CudaIpcReceive),
    "collective": (CollectiveSend, CollectiveReceive),
}
"""Both halves of what ends can be connected by."""
PROTOCOL = 2
"""Counts changes of these requests and of the manifest's ``WIRE_FORMAT``."""
HalfT = TypeVar("HalfT", SendTransport, ReceiveTransport)


@dataclass(frozen=True)
class Endpoint:
    """One end of a sync.

    Attributes:
        machine: the same for processes that can open each other's memory: one boot, one process namespace, one user.
        address: by which other machines reach this one.
        device: ``cpu``, or of a GPU its UUID.
        torch: its release.
        dtypes: what an engine takes, by the names that are sent and as safetensors calls them; None of a sender.
    """

    machine: str
    pid: int
    address: str
    device: str
    torch: str
    byte_order: str
    dtypes: Mapping[str, str] | None = None
    protocol: int = PROTOCOL


def _endpoint(device: torch.device, dtypes: Mapping[str, torch.dtype] | None = None) -> Endpoint:
    """The end in this process that computes on ``device``."""
    return Endpoint(
        machine=machine_id(),
        pid=os.getpid(),
        address=_own_address(),
        device=str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu",
        torch=torch.__version__,
        byte_order=sys.byteorder,
        dtypes=None if dtypes is None else {name: dtype_name(dtype) for name, dtype in dtypes.items()},
    )


def _own_address() -> str:
    """Of the interface that the default route takes, else of this machine's name; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737)
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


class _End(Generic[HalfT]):
    """What both ends have in common."""

    _transport: HalfT | None = None
    _announced: Announcement | None = None

    def use(self, transport: HalfT) -> None:
        """Moves weights over ``transport`` from now on."""
        self.disconnect()
        self._transport = transport

    def answer(self, request: str, *args: Any) -> Any:
        """What the method of that name returns; a ``WeightSyncError`` where the sync cannot go on.

        The error is returned, because what is raised in another process may arrive as text only.

        Raises:
            Exception: anything else, what the trainer's own weights raised, say.
        """
        try:
            return getattr(self, request)(*args)
        except WeightSyncError as error:
            # A copy without causes and tracebacks: their frames would keep connections open that others wait for.
            return copy(error)

    def disconnect(self) -> None:
        """Gives the transport's memory back; receivers keep what they have."""
        if self._transport is not None:
            self._transport.close()
        self._transport = self._announced = None

    def _expected(self, sync: int) -> Announcement:
        """The announcement of the sync with this number, which is under way."""
        if self._announced is None or self._announced.sync != sync:
            raise WeightSyncError(
                "a request does not belong to the weight sync that is under way",
                found=f"sync {sync}, here {'none' if self._announced is None else self._announced.sync}",
                remedy="the sync was given up already; see the error of the end that gave it up first",
            )
        return self._announced


class WeightSender(_End[SendTransport]):
    """The trainer's end. Of several ranks of a trainer, rank 0 sends and the others take part in its gathers.

    Args:
        named: gives ``(name, tensor)`` anew for every sync: what the trainer has.
        device: where it computes.
        rank: the trainer's own.
        everywhere: every rank of a sharded trainer is rank 0 of a sync of its own, all of them at once.
    """

    def __init__(
        self,
        named: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        device: torch.device,
        rank: int = 0,
        everywhere: bool = False,
    ) -> None:
        self._source_like = partial(NamedSource, named, everywhere=everywhere)
        self._device = device
        self._rank = rank
        self._source = self._source_like()
        self._sync = 0

    def describe(self) -> Endpoint:
        return _endpoint(self._device)

    def connect(
        self, transport: Transport, num_receivers: int, host: str, timeout_s: float, dtypes: Mapping[str, str]
    ) -> None:
        """
        Args:
            host: where receivers reach this machine.
            timeout_s: longest silence of another end.
            dtypes: what the engines take.
        """
        self._source = self._source_like(like={name: DTYPES[dtype] for name, dtype in dtypes.items()})
        half = TRANSPORTS[transport][0]
        self.use(half(num_receivers, timeout_s=timeout_s, device=self._device, host=host))

    def prepare(self, version: int) -> Announcement:
        if self._transport is None:
            raise WeightSyncError(
                "the trainer's weights are not connected with any engine",
                found=f"version {version} to be sent over no transport",
                remedy="connect the trainer and its engines before the first sync",
            )
        if self._announced is not None:
            self.abort(self._sync, "the next sync began")
        self._sync += 1
        specs = self._source.specs()
        offer = {} if self._rank else self._transport.open(specs, version)
        self._announced = Announcement(self._sync, version, self._transport.kind, specs, offer)
        return self._announced

    def move(self, sync: int) -> WeightManifest | None:
        """Sends everything; returns the manifest, None of ranks that only take part in gathers."""
        announced, self._announced = self._expected(sync), None
        assert self._transport is not None
        tensors = self._source.tensors()
        if self._rank:
            deque(tensors, maxlen=0)
            return None
        try:
            digests = self._transport.send(announced.tensors, tensors)
        except BaseException as error:
            self._transport.fail(error)
            if isinstance(error, Exception):
                deque(tensors, maxlen=0)  # the other ranks wait in their gathers for this one, to the last tensor
            raise
        return WeightManifest(announced.version, announced.tensors, tuple(digests))

    def abort(self, sync: int, reason: str, has_begun: bool = True) -> None:
        if sync == self._sync and self._transport is not None:
            self._transport.fail(RuntimeError(reason))
            self._announced = None


class WeightReceiver(_End[ReceiveTransport]):
    """An engine's end.

    After a failure the sink serves the old version as a whole, or is unusable until a sync succeeds.
    """

    def __init__(self, sink: TensorSink) -> None:
        self._sink = sink

    def describe(self) -> Endpoint:
        return _endpoint(self._sink.device, self._sink.dtypes())

    def connect(self, transport: Transport, rank: int, timeout_s: float) -> None:
        self.use(TRANSPORTS[transport][1](rank, timeout_s=timeout_s, device=self._sink.device))

    def announce(self, announcement: Announcement) -> None:
        self._give_up(RuntimeError("the next sync began"), is_overwritten=True)
        if self._transport is None or self._transport.kind != announcement.transport:
            raise WeightSyncError(
                "this engine is not connected with the trainer's weights",
                found=f"transport {None if self._transport is None else self._transport.kind}, announced over "
                f"{announcement.transport}",
                remedy="connect the trainer and its engines before the first sync",
            )
        self._sink.begin(announcement.tensors, announcement.version)
        self._announced = announcement
        with self._step(announcement.sync) as transport:
            transport.open(announcement, self._sink)

    def move(self, sync: int) -> None:
        with self._step(sync) as transport:
            transport.receive(self._expected(sync), self._sink)

    def verify(self, sync: int, manifest: WeightManifest) -> None:
        with self._step(sync):
            self._sink.verify(manifest)

    def commit(self, sync: int) -> None:
        with self._step(sync):
            self._sink.commit()
        self._announced = None

    def abort(self, sync: int, reason: str, has_begun: bool) -> None:
        """
        Args:
            has_begun: the sender may have written data.
        """
        if self._announced is not None and self._announced.sync == sync:
            self._give_up(RuntimeError(reason), is_overwritten=has_begun)

    def disconnect(self) -> None:
        self._give_up(RuntimeError("the engine was disconnected"), is_overwritten=True)
        super().disconnect()

    @contextmanager
    def _step(self, sync: int) -> Iterator[ReceiveTransport]:
        """A step of the sync with this number, which is given up where the block raises."""
        self._expected(sync)
        assert self._transport is not None
        try:
            yield self._transport
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException, *, is_overwritten: bool = False) -> None:
        if self._announced is not None:
            reason = f"{error.problem}: {error.found}" if isinstance(error, WeightSyncError) else str(error)
            self._announced = None
            self._sink.abort(reason or type(error).__name__, is_overwritten=is_overwritten)
            if self._transport is not None:
                self._transport.fail(error)
