"""How far a router's engines have come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineProgress:
    """Tokens of one engine; ``expected`` counts as many as running requests may get at most."""

    name: str
    done: int
    expected: int
    is_out: bool


@dataclass(frozen=True)
class Progress:
    """Tokens since the router last had no work, over all engines; ``waiting`` of them are of requests in the queue."""

    done: int
    expected: int
    waiting: int
    engines: tuple[EngineProgress, ...]
