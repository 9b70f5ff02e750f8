"""The two ends of a weight sync, beside a trainer and beside every engine, and as methods of their hosts."""

from __future__ import annotations

import functools
import os
import platform
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch

from quartet.rollout.protocol import RolloutEngine
from quartet.train.engine import TrainEngine
from quartet.weights import (
    CollectiveInlet,
    CollectiveOutlet,
    CudaIpcInlet,
    CudaIpcOutlet,
    NamedSource,
    Receiver,
    Sender,
    SharedMemoryInlet,
    SharedMemoryOutlet,
    SharedSender,
    TensorSink,
    WeightSyncError,
    take_part,
)
from quartet.weights.cuda_ipc import CudaHandles
from quartet.weights.session import Inlet, Outlet

Transport = Literal["shared", "cuda_ipc", "shared_memory", "collective"]
Dtypes = Mapping[str, torch.dtype]
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Spot:
    """Where one end of a sync computes.

    Attributes:
        machine: the same for processes that can open each other's memory: one boot, one process namespace, one user.
        address: by which other machines reach this one.
        device: ``cpu``, or of a GPU its UUID.
    """

    machine: str
    pid: int
    address: str
    device: str

    @classmethod
    def of(cls, device: torch.device) -> Spot:
        boot = Path("/proc/sys/kernel/random/boot_id")
        namespace = os.readlink("/proc/self/ns/pid") if boot.exists() else ""
        machine = f"{boot.read_text(encoding='ascii').strip() if boot.exists() else platform.node()} {namespace}"
        gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
        return cls(f"{machine} {os.getuid()}", os.getpid(), _own_address(), gpu)


def _own_address() -> str:
    """Of the interface that the default route takes, else of this machine's name; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737)
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


# The ends --------------------------------------------------------------------------------------------


class _MeetingPoint:
    """Where the sinks of one process wait for the sender of the same process."""

    def __init__(self, num_receivers: int) -> None:
        self.sinks: list[TensorSink | None] = [None] * num_receivers


_points: dict[str, _MeetingPoint] = {}
"""By address. Both ends may be hosts of one worker, and neither knows the other."""


class WeightOutlet:
    """The trainer's end. Of several ranks of a trainer, rank 0 sends and the others take part in the gathers.

    Args:
        rank: the trainer's own.
    """

    def __init__(self, engine: TrainEngine[Any], *, rank: int = 0) -> None:
        self._engine = engine
        self._rank = rank
        self._source = NamedSource(engine.weights)
        self._sender: Sender | None = None
        self._point: tuple[str, _MeetingPoint] | None = None

    def spot(self) -> Spot:
        return Spot.of(self._engine.packed.device)

    def open(
        self, transport: Transport, num_receivers: int, host: str, timeout_s: float, wanted: Dtypes | None = None
    ) -> str:
        """
        Args:
            host: where receivers reach this machine.
            wanted: what the engines compute with, by name; the trainer's own dtypes when left out.

        Returns:
            The address for ``WeightInlet.open``; empty from a rank that does not send.
        """
        self.close()
        self._source = NamedSource(self._engine.weights, like=wanted)
        if self._rank:
            return ""
        if transport == "shared":
            address = f"process {os.getpid()}/{secrets.token_hex(8)}"
            self._point = (address, _MeetingPoint(num_receivers))
            _points[address] = self._point[1]
            return address
        device = self._engine.packed.device
        outlets: dict[str, Callable[[], Outlet]] = {
            "shared_memory": SharedMemoryOutlet,
            "cuda_ipc": lambda: CudaIpcOutlet(CudaHandles(device)),
            "collective": lambda: CollectiveOutlet(device=device),
        }
        self._sender = Sender(outlets[transport](), num_receivers=num_receivers, host=host, timeout_s=timeout_s)
        return str(self._sender.address)

    def connect(self) -> None:
        """Waits for all receivers; again after one was lost, for the new one of its rank.

        Raises:
            WeightSyncError: some did not come, or do not fit.
        """
        if self._sender is not None:
            self._sender.connect()
        elif self._point is not None:
            self._sinks()

    def send(self, version: int) -> int:
        """Brings the weights as ``version`` to all engines.

        Returns:
            Bytes sent to each.

        Raises:
            WeightSyncError: names the rank and the tensor.
        """
        if self._rank:
            take_part(self._source)
            return 0
        if self._sender is not None:
            return self._sender.send(self._source, version).num_bytes
        sender = SharedSender(self._sinks())
        try:
            return sender.send(self._source, version).num_bytes
        finally:
            sender.close()

    def _sinks(self) -> list[TensorSink]:
        sinks = [] if self._point is None else self._point[1].sinks
        found = [sink for sink in sinks if sink is not None]
        if not found or len(found) < len(sinks):
            missing = sinks.index(None) if sinks else None
            raise WeightSyncError(
                "not every engine is connected to the trainer's weights",
                found=f"{len(found)} of {len(sinks)} engines in process {os.getpid()}",
                remedy="link the trainer and its engines before the first sync",
                rank=missing,
            )
        return found

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self._point is not None:
            _points.pop(self._point[0], None)
            self._point = None


class WeightInlet:
    """An engine's end."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._sink = engine.weight_sink()
        self._receiver: Receiver | None = None

    def spot(self) -> Spot:
        return Spot.of(self._sink.device)

    def wanted(self) -> dict[str, torch.dtype]:
        """What the tensors must come in, by name."""
        return self._sink.dtypes()

    def open(self, transport: Transport, address: str, rank: int, timeout_s: float) -> None:
        """
        Args:
            address: what ``WeightOutlet.open`` gave.
            rank: of this engine among those of the trainer.

        Raises:
            WeightSyncError: the trainer's end cannot be reached, or does not fit.
        """
        self.close()
        if transport == "shared":
            if address not in _points:
                raise WeightSyncError(
                    "the trainer's weights are not in this process",
                    found=f"{address!r} in process {os.getpid()}",
                    remedy="use the transport shared only within one process, or auto",
                    rank=rank,
                )
            _points[address].sinks[rank] = self._sink
            return
        inlets: dict[str, Callable[[], Inlet]] = {
            "shared_memory": SharedMemoryInlet,
            "cuda_ipc": lambda: CudaIpcInlet(CudaHandles(self._sink.device)),
            "collective": lambda: CollectiveInlet(device=self._sink.device),
        }
        self._receiver = Receiver(inlets[transport](), address, rank=rank, timeout_s=timeout_s)

    def receive(self, version: int) -> None:
        """Returns when the engine serves ``version``. Within one process the sender has brought it already.

        Raises:
            WeightSyncError: it does not; the engine then serves what it had as a whole, or is unusable.
        """
        if self._receiver is not None:
            self._receiver.receive(self._sink, version)
        self._sink.require(version)

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


