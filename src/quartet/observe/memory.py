"""How much memory this process holds and could have, as the system counts it: measured, not assumed.

What a run computes on, for ``run.json``: sums in floating point depend on it in their last bits.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch


def held_bytes(device: torch.device) -> int:
    """Counts the bytes in use: on a GPU what torch has given to tensors, else the process's memory that no file stands
    behind.

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
    """Returns the memory of this process that is in RAM now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def peak_resident_bytes() -> int:
    """Returns the most of this process that was in RAM at a time, pages of mapped files included; 0 where no system
    tells.
    """
    try:
        return _line_of("/proc/self/status", "VmHWM")
    except OSError:
        return 0


def available_bytes() -> int:
    """Returns what the machine can give to processes without taking from others, as the system estimates it.

    Raises:
        OSError: not on Linux, which alone tells this.
    """
    return _line_of("/proc/meminfo", "MemAvailable")


def copy_fits(num_bytes: int) -> bool:
    """Tells whether a copy of a training state takes at most a quarter of what is available; True where none knows.

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
    """Returns the C library's call that gives free memory back to the system, where it has one."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


_UNITS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
"""Instruction sets that decide which kernels run, by the names of /proc/cpuinfo."""


def describe_processor() -> dict[str, Any]:
    """Returns what decides the order of sums: name, instruction sets, torch's choice among them, threads, torch's
    version.
    """
    cpuinfo = _cpuinfo()
    flags = set(cpuinfo.get("flags", cpuinfo.get("Features", "")).split())
    return {
        "name": cpuinfo.get("model name") or platform.processor() or platform.machine(),
        "units": [unit for unit in _UNITS if unit in flags],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _cpuinfo() -> dict[str, str]:
    """Reads what the system says of the first core and of all; empty where it says nothing."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    pairs = (line.partition(":") for line in reversed(lines))  # of equal names the first one's value stays
    return {name.strip(): value.strip() for name, _, value in pairs}
