"""Transport ``cuda_ipc``: processes that share a GPU; flat buckets whose memory the receivers open by handle.

Two buffers live as long as the sender. A full one is noted on the board, every receiver copies out of it on its own
stream, waits for its copies and notes that; only then is the buffer filled again. A note that comes before its copies
are through is the well-known race of this way: here it comes after.

What the handles are is behind ``CudaHandles``; everything else runs, and is tested, without a GPU.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quartet.weights.buckets import NUM_BUFFERS, Bucket, BucketSend, plan_buckets
from quartet.weights.errors import WeightSyncError
from quartet.weights.manifest import TensorSpec
from quartet.weights.progress import SharedMemoryBoard
from quartet.weights.sink import TensorSink
from quartet.weights.transport import Announcement, Offer, ReceiveTransport


class CudaHandles:
    """How one process's memory is found by another: CUDA inter-process handles as torch makes them.

    Needs the same GPU in both processes, whatever its index.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._device = torch.device("cuda", torch.device(device).index or 0)

    def allocate(self, num_bytes: int) -> Tensor:
        """A buffer that can be exported, flat uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def export(self, buffer: Tensor) -> Mapping[str, Any]:
        """JSON that opens ``buffer`` in another process."""
        storage: Any = buffer.untyped_storage()
        _, *parts = storage._share_cuda_()
        encoded = [base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in parts]
        return {"gpu": self._uuid(), "parts": encoded, "bytes": buffer.numel(), "offset": buffer.storage_offset()}

    def open(self, handle: Mapping[str, Any]) -> Tensor:
        """
        Raises:
            WeightSyncError: it is not within reach of this process.
        """
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
        """Returns when all copies into and out of buffers are through."""
        torch.cuda.synchronize(self._device)

    def _uuid(self) -> str:
        return str(torch.cuda.get_device_properties(self._device).uuid)


class CudaIpcSend(BucketSend):
    """
    Args:
        bucket_bytes: of each of the two buffers, of which the GPU holds one set for all receivers.
    """

    kind = "cuda_ipc"
    _exported: dict[str, list[Mapping[str, Any]]]

    def __init__(
        self,
        num_receivers: int = 1,
        *,
        handles: CudaHandles | None = None,
        bucket_bytes: int = 2**28,
        **common: Any,
    ) -> None:
        super().__init__(num_receivers, **common)
        self._handles = handles or CudaHandles(self._device)
        self._bucket_bytes = bucket_bytes
        self._drop()

    def open(self, specs: Sequence[TensorSpec], version: int) -> Offer:
        if not self._buffers:
            self._buffers = [self._handles.allocate(self._bucket_bytes) for _ in range(NUM_BUFFERS)]
            # torch counts the users of an exported buffer: one handle for each.
            ranks = range(self._num_receivers)
            self._exported = {str(rank): [self._handles.export(b) for b in self._buffers] for rank in ranks}
        board = SharedMemoryBoard.create(1 + self._num_receivers)
        self._watch(board, specs)
        return {"bucket_bytes": self._bucket_bytes, "buffers": self._exported, "board": board.path}

    def _wait_until_free(self, number: int) -> None:
        self.progress.wait(number + 1)

    def _ship(self, bucket: Bucket, data: Tensor) -> None:
        self._handles.synchronize()
        self.progress.note(step=bucket.number + 1)

    def _drop(self) -> None:
        # A receiver may be reading still: these buffers are not written again, torch frees them with their last user.
        self._buffers = []
        self._exported = {}


class CudaIpcReceive(ReceiveTransport):
    kind = "cuda_ipc"
    _offered: list[Mapping[str, Any]]
    _buffers: list[Tensor]

    def __init__(self, rank: int = 0, *, handles: CudaHandles | None = None, **common: Any) -> None:
        super().__init__(rank, **common)
        self._handles = handles or CudaHandles(self._device)
        self._drop()

    def open(self, announcement: Announcement, sink: TensorSink) -> None:
        offer = announcement.offer
        self._watch(SharedMemoryBoard.open(offer["board"]), announcement.tensors)
        offered = offer["buffers"][str(self._rank)]
        if offered != self._offered:
            self._buffers = [self._handles.open(handle) for handle in offered]
            self._offered = offered

    def receive(self, announcement: Announcement, sink: TensorSink) -> None:
        for bucket in plan_buckets(announcement.tensors, int(announcement.offer["bucket_bytes"])):
            self.progress.wait(bucket.number + 1)
            bucket.unpack(self._buffers[bucket.number % NUM_BUFFERS], sink, self.progress)
            self._handles.synchronize()
            self.progress.note(step=bucket.number + 1)

    def _drop(self) -> None:
        self._offered, self._buffers = [], []
