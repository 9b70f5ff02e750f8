"""How bytes come from one end to the others: in flat buckets, through memory that both see or by broadcasts.

Tensors lie end to end in a few buffers of a fixed size, cut where one is full. Both ends make the same plan from the
announced tensors, so a bucket needs no description of its own. ``send_tensors`` fills buckets and ``receive_tensors``
empties them; a transport's two halves say where an empty buffer and a full one come from. They know nothing of
versions, digests compared, or commits.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from quartet.weights.board import READY, Board, MemoryBoard, Progress, StoreBoard
from quartet.weights.digest import BLOCK_BYTES, as_text, bytes_of, piece_digest
from quartet.weights.errors import WeightSyncError
from quartet.weights.manifest import TensorSpec
from quartet.weights.shared_memory import ALIGNMENT, Segment
from quartet.weights.sink import TensorSink

NUM_BUFFERS = 2
NUM_IN_MEMORY = 8
"""Of the buffers that only the CPU sees: an end may be as far ahead while the other one has no core."""
BUCKET_BYTES = {"memory": 4 * BLOCK_BYTES, "cuda_ipc": 2**28, "collective": 2**26}
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
        """Its bytes in ``bucket``."""
        return bucket[self.offset : self.offset + self.num_bytes]


@dataclass(frozen=True)
class Bucket:
    number: int
    spans: tuple[BucketSpan, ...]

    @property
    def num_bytes(self) -> int:
        return self.spans[-1].offset + self.spans[-1].num_bytes

    @property
    def step(self) -> int:
        """Of an end that is through with it."""
        return READY + 1 + self.number


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """Every byte of every tensor once, in order, and then a digest of 16 hex digits for each.

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
    return [Bucket(number, tuple(spans)) for number, spans in enumerate(buckets) if spans]


def send_tensors(half: SendTransport, plan: Sequence[Bucket], tensors: Iterator[Tensor], at: Progress) -> None:
    """Moves all tensors, of which each is valid until the next one is asked for, and then their digests.

    Raises:
        WeightSyncError: a receiver failed, is gone or is late; it is named.
    """
    digests: list[str] = []
    spans = ((bucket, span) for bucket in plan for span in bucket.spans)
    buffer = torch.empty(0)

    def contents() -> Iterator[Tensor]:
        yield from map(bytes_of, tensors)
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
                half.ship(bucket, buffer[: bucket.num_bytes], at)
        digests.append(as_text(total))
        at.note(tensor=number)  # which is asked for next
    half.finish(at)


