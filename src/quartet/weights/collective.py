"""Transport ``collective``: broadcasts of double-buffered buckets in a process group of its own.

The group (gloo for CPU buffers, NCCL for CUDA) is formed once, in the first sync, after the handshake: a collective
among different torch releases can hang or worse. It is not the trainer's default group, so nothing of the trainer's
waits for it. While one bucket is under way the next is filled. Every wait watches the control connections, too: a
receiver that dies is noticed by its closed connection, and a broadcast that hangs is given up with the name of the
receiver that is behind. The group is then of no use; the next sync forms another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from quartet.weights.buckets import Bucket, Packer, fill, plan_buckets
from quartet.weights.control import Message
from quartet.weights.digest import Hasher
from quartet.weights.errors import WeightSyncError
from quartet.weights.exchange import Exchange, Link, unexpected
from quartet.weights.manifest import Manifest, TensorSpec
from quartet.weights.session import Inlet, Offer, Outlet
from quartet.weights.sink import WeightSink

NUM_BUFFERS = 2
_LONG = timedelta(days=1)
"""The group's own limit, never reached: waiting is ours. Its error could not say who is behind."""


class _Group:
    """Rank 0 is the sender. A thin layer over a back end that belongs to nobody else."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        limit = timedelta(seconds=timeout_s)
        store.set_timeout(limit)
        self._backend: Any
        if device.type == "cuda":
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = _LONG
            self._backend = c10d.ProcessGroupNCCL(store, rank, size, options)
        else:
            # Its threads end with the broadcast they are in, so here the limit is ours as well.
            self._backend = c10d.ProcessGroupGloo(store, rank, size, limit)

    def broadcast(self, buffer: Tensor) -> Any:
        """Starts a broadcast from rank 0; the result has ``is_completed`` and ``wait``."""
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self._backend.broadcast([buffer], options)

    def abort(self) -> None:
        if isinstance(self._backend, c10d.ProcessGroupGloo):
            return  # its connections close with it
        self._backend.abort()


def _came(rank: int) -> str:
    return f"receiver {rank}"


def _not_formed(found: str, rank: int | None = None) -> WeightSyncError:
    return WeightSyncError(
        "the group for weight syncs could not be formed",
        found=found,
        remedy="see the log of the other end; between machines, give the sender a host that all of them can reach",
        rank=rank,
    )


class CollectiveOutlet(Outlet):
    """
    Args:
        device: of the buffers; its type chooses the back end.
        bucket_bytes: of each of the two buffers, on every end.
    """

    kind = "collective"
    same_torch = True

    def __init__(
        self, *, device: torch.device | str = "cpu", bucket_bytes: int = 2**26, hasher: Hasher | None = None
    ) -> None:
        self._device = torch.device(device)
        self._bucket_bytes = bucket_bytes
        self._hasher = hasher or Hasher()
        self._buffers: list[Tensor] = []
        self._under_way: dict[int, Any] = {}
        self._group: _Group | None = None
        self._members = -1

    def open(self, specs: Sequence[TensorSpec], exchange: Exchange) -> Offer:
        self._exchange = exchange
        if self._group is None or self._members != exchange.hub.memberships:
            self._form(exchange)
        if not self._buffers:
            self._buffers = [
                torch.empty(self._bucket_bytes, dtype=torch.uint8, device=self._device) for _ in range(NUM_BUFFERS)
            ]
        self._packer = Packer(plan_buckets(specs, self._bucket_bytes))
        self._under_way = {}
        return {"bucket_bytes": self._bucket_bytes}

    def _form(self, exchange: Exchange) -> None:
        hub, limit = exchange.hub, timedelta(seconds=exchange.hub.timeout_s)
        host, size = hub.address.host, 1 + hub.num_receivers
        store = dist.TCPStore(host, 0, size, is_master=True, timeout=limit, wait_for_workers=False)
        exchange.tell("join", host=host, port=store.port, size=size, device=self._device.type)
        try:
            self._group = _Group(store, 0, size, self._device, hub.timeout_s)
        except RuntimeError as error:
            away = [rank for rank in range(hub.num_receivers) if not store.check([_came(rank)])]
            found = f"rank {away[0]} did not come" if away else str(error)
            raise _not_formed(found, away[0] if away else None) from error
        self._members = hub.memberships
        exchange.wait("joined", doing="the call to form a group")

    def put(self, spec: TensorSpec, tensor: Tensor) -> str:
        for bucket, span, completes in self._packer.spans_of(spec):
            slot = bucket.number % NUM_BUFFERS
            if span is bucket.spans[0]:
                self._wait(bucket.number - NUM_BUFFERS)
            fill(span, tensor, self._buffers[slot])
            if completes:
                self._ship(bucket)
        return self._hasher.digest(tensor)

    def _ship(self, bucket: Bucket) -> None:
        assert self._group is not None
        self._exchange.tell("bucket", number=bucket.number)
        buffer = self._buffers[bucket.number % NUM_BUFFERS]
        try:
            self._under_way[bucket.number] = self._group.broadcast(buffer[: bucket.num_bytes])
        except RuntimeError as error:
            raise self._exchange.broke(error) from error

    def _wait(self, number: int) -> None:
        """Until the bucket's buffer may be used again."""
        work = self._under_way.pop(number, None)
        if work is not None:
            doing = f"bucket {number}"
            self._exchange.until(work.is_completed, behind="taken", number=number, doing=doing)
            try:
                work.wait()
            except RuntimeError as error:
                raise self._exchange.broke(error) from error

    def finish(self, manifest: Manifest) -> None:
        for number in sorted(self._under_way):
            self._wait(number)

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group, self._under_way, self._buffers = None, {}, []

    def close(self) -> None:
        self.abort()
        self._hasher.close()


