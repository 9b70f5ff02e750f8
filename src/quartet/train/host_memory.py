"""Host memory for what leaves a device: pinned, for quick copies of a GPU's, or files on disk, where memory is short.

Both give one piece of memory, cut into parts of which each has a storage of its own.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quartet.config import UserError
from quartet.models.memory import ALIGNMENT

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every device."""


class PinnedMemory:
    """Host memory that a GPU copies from and to at the full speed of its bus.

    torch's own pinned memory is rounded up to the next power of two, up to twice of what is asked for.

    Raises:
        UserError: there is no CUDA device.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UserError(
                "pinned memory is a matter of CUDA devices",
                found="torch.cuda.is_available() is False",
                remedy="use MappedFiles (offload.to: mapped_files) for a model on the CPU",
            )

    def allocate(self, sizes: Sequence[int]) -> list[Tensor]:
        """Pinned tensors ``uint8 [size]``, each with a storage of its own.

        Raises:
            UserError: the host has no room, or does not let so much be pinned.
        """
        starts, num_bytes = _starts(sizes)
        if not num_bytes:
            return []
        try:
            memory = _Pinned(-1, num_bytes)
            memory.pin()
        except (OSError, RuntimeError) as error:
            raise _no_room(num_bytes, str(error), "free host memory, raise `ulimit -l`, or use MappedFiles") from error
        return _cut(memory, starts, sizes)


class MappedFiles:
    """Memory-mapped files. They have no name from the beginning, so nothing of them outlives the process.

    Args:
        directory: on the file system that takes them; made if it is not there. One in memory (tmpfs) frees nothing.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    def allocate(self, sizes: Sequence[int]) -> list[Tensor]:
        """Tensors ``uint8 [size]`` in one file, each with a storage of its own.

        Raises:
            UserError: the disk is full or not writable.
        """
        starts, num_bytes = _starts(sizes)
        if not num_bytes:
            return []
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory) as file:
                # A full disk is an error here; in a mapping without blocks it would end the process.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                memory = mmap.mmap(file.fileno(), num_bytes)
        except OSError as error:
            remedy = "free some space, or choose a directory on a larger disk"
            raise _no_room(num_bytes, f"{error} in {self.directory}", remedy) from error
        return _cut(memory, starts, sizes)


class _Pinned(mmap.mmap):
    """Memory that is unpinned before it goes, which is when the last tensor in it goes."""

    _address = 0

    def pin(self) -> None:
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        code = int(_cuda().cudaHostRegister(address, len(self), _PORTABLE))
        if code != 0:
            raise RuntimeError(f"cudaHostRegister gave error {code}")
        self._address = address

    def __del__(self) -> None:
        if self._address:
            _cuda().cudaHostUnregister(self._address)


def _cuda() -> Any:
    return torch.cuda.cudart()


def _starts(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each part begins, and the bytes of all."""
    rounded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    *starts, num_bytes = accumulate(rounded, initial=0)
    return starts, num_bytes


def _cut(memory: mmap.mmap, starts: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
    return [
        torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=size)
        for start, size in zip(starts, sizes, strict=True)
    ]


def _no_room(num_bytes: int, found: str, remedy: str) -> UserError:
    return UserError(
        f"no room for {num_bytes / 2**20:.1f} MiB that should leave the device", found=found, remedy=remedy
    )
