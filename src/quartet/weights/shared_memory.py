"""Transport ``shared_memory``: one copy per machine, refreshed in place; engines serve from it or copy out of it.

The memory has no name (``memfd_create``): receivers open it as a descriptor of the sender's process, and the kernel
frees it with the last process that holds it. So there is nothing to clean up after a crash, nothing in ``/dev/shm`` to
leak, and no limit of ``/dev/shm`` (64 MB in a container by default). Both ends run on one machine, under one user and
in one process namespace, on Linux.

A receiver that was given up on may live and serve what it had. So it keeps the memory, untouched, and the others get a
new one in the next sync.

A receiver maps it copy-on-write: an engine that writes into its weights harms nobody else, and the next check of
digests finds it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quartet.weights.digest import Hasher
from quartet.weights.errors import WeightSyncError
from quartet.weights.exchange import Exchange, Link
from quartet.weights.manifest import Manifest, TensorSpec
from quartet.weights.session import Inlet, Offer, Outlet
from quartet.weights.sink import WeightSink

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


class SharedMemoryOutlet(Outlet):
    kind = "shared_memory"

    def __init__(self, *, hasher: Hasher | None = None) -> None:
        self._hasher = hasher or Hasher()
        self._segment: Segment | None = None
        self._offsets: dict[str, int] = {}
        self._losses = 0

    def open(self, specs: Sequence[TensorSpec], exchange: Exchange) -> Offer:
        offsets, num_bytes = layout(specs)
        fits = self._segment is not None and offsets == self._offsets and self._segment.num_bytes == num_bytes
        if not fits or self._losses != exchange.hub.losses:
            self._free()
            self._segment, self._offsets = Segment.create(num_bytes), offsets
            self._losses = exchange.hub.losses
        assert self._segment is not None
        path = f"/proc/{os.getpid()}/fd/{self._segment.descriptor}"
        return {"path": path, "bytes": num_bytes, "offsets": [offsets[spec.name] for spec in specs]}

    def put(self, spec: TensorSpec, tensor: Tensor) -> str:
        assert self._segment is not None
        start = self._offsets[spec.name]
        return self._hasher.copy(tensor, self._segment.bytes[start : start + spec.num_bytes])

    def finish(self, manifest: Manifest) -> None:
        pass

    def abort(self) -> None:
        pass  # the next sync fills all of it

    def close(self) -> None:
        self._free()
        self._hasher.close()

    def _free(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None


class SharedMemoryInlet(Inlet):
    kind = "shared_memory"

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self._identity: tuple[int, ...] = ()
        self._tensors: dict[str, Tensor] = {}
        self._adopted = False

    def open(self, offer: Offer, specs: Sequence[TensorSpec], sink: WeightSink, link: Link) -> None:
        path, num_bytes = str(offer["path"]), int(offer["bytes"])
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise WeightSyncError(
                "the sender's shared memory cannot be opened",
                found=str(error),
                remedy="run both ends on one machine, as one user and in one process namespace; between containers "
                "use the transport collective or disk",
            ) from error
        found = os.fstat(descriptor)
        identity = (found.st_dev, found.st_ino)
        if self._segment is not None and identity == self._identity:
            os.close(descriptor)
        else:
            self.abort()
            self._segment, self._identity = Segment(descriptor, num_bytes, owner=False), identity
        self._tensors = self._segment.tensors(specs)
        self._adopted = sink.adopt(self._tensors)

    def landed(self, name: str, sink: WeightSink) -> None:
        if not self._adopted:
            sink.write(name, 0, self._tensors[name].view(-1))
        sink.arrived(name)

    def finish(self, manifest: Manifest, sink: WeightSink) -> None:
        self._tensors = {}

    def abort(self) -> None:
        self._tensors = {}
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def close(self) -> None:
        self.abort()
