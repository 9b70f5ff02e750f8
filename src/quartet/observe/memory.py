"""How much memory this process holds and could have, as the system counts it: measured, not assumed."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch


def held_bytes(device: torch.device) -> int:
    """Bytes in use: on a GPU what torch has given to tensors, else the process's memory that no file stands behind.

    What was freed but not yet given back is given back first.

    Raises:
        OSError: not on Linux, which alone counts this.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    trim = _trim()
    if trim is not None:
        trim(0)
    return _line_of("/proc/self/status", "RssAnon")


def resident_bytes() -> float:
    """Memory of this process that is in RAM now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def peak_resident_bytes() -> int:
    """The most of this process that was in RAM at a time, pages of mapped files included; 0 where no system tells."""
    try:
        return _line_of("/proc/self/status", "VmHWM")
    except OSError:
        return 0


def available_bytes() -> int:
    """What the machine can give to processes without taking from others, as the system estimates it.

    Raises:
        OSError: not on Linux, which alone tells this.
    """
    return _line_of("/proc/meminfo", "MemAvailable")


def total_bytes() -> int:
    """The machine's memory.

    Raises:
        OSError: not on Linux, which alone tells this.
    """
    return _line_of("/proc/meminfo", "MemTotal")


def copy_fits(num_bytes: int) -> bool:
    """Whether a copy of a training state takes at most a quarter of what is available; True where that is unknown.

    The next update begins while it is being written, and needs gradients (a third of the state) and activations.
    """
    try:
        return 4 * num_bytes <= available_bytes()
    except OSError:
        return True


def _line_of(path: str, name: str) -> int:
    for line in Path(path).read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"{path} has no line {name}")


@cache
def _trim() -> Any:
    """The C library's call that gives free memory back to the system, where it has one."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
