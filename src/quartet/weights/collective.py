"""Transport ``collective``: broadcasts of double-buffered buckets in a process group of its own.

The group (gloo for CPU buffers, NCCL for CUDA) is formed in the first sync, from torch's own store, and it is not the
trainer's default group, so nothing of the trainer's waits for it. While one bucket is under way the next is filled.
Every wait watches the positions of the other ends, which stand in the group's store: a broadcast that hangs is given
up with the name of the receiver that is behind. The group is then of no use; the next sync forms another one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from quartet.weights.buckets import NUM_BUFFERS, Bucket, BucketSend, plan_buckets
from quartet.weights.errors import WeightSyncError
from quartet.weights.manifest import TensorSpec
from quartet.weights.progress import StoreBoard, SyncProgress
from quartet.weights.sink import TensorSink
from quartet.weights.transport import Announcement, Offer, ReceiveTransport

_LATER = timedelta(seconds=1)
_LONG = timedelta(days=1)
"""The group's own limit, never reached: waiting is ours. Its error could not say which end is behind."""


class _Group:
    """Rank 0 is the sender. A thin layer over a back end of its own."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        limit = timedelta(seconds=timeout_s)
        store.set_timeout(limit)
        self._backend: Any
        if device.type == "cuda":
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = _LONG
            self._backend = c10d.ProcessGroupNCCL(store, rank, size, options)
        else:
            # Its threads end with the broadcast they are in, so its limit is little later than ours, which says
            # which end is behind.
            self._backend = c10d.ProcessGroupGloo(store, rank, size, limit + _LATER)

    def broadcast(self, buffer: Tensor, progress: SyncProgress) -> Any:
        """Starts a broadcast from rank 0; the result has ``is_completed`` and ``wait``."""
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            return self._backend.broadcast([buffer], options)
        except RuntimeError as error:
            raise progress.broke(error) from error

    def abort(self) -> None:
        if isinstance(self._backend, c10d.ProcessGroupGloo):
            return  # its connections close with it
        self._backend.abort()


def _not_formed(found: str, rank: int | None = None) -> WeightSyncError:
    return WeightSyncError(
        "the group for weight syncs could not be formed",
        found=found,
        remedy="see the log of the other end; between machines, all of them must reach the address of the sender's "
        "default route",
        rank=rank,
    )


def _came(rank: int) -> str:
    return f"receiver {rank}"


_numbers = itertools.count(1)


class CollectiveSend(BucketSend):
    """
    Args:
        timeout_s: how long a receiver may stand still; with gloo also how long one bucket may take.
        device: of the buffers; its type chooses the back end.
        bucket_bytes: of each of the two buffers, on every end.
    """

    kind = "collective"
    _store: Any
    _group: _Group | None = None
    _under_way: dict[int, Any]

    def __init__(self, num_receivers: int = 1, *, bucket_bytes: int = 2**26, **common: Any) -> None:
        super().__init__(num_receivers, **common)
        self._bucket_bytes = bucket_bytes
        self._drop()

    def open(self, specs: Sequence[TensorSpec], version: int) -> Offer:
        size = 1 + self._num_receivers
        if self._store is None:
            limit = timedelta(seconds=self._timeout_s)
            self._store = dist.TCPStore(self._host, 0, size, is_master=True, timeout=limit, wait_for_workers=False)
            self._number = next(_numbers)
        board = StoreBoard(self._store)
        board.clear(size)
        self._watch(board, specs)
        self._under_way = {}
        return {
            "group": self._number,
            "host": self._host,
            "port": self._store.port,
            "size": size,
            "device": self._device.type,
            "bucket_bytes": self._bucket_bytes,
        }

    def send(self, specs: Sequence[TensorSpec], tensors: Iterator[Tensor]) -> list[str]:
        if self._group is None:
            self._form()
        return super().send(specs, tensors)

    def _form(self) -> None:
        try:
            self._group = _Group(self._store, 0, 1 + self._num_receivers, self._device, self._timeout_s)
        except RuntimeError as error:
            away = [rank for rank in range(self._num_receivers) if not self._store.check([_came(rank)])]
            found = f"rank {away[0]} did not come" if away else str(error)
            raise _not_formed(found, away[0] if away else None) from error
        self._buffers = _buffers(self._bucket_bytes, self._device)

    def _ship(self, bucket: Bucket, data: Tensor) -> None:
        assert self._group is not None
        self.progress.note(step=bucket.number + 1)
        self._under_way[bucket.number] = self._group.broadcast(data, self.progress)

    def _wait_until_free(self, number: int) -> None:
        work = self._under_way.pop(number, None)
        if work is not None:
            _finish(work, self.progress, number + 1)

    def _finish(self) -> None:
        for number in sorted(self._under_way):
            self._wait_until_free(number)

    def _drop(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = self._store = self._progress = None
        self._under_way, self._buffers = {}, []


class CollectiveReceive(ReceiveTransport):
    """
    Args:
        timeout_s: how long the sender may stand still; with gloo also how long one bucket may take.
        device: of the buffers, of the same type as the sender's.
    """

    kind = "collective"
    _store: Any
    _group: _Group | None = None
    _offer: Offer | None = None
    _buffers: list[Tensor]

    def open(self, announcement: Announcement, sink: TensorSink) -> None:
        offer = announcement.offer
        if offer["device"] != self._device.type:
            raise WeightSyncError(
                "the two ends of the weight sync are on devices of different types",
                found=f"buffers on {offer['device']}, here on {self._device.type}",
                remedy="place trainer and engines on devices of one type, or use shared_memory",
            )
        if offer != self._offer:
            self._drop()

    def receive(self, announcement: Announcement, sink: TensorSink) -> None:
        offer, specs = announcement.offer, announcement.tensors
        if self._group is None:
            self._form(offer)
        self._watch(StoreBoard(self._store), specs)
        assert self._group is not None
        before: tuple[Bucket, Any] | None = None
        for bucket in plan_buckets(specs, int(offer["bucket_bytes"])):
            # While this one is received the one before is unpacked.
            buffer = self._buffers[bucket.number % NUM_BUFFERS]
            under_way = bucket, self._group.broadcast(buffer[: bucket.num_bytes], self.progress)
            if before is not None:
                self._unpack(*before, sink)
            before = under_way
        if before is not None:
            self._unpack(*before, sink)

    def _form(self, offer: Offer) -> None:
        limit = timedelta(seconds=self._timeout_s)
        host, port, size = offer["host"], offer["port"], offer["size"]
        try:
            self._store = dist.TCPStore(host, port, size, is_master=False, timeout=limit, wait_for_workers=False)
            self._store.set(_came(self._rank), "")
            self._group = _Group(self._store, 1 + self._rank, size, self._device, self._timeout_s)
        except RuntimeError as error:
            raise _not_formed(f"{host}:{port}: {error}") from error
        self._buffers, self._offer = _buffers(int(offer["bucket_bytes"]), self._device), offer

    def _unpack(self, bucket: Bucket, work: Any, sink: TensorSink) -> None:
        _finish(work, self.progress, bucket.number + 1)
        bucket.unpack(self._buffers[bucket.number % NUM_BUFFERS], sink, self.progress)
        self.progress.note(step=bucket.number + 1)

    def _drop(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._offer = self._group = self._store = self._progress = None
        self._buffers = []


def _buffers(num_bytes: int, device: torch.device) -> list[Tensor]:
    return [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]


def _finish(work: Any, progress: SyncProgress, step: int) -> None:
    """Until this broadcast is through.

    Raises:
        WeightSyncError: it is not, and will not be.
    """
    progress.wait(step, work.is_completed)
    try:
        work.wait()
    except RuntimeError as error:
        raise progress.broke(error) from error
