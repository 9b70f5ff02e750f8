"""The two ends of a weight sync: a sender offers a version and sends it, each receiver takes it in one call.

=============== =================================================== ==========================================
transport       how the bytes come                                  where it fits
=============== =================================================== ==========================================
shared          the receiver reads the trainer's tensors            one process
shared_memory   buckets in memory that both see                     one machine
cuda_ipc        buckets in memory that both see                     processes on one GPU
collective      buckets in broadcasts (NCCL, gloo)                  several GPUs or machines
=============== =================================================== ==========================================

``WeightReceiver.receive`` and ``WeightSender.send`` run at once and watch each other on a board. Nothing is sent before
every receiver has said that all names and shapes fit, and no new version is served before every receiver has found
every digest right. Neither call outlasts the silence that is allowed, whatever happens to the other ends.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from quartet.config import UserError
from quartet.weights.board import READY, SENDER, Position, Progress, machine_id
from quartet.weights.errors import WeightSyncError
from quartet.weights.in_process import NamedSource, sync_in_process
from quartet.weights.manifest import DTYPES, TensorSpec, WeightManifest, dtype_name
from quartet.weights.sink import TensorSink
from quartet.weights.transports import (
    Bucket,
    CollectiveReceive,
    CollectiveSend,
    MemoryReceive,
    MemorySend,
    Place,
    ReceiveTransport,
    SendTransport,
    plan_buckets,
    receive_tensors,
    send_tensors,
)

Transport = Literal["shared", "shared_memory", "cuda_ipc", "collective"]
P = ParamSpec("P")
R = TypeVar("R")
CPU = torch.device("cpu")
_PATIENCE = 1.5
"""A receiver waits longer than the sender, which sees all receivers and can say which of them holds things up."""


@dataclass(frozen=True)
class Endpoint:
    """One end of a sync.

    Attributes:
        machine: the same for processes that can open each other's memory: one boot, one process namespace, one user.
        address: by which other machines reach this one.
        device: ``cpu``, or of a GPU its UUID.
        dtypes: what an engine takes, by the names that are sent and as safetensors calls them.
    """

    machine: str
    pid: int
    address: str
    device: str
    dtypes: Mapping[str, str] | None = None

    @classmethod
    def here(cls, device: torch.device, dtypes: Mapping[str, str] | None = None) -> Endpoint:
        """The end in this process that computes on ``device``."""
        uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
        return cls(machine_id(), os.getpid(), _own_address(), uuid, dtypes)


@dataclass(frozen=True)
class Offer:
    """What will be sent, and where it is found.

    Attributes:
        tensors: in the order in which they are sent.
        bucket_bytes, timeout_s: which both ends have to agree on.
        machine: the sender's.
    """

    transport: Transport
    version: int
    tensors: tuple[TensorSpec, ...]
    place: Place
    bucket_bytes: int
    timeout_s: float
    machine: str

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.tensors)


def told(method: Callable[P, R]) -> Callable[P, R | WeightSyncError]:
    """A ``WeightSyncError`` is returned: what is raised in another process may arrive as text only."""

    @wraps(method)
    def answer(*args: P.args, **kwargs: P.kwargs) -> R | WeightSyncError:
        try:
            return method(*args, **kwargs)
        except WeightSyncError as error:
            # A copy without causes and tracebacks: their frames would keep connections open that others wait for.
            return copy(error)

    return answer


class WeightSender:
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
        self.source = self._source_like()
        self._device, self._rank = device, rank
        self._transport: Transport | None = None
        self._half: SendTransport | None = None
        self._progress: Progress | None = None

    @told
    def connect(self, engines: Sequence[Endpoint], transport: Transport | Literal["auto"], timeout_s: float) -> Any:
        """Chooses a transport, which it returns, and lets go of the last one.

        Args:
            engines: in the order of their ranks.
            timeout_s: longest silence of another end.

        Raises:
            UserError: the transport does not lead to these engines.
        """
        self.disconnect()
        self.source = self._source_like(like=_wanted(engines))
        if self._rank:
            return None
        here = Endpoint.here(self._device)
        chosen = choose_transport(here, engines) if transport == "auto" else transport
        _check_reach(chosen, here, engines)
        self._transport, self._engines, self._timeout_s = chosen, engines, timeout_s
        if chosen == "collective":
            is_near = all(end.machine == here.machine for end in engines)
            self._half = CollectiveSend(self._device, "127.0.0.1" if is_near else here.address, timeout_s)
        elif chosen != "shared":
            self._half = MemorySend(self._device if chosen == "cuda_ipc" else CPU)
        return chosen

    @told
    def offer(self, version: int) -> Offer | None:
        """What receivers need; None of ranks that only take part in gathers."""
        if self._rank:
            return None
        if self._transport is None:
            raise WeightSyncError(
                "the trainer's weights are not connected with any engine",
                found=f"version {version} to be sent over no transport",
                remedy="connect the trainer and its engines before the first sync",
            )
        if self._progress is not None:
            self._progress.fail()  # a sync that no driver went on with
        specs, machine, bucket_bytes = self.source.specs(), machine_id(), 0
        place: Place = {"sender": f"process {os.getpid()}, sender {id(self)}"}
        if self._half is None:
            _in_process[place["sender"]] = self
        else:
            num, bucket_bytes = len(self._engines), self._half.bucket_bytes
            board, place = self._half.open(num)
            names = [spec.name for spec in specs]
            self._progress = Progress(board, SENDER, range(1, 1 + num), names, self._timeout_s, machine)
            self._plan = plan_buckets(specs, bucket_bytes)
            for rank, engine in enumerate(self._engines):
                # One that is dead already will not say so itself.
                board.write(1 + rank, Position(pid=engine.pid if engine.machine == machine else 0))
        return Offer(self._transport, version, specs, place, bucket_bytes, self._timeout_s, machine)

    @told
    def send(self) -> None:
        """Sends what was offered last; returns when every receiver has found it right.

        Raises:
            WeightSyncError: names the receiver that failed, is gone or late.
            Exception: anything else, what the trainer's own weights raised, say.
        """
        if not self._rank and self._half is None:
            return  # the engine reads them
        tensors = self.source.tensors()
        if self._half is None:
            deque(tensors, maxlen=0)
            return
        at, self._progress = self._progress, None
        assert at is not None, "an offer"
        try:
            at.wait(READY)
            send_tensors(self._half, self._plan, tensors, at)
            at.wait(_verified(self._plan))
            at.note(step=_verified(self._plan))
        except BaseException as error:
            at.fail()
            self._half.drop()
            if isinstance(error, Exception):
                deque(tensors, maxlen=0)  # the other ranks wait in their gathers for this one, to the last tensor
            raise

    def disconnect(self) -> None:
        """Gives the transport's memory back; receivers keep what they have."""
        if self._progress is not None:
            self._progress.fail()
        if self._half is not None:
            self._half.drop()
        self._transport = self._half = self._progress = None


