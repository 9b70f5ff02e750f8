"""Transport ``cuda_ipc``: processes that share a GPU; flat buckets whose memory the receivers open by handle.

Two buffers live as long as the sender. A full one is noted on the board, every receiver copies out of it on its own
stream, waits for its copies and notes that; only then is the buffer filled again. A note that comes before its copies
are through is the well-known race of this way: here it comes after.

What the handles are is behind ``Handles``; everything else runs, and is tested, without a GPU.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from quartet.weights.buckets import Packer, fill, plan_buckets
from quartet.weights.digest import Hasher
from quartet.weights.errors import WeightSyncError
from quartet.weights.manifest import TensorSpec
from quartet.weights.messages import Announcement, Offer
from quartet.weights.progress import SENDER, PageBoard, Progress
from quartet.weights.shared_memory import not_reached
from quartet.weights.sink import TensorSink
from quartet.weights.transport import ReceiveTransport, SendTransport

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


class CudaIpcSend(SendTransport):
    """
    Args:
        timeout_s: how long a receiver may stand still.
        bucket_bytes: of each of the two buffers, of which the GPU holds one set for all receivers.
    """

    kind = "cuda_ipc"

    def __init__(
        self,
        num_receivers: int = 1,
        *,
        timeout_s: float = 120.0,
        handles: Handles | None = None,
        bucket_bytes: int = 2**28,
        hasher: Hasher | None = None,
    ) -> None:
        self._num_receivers = num_receivers
        self._timeout_s = timeout_s
        self._handles = handles or CudaHandles()
        self._bucket_bytes = bucket_bytes
        self._hasher = hasher or Hasher()
        self._buffers: list[Tensor] = []
        self._exported: dict[str, list[Mapping[str, Any]]] = {}
        self._board: PageBoard | None = None
        self._progress: Progress | None = None

    def open(self, specs: Sequence[TensorSpec], version: int) -> Offer:
        if not self._buffers:
            self._buffers = [self._handles.allocate(self._bucket_bytes) for _ in range(NUM_BUFFERS)]
            # torch counts the users of an exported buffer: one handle for each.
            ranks = range(self._num_receivers)
            self._exported = {str(rank): [self._handles.export(b) for b in self._buffers] for rank in ranks}
        if self._board is not None:
            self._board.close()
        self._board = PageBoard.create(1 + self._num_receivers)
        others = range(1, 1 + self._num_receivers)
        self._progress = Progress(self._board, SENDER, others, specs, self._timeout_s)
        return {"bucket_bytes": self._bucket_bytes, "buffers": self._exported, "board": self._board.path}

    def send(self, specs: Sequence[TensorSpec], tensors: Iterator[Tensor]) -> list[str]:
        assert self._progress is not None
        buckets, digests = plan_buckets(specs, self._bucket_bytes), []
        packer = Packer(buckets)
        for index, spec in enumerate(specs):
            self._progress.note(tensor=index)
            tensor = next(tensors)
            for bucket, span, completes in packer.spans_of(spec):
                if span is bucket.spans[0]:
                    self._progress.wait(bucket.number + 1 - NUM_BUFFERS)
                fill(span, tensor, self._buffers[bucket.number % NUM_BUFFERS])
                if completes:
                    self._handles.synchronize()
                    self._progress.note(step=bucket.number + 1)
            digests.append(self._hasher.digest(tensor))
        self._progress.wait(len(buckets))
        return digests

    def fail(self, error: BaseException) -> None:
        if self._progress is not None:
            self._progress.fail(error)
        # A receiver may be reading still: these buffers are not written again, torch frees them with their last user.
        self._buffers, self._exported = [], {}

    def close(self) -> None:
        self._buffers, self._exported = [], {}
        if self._board is not None:
            self._board.close()
            self._board = self._progress = None
        self._hasher.close()


class CudaIpcReceive(ReceiveTransport):
    kind = "cuda_ipc"

    def __init__(self, rank: int = 0, *, timeout_s: float = 120.0, handles: Handles | None = None) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._handles = handles or CudaHandles()
        self._offered: list[Mapping[str, Any]] = []
        self._buffers: list[Tensor] = []
        self._board: PageBoard | None = None
        self._progress: Progress | None = None

    def open(self, announcement: Announcement, sink: TensorSink) -> None:
        offer = announcement.offer
        try:
            board = PageBoard.open(str(offer["board"]))
        except OSError as error:
            raise not_reached(error) from error
        self._close_board()
        self._board = board
        self._progress = Progress(board, 1 + self._rank, [SENDER], announcement.tensors, self._timeout_s)
        offered = offer["buffers"][str(self._rank)]
        if offered != self._offered:
            self._buffers = [self._handles.open(handle) for handle in offered]
            self._offered = offered

    def receive(self, announcement: Announcement, sink: TensorSink) -> None:
        assert self._progress is not None
        index = {spec.name: number for number, spec in enumerate(announcement.tensors)}
        for bucket in plan_buckets(announcement.tensors, int(announcement.offer["bucket_bytes"])):
            self._progress.wait(bucket.number + 1)
            bucket.unpack(self._buffers[bucket.number % NUM_BUFFERS], sink, self._progress, index)
            self._handles.synchronize()
            self._progress.note(step=bucket.number + 1)

    def fail(self, error: BaseException) -> None:
        if self._progress is not None:
            self._progress.fail(error)
        self._offered, self._buffers = [], []

    def close(self) -> None:
        self._offered, self._buffers = [], []
        self._close_board()

    def _close_board(self) -> None:
        if self._board is not None:
            self._board.close()
            self._board = self._progress = None
