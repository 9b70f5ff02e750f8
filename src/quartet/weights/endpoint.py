"""The two ends of a weight sync, each of which answers the driver's messages one at a time.

Nothing is written before every receiver has said that all names and shapes fit, and no new version is served before
every receiver has found every digest right: the driver sees to the order, the ends to what each message allows.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from quartet.weights.collective import CollectiveReceive, CollectiveSend
from quartet.weights.cuda_ipc import CudaIpcReceive, CudaIpcSend
from quartet.weights.errors import WeightSyncError
from quartet.weights.manifest import DTYPES, Manifest, dtype_name
from quartet.weights.messages import (
    Abort,
    Announcement,
    Answer,
    Commit,
    ConnectReceiver,
    ConnectSender,
    Describe,
    Disconnect,
    Done,
    Endpoint,
    Failed,
    Message,
    Pieces,
    Prepare,
    Sealed,
    Verify,
)
from quartet.weights.progress import machine_id
from quartet.weights.shared import SharedReceive, SharedSend
from quartet.weights.shared_memory import SharedMemoryReceive, SharedMemorySend
from quartet.weights.sink import TensorSink
from quartet.weights.source import NamedSource, WeightSource, take_part
from quartet.weights.transport import ReceiveTransport, SendTransport

TRANSPORTS: dict[str, tuple[type[SendTransport], type[ReceiveTransport]]] = {
    "shared": (SharedSend, SharedReceive),
    "shared_memory": (SharedMemorySend, SharedMemoryReceive),
    "cuda_ipc": (CudaIpcSend, CudaIpcReceive),
    "collective": (CollectiveSend, CollectiveReceive),
}
"""Both halves of what ends can be connected by; ``disk`` needs a folder, see ``WeightSender.use``."""


def _halves(message: ConnectSender | ConnectReceiver) -> tuple[type[SendTransport], type[ReceiveTransport]]:
    if message.transport not in TRANSPORTS:
        raise unexpected(message, "an end without a folder")
    return TRANSPORTS[message.transport]


def describe(device: torch.device, dtypes: Mapping[str, torch.dtype] | None = None) -> Endpoint:
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


class WeightSender:
    """The trainer's end. Of several ranks of a trainer, rank 0 sends and the others take part in its gathers.

    Args:
        named: gives ``(name, tensor)`` anew for every sync: what the trainer has.
        device: where it computes.
        rank: the trainer's own.
    """

    def __init__(
        self, named: Callable[[], Iterable[tuple[str, Tensor]]], *, device: torch.device, rank: int = 0
    ) -> None:
        self._named = named
        self._device = device
        self._rank = rank
        self._source: WeightSource = NamedSource(named)
        self._transport: SendTransport | None = None
        self._sync = 0
        self._announced: Announcement | None = None

    def use(self, transport: SendTransport, source: WeightSource | None = None) -> None:
        """Sends over ``transport`` from now on, and from ``source`` where one is given."""
        self.disconnect()
        self._transport = transport
        self._source = source or self._source

    def answer(self, message: Message) -> Answer:
        """What this end makes of a message; a ``Failed`` where the sync cannot go on.

        Raises:
            Exception: what the trainer's own weights raised.
        """
        try:
            match message:
                case Describe():
                    return describe(self._device)
                case ConnectSender():
                    self._connect(message)
                case Prepare(version):
                    return self._prepare(version)
                case Pieces(sync):
                    return self._send(sync)
                case Abort(sync):
                    self._abort(sync, message.reason)
                case Disconnect():
                    self.disconnect()
                case _:
                    raise unexpected(message, "a sender")
        except WeightSyncError as error:
            return Failed.of(error)
        return Done()

    def _connect(self, message: ConnectSender) -> None:
        dtypes = {name: DTYPES[dtype] for name, dtype in message.dtypes.items()}
        source, num, limit_s = NamedSource(self._named, like=dtypes), message.num_receivers, message.timeout_s
        self.use(_halves(message)[0](num, timeout_s=limit_s, device=self._device, host=message.host), source)

    def _prepare(self, version: int) -> Announcement:
        if self._transport is None:
            raise WeightSyncError(
                "the trainer's weights are not connected with any engine",
                found=f"version {version} to be sent over no transport",
                remedy="connect the trainer and its engines before the first sync",
            )
        if self._announced is not None:
            self._abort(self._announced.sync, "the next sync began")
        self._sync += 1
        specs = self._source.specs()
        offer = {} if self._rank else self._transport.open(specs, version)
        self._announced = Announcement(self._sync, version, self._transport.kind, specs, offer)
        return self._announced

    def _send(self, sync: int) -> Answer:
        announced, self._announced = _expected(self._announced, sync), None
        assert self._transport is not None
        if self._rank:
            take_part(self._source)
            return Done()
        tensors = self._source.tensors()
        try:
            digests = self._transport.send(announced.tensors, tensors)
        except BaseException as error:
            self._transport.fail(error)
            if isinstance(error, Exception):
                # The other ranks of the trainer take part to the end.
                for _ in tensors:
                    pass
            raise
        return Sealed(Manifest(announced.version, announced.tensors, tuple(digests)))

    def _abort(self, sync: int, reason: str) -> None:
        if sync == self._sync and self._transport is not None:
            self._transport.fail(RuntimeError(reason))
            self._announced = None

    def disconnect(self) -> None:
        """Gives the transport's memory back; receivers keep what they have."""
        if self._transport is not None:
            self._transport.close()
        self._transport, self._announced = None, None


