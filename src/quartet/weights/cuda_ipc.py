"""Transport ``cuda_ipc``: processes that share a GPU; flat buckets whose memory the receivers open by handle.

Two buffers live as long as the sender. A full one is announced with its handle, every receiver copies out of it on
its own stream, waits for the copies and confirms; only then is the buffer filled again. An answer that comes before
its copies are through is the well-known race of this way: the confirmation here comes after.

What the handles are is behind ``Handles``; everything else runs, and is tested, without a GPU.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from quartet.weights.buckets import Bucket, Packer, fill, plan_buckets
from quartet.weights.digest import Hasher
from quartet.weights.errors import WeightSyncError
from quartet.weights.exchange import Exchange, Link
from quartet.weights.manifest import Manifest, TensorSpec
from quartet.weights.session import Inlet, Offer, Outlet
from quartet.weights.sink import WeightSink

NUM_BUFFERS = 2


class Handles(Protocol):
    """How one process's memory is found by another."""

    def allocate(self, num_bytes: int) -> Tensor:
        """A buffer that can be exported, flat uint8."""

    def export(self, buffer: Tensor) -> Mapping[str, Any]:
        """JSON that opens ``buffer`` in another process."""

    def open(self, handle: Mapping[str, Any]) -> Tensor:
        """
        Raises:
            WeightSyncError: it is not within reach of this process.
        """

    def synchronize(self) -> None:
        """Returns when all copies into and out of buffers are through."""


class CudaHandles:
    """CUDA inter-process handles as torch makes them. Needs the same GPU in both processes, whatever its index."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._device = torch.device("cuda", torch.device(device).index or 0)

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def export(self, buffer: Tensor) -> Mapping[str, Any]:
        storage: Any = buffer.untyped_storage()
        _, *parts = storage._share_cuda_()
        encoded = [base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in parts]
        return {"gpu": self._uuid(), "parts": encoded, "bytes": buffer.numel(), "offset": buffer.storage_offset()}

    def open(self, handle: Mapping[str, Any]) -> Tensor:
        if handle["gpu"] != self._uuid():
            raise WeightSyncError(
                "the sender's buffers are on another GPU",
                found=f"{handle['gpu']}, here {self._uuid()}",
                remedy="use the transport collective between GPUs, or give both processes the same one",
            )
        parts = [base64.b64decode(part) if isinstance(part, str) else part for part in handle["parts"]]
        torch.cuda.init()
        storage_type: Any = torch.UntypedStorage
        storage = storage_type._new_shared_cuda(self._device.index, *parts)
        buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
        return buffer.set_(storage, int(handle["offset"]), (int(handle["bytes"]),), (1,))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def _uuid(self) -> str:
        return str(torch.cuda.get_device_properties(self._device).uuid)


class CudaIpcOutlet(Outlet):
    """
    Args:
        bucket_bytes: of each of the two buffers, of which the GPU holds one set for all receivers.
    """

    kind = "cuda_ipc"
    same_torch = True

    def __init__(
        self, handles: Handles | None = None, *, bucket_bytes: int = 2**28, hasher: Hasher | None = None
    ) -> None:
        self._handles = handles or CudaHandles()
        self._bucket_bytes = bucket_bytes
        self._hasher = hasher or Hasher()
        self._buffers: list[Tensor] = []
        self._exported: dict[str, list[Mapping[str, Any]]] = {}
        self._members = -1

    def open(self, specs: Sequence[TensorSpec], exchange: Exchange) -> Offer:
        self._exchange = exchange
        if not self._buffers:
            self._buffers = [self._handles.allocate(self._bucket_bytes) for _ in range(NUM_BUFFERS)]
            self._exported = {}
        if not self._exported or self._members != exchange.hub.memberships:
            # torch counts the users of an exported buffer: one handle for each.
            ranks = range(exchange.hub.num_receivers)
            self._exported = {str(rank): [self._handles.export(b) for b in self._buffers] for rank in ranks}
            self._members = exchange.hub.memberships
        self._packer = Packer(plan_buckets(specs, self._bucket_bytes))
        return {"bucket_bytes": self._bucket_bytes, "buffers": self._exported}

    def put(self, spec: TensorSpec, tensor: Tensor) -> str:
        for bucket, span, completes in self._packer.spans_of(spec):
            if span is bucket.spans[0] and bucket.number >= NUM_BUFFERS:
                before = bucket.number - NUM_BUFFERS
                self._exchange.wait("taken", before, doing=f"bucket {before}")
            fill(span, tensor, self._buffers[bucket.number % NUM_BUFFERS])
            if completes:
                self._handles.synchronize()
                self._exchange.tell("bucket", number=bucket.number)
        return self._hasher.digest(tensor)

    def finish(self, manifest: Manifest) -> None:
        pass

    def abort(self) -> None:
        # A receiver may be reading still: these buffers are not written again, torch frees them with their last user.
        self._buffers, self._exported = [], {}

    def close(self) -> None:
        self.abort()
        self._hasher.close()


class CudaIpcInlet(Inlet):
    kind = "cuda_ipc"
    same_torch = True

    def __init__(self, handles: Handles | None = None) -> None:
        self._handles = handles or CudaHandles()
        self._offered: list[Mapping[str, Any]] = []
        self._buffers: list[Tensor] = []
        self._buckets: tuple[Bucket, ...] = ()

    def open(self, offer: Offer, specs: Sequence[TensorSpec], sink: WeightSink, link: Link) -> None:
        offered = offer["buffers"][str(link.rank)]
        if offered != self._offered:
            self._buffers = [self._handles.open(handle) for handle in offered]
            self._offered = offered
        self._buckets = plan_buckets(specs, int(offer["bucket_bytes"]))

    def landed(self, name: str, sink: WeightSink) -> None:
        pass  # it comes in buckets

    def take(self, number: int, sink: WeightSink) -> int | None:
        bucket = self._buckets[number]
        bucket.unpack(self._buffers[number % NUM_BUFFERS], sink)
        self._handles.synchronize()
        return number

    def finish(self, manifest: Manifest, sink: WeightSink) -> None:
        pass

    def abort(self) -> None:
        self._offered, self._buffers = [], []

    def close(self) -> None:
        self.abort()