def receive_tensors(
    half: ReceiveTransport, plan: Sequence[Bucket], specs: Sequence[TensorSpec], sink: TensorSink, at: Progress
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


class SendTransport(ABC):
    """The sender's half.

    Attributes:
        bucket_bytes: of each buffer.
    """

    bucket_bytes: int

    @abstractmethod
    def open(self, num_receivers: int) -> tuple[Board, Place]:
        """Makes room for a sync."""

    @abstractmethod
    def empty(self, bucket: Bucket, at: Progress) -> Tensor:
        """A buffer for this bucket, waited for until what stood there before is not needed any more."""

    @abstractmethod
    def ship(self, bucket: Bucket, data: Tensor, at: Progress) -> None:
        """The bucket is full. Notes that; whether the receivers have it is seen later."""

    def finish(self, at: Progress) -> None:  # noqa: B027 (not every transport holds something)
        """All buckets are shipped."""

    @abstractmethod
    def drop(self) -> None:
        """Lets go of what the data stand in: the next sync makes other room."""


class ReceiveTransport(ABC):
    """A receiver's half."""

    @abstractmethod
    def board(self, place: Place) -> Board:
        """Finds the sender."""

    @abstractmethod
    def open(self, place: Place, rank: int) -> None:
        """Finds the data."""

    @abstractmethod
    def full(self, plan: Sequence[Bucket], at: Progress) -> Iterator[tuple[Bucket, Tensor]]:
        """Every bucket, and what it stands in until the next one is asked for."""

    @abstractmethod
    def drop(self) -> None:
        """Lets go of what the data stand in."""


# Memory --------------------------------------------------------------------------------------------------


class MemorySend(SendTransport):
    """Of ``shared_memory`` and ``cuda_ipc``: receivers copy out of the buffers, which they open.

    A full buffer is noted on the board, every receiver copies out of it, waits for its copies and notes that; only then
    is it filled again.

    Args:
        device: of the buffers: the CPU, or the GPU that all ends compute on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_cpu = device.type == "cpu"
        self.bucket_bytes = BUCKET_BYTES["memory" if is_cpu else "cuda_ipc"]
        self._num = NUM_IN_MEMORY if is_cpu else NUM_BUFFERS
        self._rooms: list[tuple[Tensor, Callable[[], Any]]] = []

    def open(self, num_receivers: int) -> tuple[Board, Place]:
        if not self._rooms:
            self._rooms = [_room(self._device, self.bucket_bytes) for _ in range(self._num)]
            # torch counts the users of an exported buffer: one handle for each.
            self._handles = [[handle() for _, handle in self._rooms] for _ in range(num_receivers)]
        board = MemoryBoard()
        return board, {"board": board.path, "handles": self._handles, "bytes": self.bucket_bytes}

    def empty(self, bucket: Bucket, at: Progress) -> Tensor:
        at.wait(bucket.step - self._num)
        return self._rooms[bucket.number % self._num][0]

    def ship(self, bucket: Bucket, data: Tensor, at: Progress) -> None:
        _synchronize(self._device)
        at.note(step=bucket.step)

    def drop(self) -> None:
        self._rooms = []  # a receiver may be reading still: it is not written again, and freed with its last user


class MemoryReceive(ReceiveTransport):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handles: list[Any] = []
        self._buffers: list[Tensor] = []

    def board(self, place: Place) -> Board:
        return MemoryBoard(place["board"])

    def open(self, place: Place, rank: int) -> None:
        handles = place["handles"][rank]
        if handles != self._handles:
            self._buffers = [_opened(self._device, handle, place["bytes"]) for handle in handles]
            self._handles = handles

    def full(self, plan: Sequence[Bucket], at: Progress) -> Iterator[tuple[Bucket, Tensor]]:
        for bucket in plan:
            at.wait(bucket.step)
            yield bucket, self._buffers[bucket.number % len(self._buffers)]

    def drop(self) -> None:
        self._handles, self._buffers = [], []


def _room(device: torch.device, num_bytes: int) -> tuple[Tensor, Callable[[], Any]]:
    """A buffer, and what makes a handle by which one other process opens it."""
    if device.type == "cpu":
        segment = Segment.create(num_bytes)
        return segment.bytes, lambda: segment.path
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    storage: Any = buffer.untyped_storage()
    return buffer, lambda: storage._share_cuda_()[1:]


def _opened(device: torch.device, handle: Any, num_bytes: int) -> Tensor:
    if device.type == "cpu":
        return Segment.open(handle, num_bytes).bytes
    torch.cuda.init()
    storage_type: Any = torch.UntypedStorage
    storage = storage_type._new_shared_cuda(device.index or 0, *handle)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,), (1,))


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

    def __init__(self, place: Place, store: Any, rank: int, device: torch.device, at: Progress) -> None:
        limit, size = timedelta(seconds=place["timeout_s"]), place["size"]
        store.set_timeout(limit)
        self._backend: Any
        try:
            if device.type == "cuda":
                options = c10d.ProcessGroupNCCL.Options()
                options._timeout = _LONG
                self._backend = c10d.ProcessGroupNCCL(store, rank, size, options)
            else:
                # Its threads end with the broadcast they are in, so its limit is little later than ours, which says
                # which end is behind.
                self._backend = c10d.ProcessGroupGloo(store, rank, size, limit + _LATER)
        except RuntimeError as error:
            raise at.broke(error) from error
        self._buffers = [torch.empty(place["bytes"], dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]

    def buffer(self, bucket: Bucket) -> Tensor:
        return self._buffers[bucket.number % NUM_BUFFERS]

    def start(self, bucket: Bucket, at: Progress) -> Callable[[], None]:
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


class CollectiveSend(SendTransport):
    """
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

    def empty(self, bucket: Bucket, at: Progress) -> Tensor:
        if self._group is None:
            self._group = _Group(self._place, self._store, 0, self._device, at)
        if len(self._under_way) == NUM_BUFFERS:
            self._under_way.popleft()()
        return self._group.buffer(bucket)

    def ship(self, bucket: Bucket, data: Tensor, at: Progress) -> None:
        assert self._group is not None
        at.note(step=bucket.step)
        self._under_way.append(self._group.start(bucket, at))

    def finish(self, at: Progress) -> None:
        while self._under_way:
            self._under_way.popleft()()

    def drop(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = self._store = None
        self._under_way.clear()


class CollectiveReceive(ReceiveTransport):
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

    def full(self, plan: Sequence[Bucket], at: Progress) -> Iterator[tuple[Bucket, Tensor]]:
        if self._group is None:
            assert self._place is not None
            self._group = _Group(self._place, self._store, 1 + self._rank, self._device, at)
        before: tuple[Bucket, Callable[[], None]] | None = None
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
