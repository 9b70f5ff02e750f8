"""The two ends of a weight sync: a sender offers a version and sends it, each receiver takes it in one call.

=============== =================================================== ==========================================
transport       how the bytes come                                  where it fits
=============== =================================================== ==========================================
shared          the receiver reads the trainer's tensors            one process
shared_memory   buckets in memory that both see                     one machine
collective      buckets in broadcasts (NCCL, gloo)                  several GPUs or machines
=============== =================================================== ==========================================

``WeightReceiver.receive`` and ``WeightSender.send`` run at once and watch each other on a board. Nothing is sent before
every receiver has said that all names and shapes fit, and no new version is served before every receiver has found
every digest right. Neither call outlasts the silence that is allowed, whatever happens to the other ends.

How bytes come from one end to the others: in flat buckets, through memory that both see or by broadcasts.

Tensors lie end to end in a few buffers of a fixed size, cut where one is full. Both ends make the same plan from the
announced tensors, so a bucket needs no description of its own. ``send_tensors`` fills buckets and ``receive_tensors``
empties them; a transport's two halves say where an empty buffer and a full one come from. They know nothing of
versions, digests compared, or commits.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from typing import Any, Literal, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from quartet.config import UserError
from quartet.weights.digest import BLOCK_BYTES, byte_view, digest_text, piece_digest
from quartet.weights.manifest import DTYPES, TensorSpec, WeightSyncError, dtype_name
from quartet.weights.shared_memory import (
    ALIGNMENT,
    READY,
    SENDER,
    Board,
    MemoryBoard,
    SharedSegment,
    StoreBoard,
    SyncPosition,
    SyncProgress,
    machine_id,
)
from quartet.weights.sink import NamedSource, TensorSink, gather, sync_in_process

NUM_BUFFERS = 2
NUM_IN_MEMORY = 8
"""Of the buffers that only the CPU sees: an end may be as far ahead while the other one has no core."""
BUCKET_BYTES = {"memory": 4 * BLOCK_BYTES, "collective": 2**26}
"""Of each buffer. Those in memory stay in the caches that the processes share."""
Place = Mapping[str, Any]
"""What a receiver needs in order to find the sender and the data: plain data."""


@dataclass(frozen=True)
class BucketSpan:
    """A run of one tensor's bytes in a bucket.

    Attributes:
        tensor: its index; behind the last tensor come the digests of all.
        start: in the tensor, in bytes.
        offset: in the bucket.
    """

    tensor: int
    start: int
    num_bytes: int
    offset: int

    def of(self, bucket: Tensor) -> Tensor:
        """Returns the span's bytes in ``bucket``."""
        return bucket[self.offset : self.offset + self.num_bytes]