class WeightReceiver:
    """An engine's end."""

    def __init__(self, sink: TensorSink) -> None:
        self._sink = sink
        self._transport: ReceiveTransport | None = None
        self._announced: Announcement | None = None

    def use(self, transport: ReceiveTransport) -> None:
        """Receives over ``transport`` from now on."""
        self.disconnect()
        self._transport = transport

    def answer(self, message: Message) -> Answer:
        """What this end makes of a message; a ``Failed`` where the sync cannot go on.

        After a failure the sink serves the old version as a whole, or is unusable until a sync succeeds.
        """
        try:
            match message:
                case Describe():
                    return describe(self._sink.device, self._sink.dtypes())
                case ConnectReceiver():
                    self._connect(message)
                case Announcement():
                    self._prepare(message)
                case Pieces(sync):
                    announced, transport = self._under_way(sync)
                    self._or_abort(lambda: transport.receive(announced, self._sink))
                case Verify(sync, manifest):
                    self._under_way(sync)
                    self._or_abort(lambda: self._sink.verify(manifest))
                case Commit(sync):
                    self._under_way(sync)
                    self._or_abort(self._sink.commit)
                    self._announced = None
                case Abort(sync):
                    if self._announced is not None and self._announced.sync == sync:
                        self._abort(RuntimeError(message.reason), is_overwritten=message.has_begun)
                case Disconnect():
                    self.disconnect()
                case _:
                    raise unexpected(message, "a receiver")
        except WeightSyncError as error:
            return Failed.of(error)
        return Done()

    def _connect(self, message: ConnectReceiver) -> None:
        half = _halves(message)[1]
        self.use(half(message.rank, timeout_s=message.timeout_s, device=self._sink.device))

    def _prepare(self, announcement: Announcement) -> None:
        if self._announced is not None:
            self._abort(RuntimeError("the next sync began"), is_overwritten=True)
        if self._transport is None or self._transport.kind != announcement.transport:
            raise WeightSyncError(
                "this engine is not connected with the trainer's weights",
                found=f"transport {None if self._transport is None else self._transport.kind}, announced over "
                f"{announcement.transport}",
                remedy="connect the trainer and its engines before the first sync",
            )
        transport = self._transport
        self._sink.begin(announcement.tensors, announcement.version)
        self._announced = announcement
        self._or_abort(lambda: transport.open(announcement, self._sink))

    def _under_way(self, sync: int) -> tuple[Announcement, ReceiveTransport]:
        assert self._transport is not None or self._announced is None
        announced = _expected(self._announced, sync)
        assert self._transport is not None
        return announced, self._transport

    def _or_abort(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            self._abort(error)
            raise

    def _abort(self, error: BaseException, *, is_overwritten: bool = False) -> None:
        if self._announced is not None:
            reason = f"{error.problem}: {error.found}" if isinstance(error, WeightSyncError) else str(error)
            self._announced = None
            self._sink.abort(reason or type(error).__name__, is_overwritten=is_overwritten)
            if self._transport is not None:
                self._transport.fail(error)

    def disconnect(self) -> None:
        """Lets go of the transport; the sink keeps what it has."""
        self._abort(RuntimeError("the engine was disconnected"), is_overwritten=True)
        if self._transport is not None:
            self._transport.close()
        self._transport = None


def _expected(announced: Announcement | None, sync: int) -> Announcement:
    if announced is None or announced.sync != sync:
        raise WeightSyncError(
            "a message does not belong to the weight sync that is under way",
            found=f"sync {sync}, here {'none' if announced is None else announced.sync}",
            remedy="the sync was given up already; see the error of the end that gave it up first",
        )
    return announced


def unexpected(message: object, where: str) -> WeightSyncError:
    """The two ends do not follow one protocol."""
    return WeightSyncError(
        "a message of the weight sync makes no sense here",
        found=f"{message!r:.100} at {where}",
        remedy="install the same release of quartet on both ends and use the same transport",
    )
