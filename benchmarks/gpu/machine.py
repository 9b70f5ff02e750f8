"""The machine: what it is, how long things take on it, and the two rates that bound everything else."""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    begun = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begun


def median_seconds(work: Callable[[], object], device: torch.device, *, repeats: int, warm_ups: int = 2) -> float:
    for _ in range(warm_ups):
        work()
    return statistics.median(seconds_of(work, device) for _ in range(repeats))


def peak_flops(device: torch.device) -> float | None:
    """Of dense bf16 products, where the device is known; what a run's MFU is counted against, too."""
    from quartet.models import work

    return work.peak_flops(device, "bf16")


def gemm_flops(device: torch.device, *, smoke: bool) -> float:
    """Measured rate of a bf16 product of random square matrices."""
    size = 128 if smoke else 8192
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / median_seconds(lambda: a @ b, device, repeats=10)


def bandwidth(device: torch.device, *, smoke: bool) -> float:
    """Measured bytes per second of a copy, read and written ones together."""
    source = torch.zeros(2**16 if smoke else 2**31, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source), device, repeats=10)


def description(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    found: dict[str, Any] = {"device": name, "date": datetime.date.today().isoformat()}
    if device.type == "cuda":
        found["memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
        found["cuda"] = torch.version.cuda
    found["python"] = platform.python_version()
    for package in ("torch", "triton", "transformers", "trl"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def peak_memory(device: torch.device) -> int | None:
    """Largest number of bytes allocated since the last call, where the device counts them."""
    if device.type != "cuda":
        return None
    found = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found
