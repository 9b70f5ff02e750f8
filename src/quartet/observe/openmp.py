"""The threads of OpenMP, of which every thread that computes has a pool of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

_HARD = 2
"""``omp_pause_hard``: nothing is kept."""


def end_pool() -> None:
    """Ends the calling thread's pool, if it has one; its next parallel computation starts another (0.1 ms).

    GNU's runtime counts the threads of all pools of a process. With more than there are cores it lets threads sleep at
    every barrier instead of spinning: what takes 0.35 s with one pool takes 0.55 s beside a second, idle one (two
    threads, two cores; ``benchmarks/compute_thread.py``). Other runtimes, Intel's and LLVM's, are left as they are.
    """
    if (pause := _pause()) is not None:
        pause(_HARD)


@cache
def _pause() -> Callable[[int], int] | None:
    runtime = ctypes.CDLL(torch._C.__file__)  # looks through the libraries that torch was linked with
    if hasattr(runtime, "__kmpc_fork_call"):  # Intel's and LLVM's
        return None
    found: Callable[[int], int] | None = getattr(runtime, "omp_pause_resource_all", None)  # OpenMP 5.0
    return found
