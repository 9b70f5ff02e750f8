"""How much memory this process holds, as the system counts it: what was freed is measured, not assumed."""

from __future__ import annotations

import ctypes
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
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise OSError("/proc/self/status has no line RssAnon")


@cache
def _trim() -> Any:
    """The C library's call that gives free memory back to the system, where it has one."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
