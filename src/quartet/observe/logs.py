"""Python's logging in every process of a run: the logger ``quartet``, with role and rank in each record.

A process that is started with another interpreter, or as an engine, takes all three from the variable
``QUARTET_LOG=level:role:rank``, which ``quartet/__init__.py`` looks for.
"""

from __future__ import annotations

import logging
import os
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


def own_rank() -> int:
    """The rank in this process's records; 0 before ``set_up_logging``."""
    handlers = logging.getLogger("quartet").handlers
    return next((place.rank for h in handlers for place in h.filters if isinstance(place, _Place)), 0)


def logging_variables(role: str, rank: int = 0) -> dict[str, str]:
    """For the environment of a process that this one starts: the present level, and the other's role and rank."""
    level = logging.getLevelName(logging.getLogger("quartet").getEffectiveLevel()).lower()
    return {VARIABLE: f"{level}:{role}:{rank}"}


def set_up_from_environment(stream: TextIO | None = None) -> None:
    """As ``logging_variables`` of the process that started this one says; ``stream`` as of ``set_up_logging``."""
    level, role, rank = os.environ[VARIABLE].rsplit(":", 2)
    set_up_logging(level, role, int(rank), stream)
