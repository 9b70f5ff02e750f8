"""What every process of a run sets up before it computes: Python's logging, with role and rank, and OpenMP's threads.

A process that is started with another interpreter, or as an engine, takes the level, role and rank of its log from the
variable ``QUARTET_LOG=level:role:rank``, which ``quartet/__init__.py`` looks for. Every thread that computes has a pool
of OpenMP's threads of its own, whose threads wait for each other.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from functools import cache
from typing import TextIO

VARIABLE = "QUARTET_LOG"
_FORMAT = "%(asctime)s %(levelname)s [%(role)s %(rank)s] %(name)s: %(message)s"


class _Place(logging.Filter):
    """Adds the process's role and rank to records."""

    def __init__(self, role: str, rank: int) -> None:
        super().__init__()
        self._role, self.rank = role, rank

    def filter(self, record: logging.LogRecord) -> bool:
        record.role, record.rank = self._role, self.rank
        return True


def set_up_logging(level: str, role: str, rank: int = 0, stream: TextIO | None = None) -> None:
    """Has records of ``quartet`` and below written to stderr from ``level`` on. The root and loggers of libraries stay
    as they are.

    Args:
        level: debug, info, warning or error.
        role: of this process: ``driver``, ``actor``, ``vllm engine 0``.
        rank: among those of its role.
        stream: in the place of stderr.
    """
    logger = logging.getLogger("quartet")
    logger.setLevel(level.upper())
    logger.propagate = False
    for handler in [h for h in logger.handlers if any(isinstance(f, _Place) for f in h.filters)]:
        logger.removeHandler(handler)  # of an earlier run in this process
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(_FORMAT))
    handler.addFilter(_Place(role, rank))
    logger.addHandler(handler)


def log_rank() -> int:
    """Returns the rank in this process's records; 0 before ``set_up_logging``."""
    handlers = logging.getLogger("quartet").handlers
    return next((place.rank for h in handlers for place in h.filters if isinstance(place, _Place)), 0)


def logging_variables(role: str, rank: int = 0) -> dict[str, str]:
    """Makes variables for the environment of a process that this one starts: the present level, and the other's role
    and rank.
    """
    level = logging.getLevelName(logging.getLogger("quartet").getEffectiveLevel()).lower()
    return {VARIABLE: f"{level}:{role}:{rank}"}


def set_up_from_environment(stream: TextIO | None = None) -> None:
    """Sets up logging as ``logging_variables`` of the process that started this one says; ``stream`` as of
    ``set_up_logging``.
    """
    level, role, rank = os.environ[VARIABLE].rsplit(":", 2)
    set_up_logging(level, role, int(rank), stream)


WAITING = {"GOMP_SPINCOUNT": "1000"}
"""Of GNU's runtime: about 0.01 ms of spinning before a thread that waits sleeps, instead of 3 ms."""
_HARD = 2
"""``omp_pause_hard``: nothing is kept."""


def yield_cores_while_waiting() -> None:
    """Has threads that wait give their core away, unless the environment says how they wait; before torch is loaded.

    Threads of small models wait some thousand times a second. Spinning is quickest while each has a core; beside others
    the one that has none keeps the rest spinning for whole time slices (``benchmarks/busy.py``). Results do not depend
    on it. Intel's and LLVM's runtimes do not read this.
    """
    if not {"OMP_WAIT_POLICY", *WAITING} & os.environ.keys():
        os.environ.update(WAITING)


def end_thread_pool() -> None:
    """Ends the calling thread's pool, if it has one; its next parallel computation starts another (0.1 ms).

    GNU's runtime counts the threads of all pools of a process. With more than there are cores it lets threads sleep at
    every barrier instead of spinning: what takes 0.35 s with one pool takes 0.55 s beside a second, idle one (two
    threads, two cores; ``benchmarks/compute_thread.py``). Other runtimes, Intel's and LLVM's, are left as they are.
    """
    if (pause := _pause()) is not None:
        pause(_HARD)


@cache
def _pause() -> Callable[[int], int] | None:
    import torch  # noqa: F401 - late: what ``yield_cores_while_waiting`` sets is read when it is loaded

    runtime = ctypes.CDLL(None)  # looks through what is loaded for all: torch loads its runtime so
    if hasattr(runtime, "__kmpc_fork_call"):  # Intel's and LLVM's
        return None
    found: Callable[[int], int] | None = getattr(runtime, "omp_pause_resource_all", None)  # OpenMP 5.0
    return found
