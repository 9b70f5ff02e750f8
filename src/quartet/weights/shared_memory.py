"""Nameless memory that several processes of a machine see.

Made by ``memfd_create``: other processes open it as a descriptor of the process that made it, and the kernel frees it
with the last one that holds it. So there is nothing to clean up after a crash, nothing in ``/dev/shm`` to leak, and no
limit of ``/dev/shm`` (64 MB in a container by default). All run on one machine, under one user and in one process
namespace, on Linux.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quartet.observe.memory import available_bytes
from quartet.weights.errors import WeightSyncError
from quartet.weights.manifest import TensorSpec

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
    """
    Args:
        owner: writes go to all who see it. Who else writes changes a copy of its own.

    Attributes:
        bytes: all of it, flat uint8.
    """

    def __init__(self, descriptor: int, num_bytes: int, *, owner: bool) -> None:
        self.descriptor = descriptor
        self.num_bytes = num_bytes
        access = mmap.ACCESS_WRITE if owner else mmap.ACCESS_COPY
        self.bytes = torch.from_numpy(np.frombuffer(mmap.mmap(descriptor, num_bytes, access=access), dtype=np.uint8))
        self.close = weakref.finalize(self, os.close, descriptor)
        """Nobody can open it any more; the mapping goes with the last tensor that views it."""

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

    @classmethod
    def open(cls, path: str, num_bytes: int) -> Segment:
        """Another process's, by its ``path``.

        Raises:
            WeightSyncError: it is not within reach.
        """
        return cls(open_shared(path, os.O_RDONLY), num_bytes, owner=False)

    @property
    def path(self) -> str:
        return path_of(self.descriptor)

    def tensors(self, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
        offsets, _ = layout(specs)
        return {
            spec.name: self.bytes[offsets[spec.name] :][: spec.num_bytes].view(spec.torch_dtype).view(spec.shape)
            for spec in specs
        }


def path_of(descriptor: int) -> str:
    """By which other processes of this machine open nameless memory."""
    return f"/proc/{os.getpid()}/fd/{descriptor}#{os.fstat(descriptor).st_ino}"


def open_shared(path: str, flags: int) -> int:
    """A descriptor of another process's nameless memory.

    Raises:
        WeightSyncError: it is not within reach.
    """
    name, _, inode = path.partition("#")
    try:
        descriptor = os.open(name, flags | os.O_CLOEXEC)
        if str(os.fstat(descriptor).st_ino) == inode:
            return descriptor
        os.close(descriptor)
        found = f"{name} is another file by now"
    except OSError as error:
        found = str(error)
    raise WeightSyncError(
        "the sender's shared memory cannot be opened",
        found=found,
        remedy="run both ends on one machine, as one user and in one process namespace; between containers "
        "use the transport collective",
    )


def _no_memory(num_bytes: int, found: str) -> WeightSyncError:
    return WeightSyncError(
        "there is no shared memory for the weights",
        found=f"{num_bytes / 2**30:.2f} GiB asked for, {found}",
        remedy="free memory on this machine, or use the transport collective",
    )
