"""The threads of OpenMP: every thread that computes has a pool of its own, whose threads wait for each other."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache

WAITING = {"GOMP_SPINCOUNT": "1000"}
"""Of GNU's runtime: about 0.01 ms of spinning before a thread that waits sleeps, instead of 3 ms."""
_HARD = 2
"""``omp_pause_hard``: nothing is kept."""


def share_cores() -> None:
    """Has threads that wait give their core away, unless the environment says how they wait; before torch is loaded.

    Threads of small models wait some thousand times a second. Spinning is quickest while each has a core; beside others
    the one that has none keeps the rest spinning for whole time slices (``benchmarks/busy.py``). Results do not depend
    on it. Intel's and LLVM's runtimes do not read this.
    """
    if not {"OMP_WAIT_POLICY", *WAITING} & os.environ.keys():
        os.environ.update(WAITING)


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
    import torch  # late: what ``share_cores`` sets is read when it is loaded

    runtime = ctypes.CDLL(torch._C.__file__)  # looks through the libraries that torch was linked with
    if hasattr(runtime, "__kmpc_fork_call"):  # Intel's and LLVM's
        return None
    found: Callable[[int], int] | None = getattr(runtime, "omp_pause_resource_all", None)  # OpenMP 5.0
    return found