# As methods of hosts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failed:
    """In place of a result: workers turn exceptions into text, and an error of a sync says more than its text."""

    error: WeightSyncError


def _caught(work: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R | Failed]:
    @functools.wraps(work)
    def method(self: Any, *args: P.args, **kwargs: P.kwargs) -> R | Failed:
        try:
            return work(self, *args, **kwargs)
        except WeightSyncError as error:
            return Failed(error)

    return method


class SendsWeights:
    """For the host beside a trainer, which has its ``engine``; methods for ``link`` and ``deliver`` to call."""

    engine: TrainEngine[Any]
    trainer_rank: int = 0
    _outlet: WeightOutlet | None = None

    @property
    def weight_outlet(self) -> WeightOutlet:
        if self._outlet is None:
            self._outlet = WeightOutlet(self.engine, rank=self.trainer_rank)
        return self._outlet

    def weights_spot(self) -> Spot:
        return self.weight_outlet.spot()

    @_caught
    def weights_open(
        self, transport: Transport, num_receivers: int, host: str, timeout_s: float, wanted: Dtypes | None
    ) -> str:
        return self.weight_outlet.open(transport, num_receivers, host, timeout_s, wanted)

    @_caught
    def weights_connect(self) -> None:
        self.weight_outlet.connect()

    @_caught
    def weights_send(self, version: int) -> int:
        return self.weight_outlet.send(version)

    def weights_close(self) -> None:
        self.weight_outlet.close()


class TakesWeights:
    """For the host beside a rollout engine with its own weights."""

    engine: RolloutEngine
    _inlet: WeightInlet | None = None

    @property
    def weight_inlet(self) -> WeightInlet:
        if self._inlet is None:
            self._inlet = WeightInlet(self.engine)
        return self._inlet

    def weights_spot(self) -> Spot:
        return self.weight_inlet.spot()

    def weights_wanted(self) -> dict[str, torch.dtype]:
        return self.weight_inlet.wanted()

    @_caught
    def weights_open(self, transport: Transport, address: str, rank: int, timeout_s: float) -> None:
        self.weight_inlet.open(transport, address, rank, timeout_s)

    @_caught
    def weights_receive(self, version: int) -> None:
        self.weight_inlet.receive(version)

    def weights_close(self) -> None:
        self.weight_inlet.close()