@dataclass(frozen=True)
class WeightBucket:
    number: int
    spans: tuple[BucketSpan, ...]

    @property
    def num_bytes(self) -> int:
        return self.spans[-1].offset + self.spans[-1].num_bytes

    @property
    def step(self) -> int:
        """Of an end that is through with it."""
        return READY + 1 + self.number


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[WeightBucket]:
    """Plans every byte of every tensor once, in order, and then a digest of 16 hex digits for each.

    A tensor is cut between two blocks of its digest. One without elements needs no bucket.

    Raises:
        ValueError: no block fits into a bucket.
    """
    if bucket_bytes < BLOCK_BYTES:
        raise ValueError(f"buckets of {bucket_bytes} bytes; at least {BLOCK_BYTES} are needed")
    buckets: list[list[BucketSpan]] = [[]]
    used = 0
    for tensor, num_bytes in enumerate([*(spec.num_bytes for spec in specs), 16 * len(specs)]):
        start = 0
        while (left := num_bytes - start) > 0:
            offset = -(-used // ALIGNMENT) * ALIGNMENT
            room = bucket_bytes - offset
            count = left if left <= room else room // BLOCK_BYTES * BLOCK_BYTES
            if count > 0:
                buckets[-1].append(BucketSpan(tensor, start, count, offset))
                start, used = start + count, offset + count
            else:
                buckets.append([])
                used = 0
    return [WeightBucket(number, tuple(spans)) for number, spans in enumerate(buckets) if spans]


def send_tensors(
    half: SendTransport, plan: Sequence[WeightBucket], tensors: Iterator[Tensor], at: SyncProgress
) -> None:
    """Moves all tensors, of which each is valid until the next one is asked for, and then their digests.

    Raises:
        WeightSyncError: a receiver failed, is gone or is late; it is named.
    """
    digests: list[str] = []
    spans = ((bucket, span) for bucket in plan for span in bucket.spans)
    buffer = torch.empty(0)

    def contents() -> Iterator[Tensor]:
        yield from map(byte_view, tensors)
        yield torch.tensor(list("".join(digests).encode()), dtype=torch.uint8)

    for number, data in enumerate(contents(), 1):
        sent = total = 0
        while sent < len(data):
            bucket, span = next(spans)
            if span is bucket.spans[0]:
                buffer = half.empty(bucket, at)
            total += piece_digest(data[sent : sent + span.num_bytes], sent // BLOCK_BYTES, span.of(buffer))
            sent += span.num_bytes
            if span is bucket.spans[-1]:
                half.ship(bucket, at)
        digests.append(digest_text(total))
        at.note(tensor=number)  # which is asked for next
    half.finish(at)


def receive_tensors(
    half: ReceiveTransport,
    plan: Sequence[WeightBucket],
    specs: Sequence[TensorSpec],
    sink: TensorSink,
    at: SyncProgress,
) -> tuple[str, ...]:
    """Brings all tensors to ``sink``; returns the digests that they were sent with.

    Raises:
        WeightSyncError: the sender failed, is gone or is late.
    """
    text = ""
    for bucket, buffer in half.full(plan, at):
        for span in bucket.spans:
            data = span.of(buffer)
            if span.tensor < len(specs):
                at.note(tensor=span.tensor)
                spec = specs[span.tensor]
                sink.write(spec.name, span.start // spec.torch_dtype.itemsize, data.view(spec.torch_dtype))
            else:
                text += bytes(data.tolist()).decode()
        _synchronize(buffer.device)
        at.note(step=bucket.step)
    return tuple(text[i : i + 16] for i in range(0, len(text), 16))


def _synchronize(device: torch.device) -> None:
    """Returns when all copies into and out of buffers are through."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Memory --------------------------------------------------------------------------------------------------


class SharedMemorySender:
    """The sender's half of ``shared_memory``: receivers copy out of the buffers, which they open.

    A full buffer is noted on the board, every receiver copies out of it, waits for its copies and notes that; only then
    is it filled again.
    """

    bucket_bytes = BUCKET_BYTES["memory"]

    def __init__(self) -> None:
        self._rooms: list[SharedSegment] = []

    def open(self, num_receivers: int) -> tuple[Board, Place]:
        """Makes room for a sync."""
        if not self._rooms:
            self._rooms = [SharedSegment.create(self.bucket_bytes) for _ in range(NUM_IN_MEMORY)]
        board = MemoryBoard()
        return board, {"board": board.path, "paths": [room.path for room in self._rooms], "bytes": self.bucket_bytes}

    def empty(self, bucket: WeightBucket, at: SyncProgress) -> Tensor:
        """Returns a buffer for this bucket, waited for until what stood there before is not needed any more."""
        at.wait(bucket.step - NUM_IN_MEMORY)
        return self._rooms[bucket.number % NUM_IN_MEMORY].bytes

    def ship(self, bucket: WeightBucket, at: SyncProgress) -> None:
        """Notes that the bucket is full; whether the receivers have it is seen later."""
        at.note(step=bucket.step)

    def finish(self, at: SyncProgress) -> None:
        """Does nothing once all buckets are shipped: ``at`` sees that they arrive."""

    def drop(self) -> None:
        """Lets go of what the data stand in: the next sync makes other room."""
        self._rooms = []  # a receiver may be reading still: it is not written again, and freed with its last user


class SharedMemoryReceiver:
    def __init__(self) -> None:
        self._paths: list[str] = []
        self._buffers: list[Tensor] = []

    def board(self, place: Place) -> Board:
        """Finds the sender."""
        return MemoryBoard(place["board"])

    def open(self, place: Place, rank: int) -> None:
        """Finds the data."""
        if place["paths"] != self._paths:
            self._paths = place["paths"]
            self._buffers = [SharedSegment.open(path, place["bytes"]).bytes for path in self._paths]

    def full(self, plan: Sequence[WeightBucket], at: SyncProgress) -> Iterator[tuple[WeightBucket, Tensor]]:
        """Yields every bucket, and what it stands in until the next one is asked for."""
        for bucket in plan:
            at.wait(bucket.step)
            yield bucket, self._buffers[bucket.number % len(self._buffers)]

    def drop(self) -> None:
        self._paths, self._buffers = [], []


# Broadcasts ----------------------------------------------------------------------------------------------

_LATER = timedelta(seconds=1)
_LONG = timedelta(days=1)
"""NCCL's own limit, never reached: waiting is ours. Its error could not say which end is behind."""
_numbers = itertools.count(1)


class _Group:
    """A process group of its own, whose rank 0 is the sender, and the buffers of this end.

    gloo for CPU buffers, NCCL for CUDA. It is not the trainer's default group, so nothing of the trainer's waits for
    it. Every wait watches the positions of the other ends, which stand in the group's store: a broadcast that hangs is
    given up with the name of the receiver that is behind. The group is then of no use; the next sync forms another one.
    """

    def __init__(self, place: Place, store: Any, rank: int, device: torch.device, at: SyncProgress) -> None:
        limit, size = timedelta(seconds=place["timeout_s"]), place["size"]
        store.set_timeout(limit)
        self._backend: Any
        try:
            if device.type == "cuda":
                # Torch's stubs leave this signature out.
                self._backend = c10d.ProcessGroupNCCL(store, rank, size, _LONG)  # type: ignore[arg-type]
            else:
                # Its threads end with the broadcast they are in, so its limit is little later than ours, which says
                # which end is behind.
                self._backend = c10d.ProcessGroupGloo(store, rank, size, limit + _LATER)
        except RuntimeError as error:
            raise at.broke(error) from error
        self._buffers = [torch.empty(place["bytes"], dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]

    def buffer(self, bucket: WeightBucket) -> Tensor:
        return self._buffers[bucket.number % NUM_BUFFERS]

    def start(self, bucket: WeightBucket, at: SyncProgress) -> Callable[[], None]:
        """Starts to broadcast a bucket; returns what waits until it is through."""
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            work = self._backend.broadcast([self.buffer(bucket)[: bucket.num_bytes]], options)
        except RuntimeError as error:
            raise at.broke(error) from error

        def finish() -> None:
            at.wait(bucket.step, work.is_completed)
            try:
                work.wait()
            except RuntimeError as error:
                raise at.broke(error) from error

        return finish

    def abort(self) -> None:
        if not isinstance(self._backend, c10d.ProcessGroupGloo):  # whose connections close with it
            self._backend.abort()


class CollectiveSender:
    """The sender's half of ``collective``.

    Args:
        device: of the buffers; its type chooses the back end.
        host: where receivers reach this machine.
        timeout_s: with gloo also how long one bucket may take.
    """

    _store: Any = None
    _group: _Group | None = None

    def __init__(self, device: torch.device, host: str, timeout_s: float) -> None:
        self._device, self._host, self._timeout_s = device, host, timeout_s
        self.bucket_bytes = BUCKET_BYTES["collective"]
        self._under_way: deque[Callable[[], None]] = deque()

    def open(self, num_receivers: int) -> tuple[Board, Place]:
        limit, size = timedelta(seconds=self._timeout_s), 1 + num_receivers
        if self._store is None:
            self._store = dist.TCPStore(self._host, 0, size, is_master=True, timeout=limit, wait_for_workers=False)
            self._place = {"host": self._host, "port": self._store.port, "size": size, "bytes": self.bucket_bytes}
            self._place |= {"group": next(_numbers), "timeout_s": self._timeout_s}
        board = f"sync {next(_numbers)}"
        return StoreBoard(self._store, board), {**self._place, "board": board}

    def empty(self, bucket: WeightBucket, at: SyncProgress) -> Tensor:
        if self._group is None:
            self._group = _Group(self._place, self._store, 0, self._device, at)
        if len(self._under_way) == NUM_BUFFERS:
            self._under_way.popleft()()
        return self._group.buffer(bucket)

    def ship(self, bucket: WeightBucket, at: SyncProgress) -> None:
        assert self._group is not None
        at.note(step=bucket.step)
        self._under_way.append(self._group.start(bucket, at))

    def finish(self, at: SyncProgress) -> None:
        while self._under_way:
            self._under_way.popleft()()

    def drop(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = self._store = None
        self._under_way.clear()


class CollectiveReceiver:
    _store: Any = None
    _group: _Group | None = None
    _place: Place | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def board(self, place: Place) -> Board:
        if self._place is None or any(self._place[key] != place[key] for key in ("host", "port", "group")):
            self.drop()
            host, port, limit = place["host"], place["port"], timedelta(seconds=place["timeout_s"])
            try:
                self._store = dist.TCPStore(
                    host, port, place["size"], is_master=False, timeout=limit, wait_for_workers=False
                )
            except RuntimeError as error:
                raise WeightSyncError(
                    "the group for weight syncs could not be formed",
                    found=f"{host}:{port}: {error}",
                    remedy="see the log of the other end; between machines, all of them must reach the address of the "
                    "sender's default route",
                ) from error
        self._place = place
        return StoreBoard(self._store, place["board"])

    def open(self, place: Place, rank: int) -> None:
        self._rank = rank

    def full(self, plan: Sequence[WeightBucket], at: SyncProgress) -> Iterator[tuple[WeightBucket, Tensor]]:
        if self._group is None:
            assert self._place is not None
            self._group = _Group(self._place, self._store, 1 + self._rank, self._device, at)
        before: tuple[WeightBucket, Callable[[], None]] | None = None
        for bucket in [*plan, None]:
            # While this one is received the one before is unpacked.
            following = None if bucket is None else (bucket, self._group.start(bucket, at))
            if before is not None:
                before[1]()
                yield before[0], self._group.buffer(before[0])
            before = following

    def drop(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = self._store = self._place = None


SendTransport = SharedMemorySender | CollectiveSender
ReceiveTransport = SharedMemoryReceiver | CollectiveReceiver
Transport = Literal["shared", "shared_memory", "collective"]
P = ParamSpec("P")
R = TypeVar("R")
_PATIENCE = 1.5
"""A receiver waits longer than the sender, which sees all receivers and can say which of them holds things up."""


@dataclass(frozen=True)
class SyncEndpoint:
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
    def here(cls, device: torch.device, dtypes: Mapping[str, str] | None = None) -> SyncEndpoint:
        """Describes the end in this process that computes on ``device``."""
        uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
        return cls(machine_id(), os.getpid(), _own_address(), uuid, dtypes)


@dataclass(frozen=True)
class WeightOffer:
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


def as_weight_sync_error(method: Callable[P, R]) -> Callable[P, R | WeightSyncError]:
    """Makes a method return a ``WeightSyncError``: what is raised in another process may arrive as text only."""

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
        whole: as of ``NamedSource``. Where it gives tensors to every rank of a sharded trainer, each is rank 0 of a
            sync of its own, all of them at once.
    """

    def __init__(
        self,
        named: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        device: torch.device,
        rank: int = 0,
        whole: Callable[[Tensor], Tensor | None] = gather,
    ) -> None:
        self._source_like = partial(NamedSource, named, whole=whole)
        self.source = self._source_like()
        self._device, self._rank = device, rank
        self._transport: Transport | None = None
        self._half: SendTransport | None = None
        self._progress: SyncProgress | None = None

    @as_weight_sync_error
    def connect(self, engines: Sequence[SyncEndpoint], transport: Transport | Literal["auto"], timeout_s: float) -> Any:
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
        here = SyncEndpoint.here(self._device)
        chosen = choose_transport(here, engines) if transport == "auto" else transport
        _check_reach(chosen, here, engines)
        self._transport, self._engines, self._timeout_s = chosen, engines, timeout_s
        if chosen == "collective":
            is_near = all(end.machine == here.machine for end in engines)
            self._half = CollectiveSender(self._device, "127.0.0.1" if is_near else here.address, timeout_s)
        elif chosen != "shared":
            self._half = SharedMemorySender()
        return chosen

    @as_weight_sync_error
    def offer(self, version: int) -> WeightOffer | None:
        """Returns what receivers need; None on ranks that only take part in gathers."""
        if self._rank:
            return None
        assert self._transport is not None, "connected"
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
            self._progress = SyncProgress(board, SENDER, range(1, 1 + num), names, self._timeout_s, machine)
            self._plan = plan_buckets(specs, bucket_bytes)
            for rank, engine in enumerate(self._engines):
                # One that is dead already will not say so itself.
                board.write(1 + rank, SyncPosition(pid=engine.pid if engine.machine == machine else 0))
        return WeightOffer(self._transport, version, specs, place, bucket_bytes, self._timeout_s, machine)

    @as_weight_sync_error
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

    def describe(self) -> SyncEndpoint:
        """Tells where this end is, and what it takes."""
        dtypes = {name: dtype_name(dtype) for name, dtype in self._sink.dtypes().items()}
        return SyncEndpoint.here(self._sink.device, dtypes)

    @as_weight_sync_error
    def receive(self, offer: WeightOffer, rank: int) -> None:
        """Takes the offered weights; returns when they are served.

        Args:
            rank: of this engine among those that the sender was connected with.

        Raises:
            WeightSyncError: the weights do not fit, or did not come whole and unchanged.
        """
        if offer.transport == "shared":
            self._before()
            sync_in_process(_in_process[offer.place["sender"]].source, self._sink, offer.version)
            return
        half = self._half_of(offer.transport)
        board, names = half.board(offer.place), [spec.name for spec in offer.tensors]
        at = SyncProgress(board, 1 + rank, [SENDER], names, _PATIENCE * offer.timeout_s, offer.machine)
        try:
            self._before()
            self._sink.begin(offer.tensors, offer.version)
            half.open(offer.place, rank)
            at.note(step=READY)
            plan = plan_buckets(offer.tensors, offer.bucket_bytes)
            digests = receive_tensors(half, plan, offer.tensors, self._sink, at)
            self._sink.verify(digests)
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
        """Returns the receiver's half that was used before, where it may be."""
        if transport not in self._halves:
            half = CollectiveReceiver(self._sink.device) if transport == "collective" else SharedMemoryReceiver()
            self._halves = {transport: half}
        return self._halves[transport]


def _verified(plan: Sequence[WeightBucket]) -> int:
    """Returns the step behind the last bucket: a receiver has found every digest right, the sender has seen that of
    all.
    """
    return READY + len(plan) + 1


def choose_transport(sender: SyncEndpoint, receivers: Sequence[SyncEndpoint]) -> Transport:
    """Chooses the nearest way that leads to all receivers, if there is one."""
    if any((end.machine, end.pid) == (sender.machine, sender.pid) for end in receivers):
        return "shared"
    here = all(end.machine == sender.machine for end in receivers)
    devices = {end.device for end in (sender, *receivers)}
    # NCCL takes no two processes of one GPU.
    return "shared_memory" if here and ("cpu" in devices or len(devices) == 1) else "collective"


def _check_reach(transport: Transport, sender: SyncEndpoint, receivers: Sequence[SyncEndpoint]) -> None:
    places = [(end.machine, end.pid) for end in receivers]
    if len(places) > 1 and len({*places, (sender.machine, sender.pid)}) <= len(places):
        found = "several ends in one process, which would wait for each other"
    elif transport == "collective" and len({end.device != "cpu" for end in (sender, *receivers)}) > 1:
        found = "ends on devices of different types"
    else:
        return
    raise UserError(
        "weights cannot be sent to every engine",
        found=found,
        remedy="place one engine in each process, all on one type of device",
    )


def _wanted(receivers: Sequence[SyncEndpoint]) -> dict[str, torch.dtype]:
    """Returns the dtypes that the first receiver takes; others are refused by the sinks that want other ones."""
    wanted = [dict(end.dtypes or {}) for end in receivers]
    return {name: DTYPES[dtype] for name, dtype in wanted[0].items()} if wanted else {}


def _own_address() -> str:
    """Returns the address of the interface that the default route takes, else the loopback's; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737)
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