_in_process: WeakValueDictionary[str, WeightSender] = WeakValueDictionary()
"""Senders of this process by what they offer: both ends may belong to one worker, and neither knows the other."""


class WeightReceiver:
    """An engine's end.

    After a failure the sink serves the old version as a whole, or is unusable until a sync succeeds.

    Args:
        before: called when a sync begins.
    """

    def __init__(self, sink: TensorSink, before: Callable[[], object] = lambda: None) -> None:
        self._sink, self._before = sink, before
        self._halves: dict[Transport, ReceiveTransport] = {}

    def describe(self) -> Endpoint:
        """Where this end is, and what it takes."""
        dtypes = {name: dtype_name(dtype) for name, dtype in self._sink.dtypes().items()}
        return Endpoint.here(self._sink.device, dtypes)

    @told
    def receive(self, offer: Offer, rank: int) -> None:
        """Takes the offered weights; returns when they are served.

        Args:
            rank: of this engine among those that the sender was connected with.

        Raises:
            WeightSyncError: the weights do not fit, or did not come whole and unchanged.
        """
        if offer.transport == "shared":
            self._before()
            sync_in_process(_sender_here(offer).source, [self._sink], offer.version)
            return
        half = self._half_of(offer.transport)
        board, names = half.board(offer.place), [spec.name for spec in offer.tensors]
        at = Progress(board, 1 + rank, [SENDER], names, _PATIENCE * offer.timeout_s, offer.machine)
        try:
            self._before()
            self._sink.begin(offer.tensors, offer.version)
            half.open(offer.place, rank)
            at.note(step=READY)
            plan = plan_buckets(offer.tensors, offer.bucket_bytes)
            digests = receive_tensors(half, plan, offer.tensors, self._sink, at)
            self._sink.verify(WeightManifest(offer.version, offer.tensors, digests))
            at.note(step=_verified(plan))
            at.wait(_verified(plan))  # all others have found the same
            self._sink.commit()
        except BaseException as error:
            reason = f"{error.problem}: {error.found}" if isinstance(error, UserError) else str(error)
            self._sink.abort(reason or type(error).__name__)
            at.fail()
            half.drop()
            raise

    def _half_of(self, transport: Transport) -> ReceiveTransport:
        """The one that was used before, where it may be."""
        if transport not in self._halves:
            device = CPU if transport == "shared_memory" else self._sink.device
            half = CollectiveReceive(device) if transport == "collective" else MemoryReceive(device)
            self._halves = {transport: half}
        return self._halves[transport]


