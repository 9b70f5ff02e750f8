"""How much memory this process holds and could have, as the system counts it: measured, not assumed.

What a run computes on, and which equalities to the bit that leaves: for ``run.json``.

Sums in floating point depend on their order, and a library picks the order by the processor, the number of threads and
the sizes. Nothing of that is promised, so it is measured when a run starts, in some milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F


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


def total_bytes() -> int:
    """Returns the machine's memory.

    Raises:
        OSError: not on Linux, which alone tells this.
    """
    return _line_of("/proc/meminfo", "MemTotal")


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
_SHAPES = ((64, 64), (256, 512))
_MOST_ROWS, _MANY_ROWS = 33, 520
_EXACT_ROWS = 16
"""From so many rows on a product must keep a row's bits for ``numerics: exact``."""
_ENGINE_ROWS = 16
"""The rollout engine computes no fewer in either numerics (``quartet.rollout.step_attention``)."""


def processor() -> dict[str, Any]:
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


def bit_equality() -> dict[str, Any]:
    """Returns what was measured, with the present number of threads, and ``remarks``: what does not hold here.

    ``products_repeat``: the same product has the same bits twice. ``rows_keep_bits_from``: the smallest number of rows
    from which on a row's bits do not depend on how many there are; None: they still do with 33 rows.
    """
    return dict(_measured(torch.get_num_threads()))


def record() -> dict[str, Any]:
    """Returns ``processor`` and ``bit_equality`` of ``run.json``."""
    return {"processor": processor(), "bit_equality": bit_equality()}


@cache
@torch.no_grad()
def _measured(threads: int) -> Mapping[str, Any]:
    generator = torch.Generator().manual_seed(0)
    repeats, kept = True, set(range(1, _MOST_ROWS + 1))
    for inputs, outputs in _SHAPES:
        rows = torch.randn(_MANY_ROWS, inputs, generator=generator)
        weight = torch.randn(outputs, inputs, generator=generator)
        many = F.linear(rows, weight)
        repeats &= all(torch.equal(F.linear(rows, weight), many) for _ in range(3))
        # From the end, where what is left over of many rows is computed.
        kept &= {n for n in kept if torch.equal(F.linear(rows[-n:].clone(), weight), many[-n:])}
    first = next((n for n in range(1, _MOST_ROWS + 1) if kept.issuperset(range(n, _MOST_ROWS + 1))), None)
    return {
        "products_repeat": repeats,
        "rows_keep_bits_from": first,
        "remarks": _warnings(threads, repeats, first),
    }


def _warnings(threads: int, repeats: bool, first: int | None) -> list[str]:
    found = []
    if not repeats:
        found.append(
            "the same product has other bits the second time, so no two runs are equal to the bit here: not resumed "
            "ones, not those of other placements"
        )
    if threads > 1:
        found.append("numerics: exact needs threads: 1")
    elif first is None or first > _EXACT_ROWS:
        found.append(f"numerics: exact is refused here: a row's bits depend on the number of rows beyond {_EXACT_ROWS}")
    if first is None or first > _ENGINE_ROWS:
        found.append(
            f"a prompt that the engine computed alone (the canary's, an evaluation's) has other last bits than in "
            f"a batch, since rows keep their bits beyond {_ENGINE_ROWS} only: a resumed run may differ in last bits "
            "where the next step has that prompt, too"
        )
    if first != 1:
        where = f"fewer than {first}" if first is not None else f"{_MOST_ROWS} and more"
        found.append(f"numerics: fast: a token among {where} rows has other last bits than among many")
    return found


def _cpuinfo() -> dict[str, str]:
    """Reads what the system says of the first core and of all; empty where it says nothing."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    pairs = (line.partition(":") for line in reversed(lines))  # of equal names the first one's value stays
    return {name.strip(): value.strip() for name, _, value in pairs}
