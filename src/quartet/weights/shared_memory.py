"""Transport ``shared_memory``: one copy per machine, refreshed in place; engines serve from it or copy out of it.

The memory has no name (``memfd_create``): receivers open it as a descriptor of the sender's process, and the kernel
frees it with the last process that holds it. So there is nothing to clean up after a crash, nothing in ``/dev/shm`` to
leak, and no limit of ``/dev/shm`` (64 MB in a container by default). Both ends run on one machine, under one user and
in one process namespace, on Linux.

The weights move in steps of about a megabyte: while the sender copies and digests one, receivers digest the one before,
which is still in the cache that the cores share.

After a sync that failed a receiver may live and serve what it had. So it keeps the memory, untouched, and the next sync
has new memory. A receiver maps it copy-on-write: an engine that writes into its weights harms no other one, and the
next check of digests finds it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quartet.weights.digest import BLOCK_BYTES, Hasher, as_text, bytes_of
from quartet.weights.errors import WeightSyncError
from quartet.weights.manifest import TensorSpec
from quartet.weights.messages import Announcement, Offer
from quartet.weights.progress import SENDER, PageBoard, Progress
from quartet.weights.sink import TensorSink
from quartet.weights.transport import ReceiveTransport, SendTransport

STEP_BYTES = 2 * BLOCK_BYTES
"""Between two notes of a position."""
ALIGNMENT = 64
"""Bytes between the beginnings of tensors: what torch gives its own."""


def layout(specs: Sequence[TensorSpec]) -> tuple[dict[str, int], int]:
    """Where each tensor begins, in bytes, and the bytes of all."""
    offsets, used = {}, 0
    for spec in specs:
        offsets[spec.name] = used
        used += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
    return offsets, max(used, ALIGNMENT)


class Segment:
    """Nameless memory that several processes see.

    Attributes:
        bytes: all of it, flat uint8.
    """

    def __init__(self, descriptor: int, num_bytes: int, *, owner: bool) -> None:
        self.descriptor = descriptor
        self.num_bytes = num_bytes
        access = mmap.ACCESS_WRITE if owner else mmap.ACCESS_COPY
        self.bytes = torch.from_numpy(np.frombuffer(mmap.mmap(descriptor, num_bytes, access=access), dtype=np.uint8))

    @classmethod
    def create(cls, num_bytes: int) -> Segment:
        """
        Raises:
            WeightSyncError: not on Linux, or no memory.
        """
        if not hasattr(os, "memfd_create"):
            raise WeightSyncError(
                "shared memory between processes needs Linux here",
                found=f"no memfd_create on {os.uname().sysname}",
                remedy="use the transport collective or disk",
            )
        # The kernel would hand out page after page until it kills somebody.
        if num_bytes > (available := _available_bytes()):
            raise _no_memory(num_bytes, f"{available / 2**30:.2f} GiB are available")
        descriptor = os.memfd_create("quartet-weights", os.MFD_CLOEXEC)
        try:
            # Reserved now: memory that is not there must fail here, not with a bus error at the first write.
            os.posix_fallocate(descriptor, 0, num_bytes)
            return cls(descriptor, num_bytes, owner=True)
        except OSError as error:
            os.close(descriptor)
            raise _no_memory(num_bytes, str(error)) from error

    def close(self) -> None:
        """The mapping goes with the last tensor that views it."""
        os.close(self.descriptor)

    def tensors(self, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
        offsets, _ = layout(specs)
        return {
            spec.name: self.bytes[offsets[spec.name] :][: spec.num_bytes].view(spec.torch_dtype).view(spec.shape)
            for spec in specs
        }


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("/proc/meminfo has no line MemAvailable")


def _no_memory(num_bytes: int, found: str) -> WeightSyncError:
    return WeightSyncError(
        "there is no shared memory for the weights",
        found=f"{num_bytes / 2**30:.2f} GiB asked for, {found}",
        remedy="free memory on this machine, or use the transport collective or disk",
    )


@dataclass(frozen=True)
class Step:
    """Bytes ``start`` to ``stop`` of the tensor with this index."""

    tensor: int
    start: int
    stop: int


def steps_of(specs: Sequence[TensorSpec]) -> list[Step]:
    """Both ends go through the weights in these steps."""
    return [
        Step(index, at, min(at + STEP_BYTES, spec.num_bytes))
        for index, spec in enumerate(specs)
        for at in range(0, spec.num_bytes, STEP_BYTES)
    ]


class SharedMemorySend(SendTransport):
    """
    Args:
        timeout_s: how long a receiver may stand still.
    """

    kind = "shared_memory"

    def __init__(self, num_receivers: int = 1, *, timeout_s: float = 120.0, hasher: Hasher | None = None) -> None:
        self._num_receivers = num_receivers
        self._timeout_s = timeout_s
        self._hasher = hasher or Hasher()
        self._segment: Segment | None = None
        self._board: PageBoard | None = None
        self._progress: Progress | None = None
        self._offsets: dict[str, int] = {}

    def open(self, specs: Sequence[TensorSpec], version: int) -> Offer:
        offsets, num_bytes = layout(specs)
        if self._segment is None or offsets != self._offsets or self._segment.num_bytes != num_bytes:
            self._free()
            self._segment, self._offsets = Segment.create(num_bytes), offsets
        if self._board is not None:
            self._board.close()
        self._board = PageBoard.create(1 + self._num_receivers)
        others = range(1, 1 + self._num_receivers)
        self._progress = Progress(self._board, SENDER, others, specs, self._timeout_s)
        path = f"/proc/{os.getpid()}/fd/{self._segment.descriptor}"
        return {"path": path, "bytes": num_bytes, "board": self._board.path}

    def send(self, specs: Sequence[TensorSpec], tensors: Iterator[Tensor]) -> list[str]:
        assert self._segment is not None and self._progress is not None
        number, digests = 0, []
        for index, spec in enumerate(specs):
            self._progress.note(tensor=index)
            read, total = bytes_of(next(tensors)), 0
            written = self._segment.bytes[self._offsets[spec.name] :][: spec.num_bytes]
            for at, end in _windows(spec.num_bytes, 0, self._window(read)):
                total += self._hasher.piece(read[at:end], at // BLOCK_BYTES, written[at:end])
                number += -(-(end - at) // STEP_BYTES)
                self._progress.note(step=number)
            digests.append(as_text(total))
        self._progress.wait(number)
        return digests

    def _window(self, data: Tensor) -> int:
        """Bytes that are taken at once: a step for each thread; from a GPU the whole tensor."""
        return self._hasher.threads * STEP_BYTES if data.device.type == "cpu" else max(STEP_BYTES, len(data))

    def fail(self, error: BaseException) -> None:
        if self._progress is not None:
            self._progress.fail(error)
        self._free()

    def close(self) -> None:
        self._free()
        if self._board is not None:
            self._board.close()
            self._board = self._progress = None
        self._hasher.close()

    def _free(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None


def _windows(num_bytes: int, begin: int, size: int) -> Iterator[tuple[int, int]]:
    return ((at, min(at + size, num_bytes)) for at in range(begin, num_bytes, size))


class SharedMemoryReceive(ReceiveTransport):
    kind = "shared_memory"

    def __init__(self, rank: int = 0, *, timeout_s: float = 120.0) -> None:
        self._end = 1 + rank
        self._timeout_s = timeout_s
        self._segment: Segment | None = None
        self._identity: tuple[int, ...] = ()
        self._board: PageBoard | None = None
        self._progress: Progress | None = None

    def open(self, announcement: Announcement, sink: TensorSink) -> None:
        path, num_bytes = str(announcement.offer["path"]), int(announcement.offer["bytes"])
        try:
            board = PageBoard.open(str(announcement.offer["board"]))
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise not_reached(error) from error
        self._close_board()
        self._board = board
        self._progress = Progress(board, self._end, [SENDER], announcement.tensors, self._timeout_s)
        found = os.fstat(descriptor)
        identity = (found.st_dev, found.st_ino)
        if self._segment is not None and identity == self._identity:
            os.close(descriptor)
        else:
            self._free()
            self._segment, self._identity = Segment(descriptor, num_bytes, owner=False), identity

    def receive(self, announcement: Announcement, sink: TensorSink) -> None:
        assert self._segment is not None and self._progress is not None
        specs, steps = announcement.tensors, steps_of(announcement.tensors)
        tensors = self._segment.tensors(specs)
        is_adopted, number = sink.adopt(tensors), 0
        while number < len(steps):
            ready = self._progress.wait(number + 1)
            while number < ready:
                step = steps[number]
                spec = specs[step.tensor]
                # All steps of this tensor that are there: several threads share them.
                number = min(ready, number + -(-(spec.num_bytes - step.start) // STEP_BYTES))
                stop = steps[number - 1].stop // spec.torch_dtype.itemsize
                if not is_adopted:
                    start = step.start // spec.torch_dtype.itemsize
                    sink.write(spec.name, start, tensors[spec.name].view(-1)[start:stop])
                sink.arrived(spec.name, stop)
                self._progress.note(step=number, tensor=steps[min(number, len(steps) - 1)].tensor)

    def fail(self, error: BaseException) -> None:
        if self._progress is not None:
            self._progress.fail(error)
        self._free()

    def close(self) -> None:
        self._free()
        self._close_board()

    def _free(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _close_board(self) -> None:
        if self._board is not None:
            self._board.close()
            self._board = self._progress = None


def not_reached(error: OSError) -> WeightSyncError:
    return WeightSyncError(
        "the sender's shared memory cannot be opened",
        found=str(error),
        remedy="run both ends on one machine, as one user and in one process namespace; between containers "
        "use the transport collective or disk",
    )