def _verified(plan: Sequence[Bucket]) -> int:
    """The step behind the last bucket: a receiver has found every digest right, the sender has seen that of all."""
    return READY + len(plan) + 1


def _sender_here(offer: Offer) -> WeightSender:
    sender = _in_process.get(offer.place["sender"])
    if sender is None:
        raise WeightSyncError(
            "the trainer's weights are not in this process",
            found=f"{offer.place['sender']!r}, this is process {os.getpid()}",
            remedy="use the transport shared only within one process, or auto",
        )
    return sender


def choose_transport(sender: Endpoint, receivers: Sequence[Endpoint]) -> Transport:
    """The nearest way that leads to all receivers, if there is one."""
    if any((end.machine, end.pid) == (sender.machine, sender.pid) for end in receivers):
        return "shared"
    here = all(end.machine == sender.machine for end in receivers)
    devices = {end.device for end in (sender, *receivers)}
    if here and "cpu" in devices:
        return "shared_memory"
    return "cuda_ipc" if here and len(devices) == 1 else "collective"


def _check_reach(transport: Transport, sender: Endpoint, receivers: Sequence[Endpoint]) -> None:
    places = [(end.machine, end.pid) for end in receivers]
    inside = places.count((sender.machine, sender.pid))
    on_gpus = {end.device != "cpu" for end in (sender, *receivers)}
    if transport == "shared" and inside < len(receivers):
        found = f"{inside} of {len(receivers)} engines in the trainer's process {sender.pid}"
        remedy = "sync engines within the trainer's process and others outside of it in two groups, with a trainer each"
        remedy += ", or use the transport auto" if not inside else ""
    elif transport != "shared" and inside:
        found, remedy = "an engine in the trainer's own process, which would wait for itself", "use the transport auto"
    elif len(set(places)) < len(places):
        found, remedy = "several engines in one process, which take turns", "place one engine in each process"
    elif transport == "shared_memory" and any(machine != sender.machine for machine, _ in places):
        found, remedy = "engines on other machines, in other containers or of other users", "use collective or auto"
    elif transport == "cuda_ipc" and any(end.device != sender.device or end.device == "cpu" for end in receivers):
        found, remedy = "ends that are not on one GPU", "use collective, shared_memory or auto"
    elif transport == "collective" and len(on_gpus) > 1:
        found, remedy = "ends on devices of different types", "place all of them on one type, or use shared_memory"
    else:
        return
    raise UserError(f"the weight transport {transport} does not lead to every engine", found=found, remedy=remedy)


def _wanted(receivers: Sequence[Endpoint]) -> dict[str, torch.dtype]:
    """The dtypes that all receivers take."""
    wanted = [dict(end.dtypes or {}) for end in receivers]
    if differing := next((rank for rank, dtypes in enumerate(wanted) if dtypes != wanted[0]), None):
        raise UserError(
            "engines that take the same weights want them in different dtypes",
            found=f"engine {differing} differs from engine 0",
            remedy="build all rollout engines of a run with the same precision",
        )
    return {name: DTYPES[dtype] for name, dtype in wanted[0].items()} if wanted else {}


def _own_address() -> str:
    """Of the interface that the default route takes, else of this machine's name; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737)
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
