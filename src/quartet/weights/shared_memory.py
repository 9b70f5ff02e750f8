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

import numpy as np
import torch
from torch import Tensor

from quartet.observe.memory import available_bytes
from quartet.weights.digest import BLOCK_BYTES, as_text, bytes_of, piece_digest
from quartet.weights.errors import WeightSyncError
from quartet.weights.manifest import TensorSpec
from quartet.weights.progress import SharedMemoryBoard, open_shared, path_of
from quartet.weights.sink import TensorSink
from quartet.weights.transport import Announcement, Offer, ReceiveTransport, SendTransport

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
                remedy="use the transport collective",
            )
        # The kernel would hand out page after page until it kills a process.
        if num_bytes > (available := available_bytes()):
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


def num_steps(num_bytes: int) -> int:
    """Both ends go through each tensor in as many steps."""
    return -(-num_bytes // STEP_BYTES)


def _no_memory(num_bytes: int, found: str) -> WeightSyncError:
    return WeightSyncError(
        "there is no shared memory for the weights",
        found=f"{num_bytes / 2**30:.2f} GiB asked for, {found}",
        remedy="free memory on this machine, or use the transport collective",
    )


class SharedMemorySend(SendTransport):
    kind = "shared_memory"
    _segment: Segment | None = None
    _offsets: dict[str, int] | None = None

    def open(self, specs: Sequence[TensorSpec], version: int) -> Offer:
        offsets, num_bytes = layout(specs)
        if self._segment is None or offsets != self._offsets or self._segment.num_bytes != num_bytes:
            self._drop()
            self._segment, self._offsets = Segment.create(num_bytes), offsets
        board = SharedMemoryBoard.create(1 + self._num_receivers)
        self._watch(board, specs)
        return {"path": path_of(self._segment.descriptor), "bytes": num_bytes, "board": board.path}

    def send(self, specs: Sequence[TensorSpec], tensors: Iterator[Tensor]) -> list[str]:
        assert self._segment is not None and self._offsets is not None
        number, digests = 0, []
        for spec in specs:
            self.progress.note(tensor=spec.name)
            read, total = bytes_of(next(tensors)), 0
            written = self._segment.bytes[self._offsets[spec.name] :][: spec.num_bytes]
            # A step for each thread at once; from a GPU the whole tensor.
            size = torch.get_num_threads() * STEP_BYTES if read.device.type == "cpu" else max(STEP_BYTES, len(read))
            for at in range(0, spec.num_bytes, size):
                piece = slice(at, at + size)
                total += piece_digest(read[piece], at // BLOCK_BYTES, written[piece])
                number += num_steps(len(read[piece]))
                self.progress.note(step=number)
            digests.append(as_text(total))
        self.progress.wait(number)
        return digests

    def _drop(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None


class SharedMemoryReceive(ReceiveTransport):
    kind = "shared_memory"
    _segment: Segment | None = None
    _identity: tuple[int, ...] = ()

    def open(self, announcement: Announcement, sink: TensorSink) -> None:
        offer = announcement.offer
        self._watch(SharedMemoryBoard.open(offer["board"]), announcement.tensors)
        descriptor = open_shared(offer["path"], os.O_RDONLY)
        found = os.fstat(descriptor)
        identity = (found.st_dev, found.st_ino)
        if self._segment is not None and identity == self._identity:
            os.close(descriptor)
        else:
            self._drop()
            self._segment, self._identity = Segment(descriptor, int(offer["bytes"]), owner=False), identity

    def receive(self, announcement: Announcement, sink: TensorSink) -> None:
        assert self._segment is not None
        tensors = self._segment.tensors(announcement.tensors)
        is_adopted, number, ready = sink.adopt(tensors), 0, 0
        for spec in announcement.tensors:
            first, last = number, number + num_steps(spec.num_bytes)
            while number < last:
                self.progress.note(step=number, tensor=spec.name)
                if ready == number:
                    ready = self.progress.wait(number + 1)
                # All steps of this tensor that are there: several threads share them.
                start, number = number - first, min(ready, last)
                begin, end = (step * STEP_BYTES // spec.torch_dtype.itemsize for step in (start, number - first))
                end = min(end, spec.num_elements)
                if is_adopted:
                    sink.arrived(spec.name, end)
                else:
                    sink.write(spec.name, begin, tensors[spec.name].view(-1)[begin:end])
        self.progress.note(step=number)

    def _drop(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None