class CollectiveInlet(Inlet):
    """
    Args:
        device: of the buffers, of the same type as the sender's.
    """

    kind = "collective"
    same_torch = True

    def __init__(self, *, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._group: _Group | None = None
        self._buffers: list[Tensor] = []
        self._under_way: tuple[Bucket, Any] | None = None

    def join(self, message: Message, link: Link) -> None:
        if message["device"] != self._device.type:
            raise unexpected(f"buffers on {message['device']}, here on {self._device.type}")
        self.abort()
        limit = timedelta(seconds=link.timeout_s)
        host, port, size = message["host"], message["port"], message["size"]
        try:
            store = dist.TCPStore(host, port, size, is_master=False, timeout=limit, wait_for_workers=False)
            store.set(_came(link.rank), "")
            self._group = _Group(store, link.rank + 1, size, self._device, link.timeout_s)
        except RuntimeError as error:
            raise _not_formed(f"{host}:{port}: {error}") from error

    def open(self, offer: Offer, specs: Sequence[TensorSpec], sink: WeightSink, link: Link) -> None:
        bucket_bytes = int(offer["bucket_bytes"])
        if not self._buffers or len(self._buffers[0]) != bucket_bytes:
            self._buffers = [
                torch.empty(bucket_bytes, dtype=torch.uint8, device=self._device) for _ in range(NUM_BUFFERS)
            ]
        self._buckets = plan_buckets(specs, bucket_bytes)
        self._link = link

    def landed(self, name: str, sink: WeightSink) -> None:
        pass  # it comes in buckets

    def take(self, number: int, sink: WeightSink) -> int | None:
        """Starts on this bucket, then unpacks the one before: it is received while the other is copied."""
        assert self._group is not None
        bucket, before = self._buckets[number], self._under_way
        buffer = self._buffers[number % NUM_BUFFERS]
        try:
            self._under_way = bucket, self._group.broadcast(buffer[: bucket.num_bytes])
        except RuntimeError as error:
            raise self._link.broke(error) from error
        return None if before is None else self._unpack(*before, sink)

    def _unpack(self, bucket: Bucket, work: Any, sink: WeightSink) -> int:
        self._link.until(work.is_completed, doing=f"to send bucket {bucket.number}")
        try:
            work.wait()
        except RuntimeError as error:
            raise self._link.broke(error) from error
        bucket.unpack(self._buffers[bucket.number % NUM_BUFFERS], sink)
        return bucket.number

    def finish(self, manifest: Manifest, sink: WeightSink) -> None:
        if self._under_way is not None:
            self._unpack(*self._under_way, sink)
            self._under_way = None

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group, self._buffers, self._under_way = None, [], None

    def close(self) -> None:
        self.abort()
