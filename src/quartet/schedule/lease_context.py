"""A role's turn: a lease, and inside of it a span. Everything that computes, really or only on a clock, passes here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from quartet.observe.spans import Span, SpanRecorder
from quartet.schedule.leases import Arbiter, Lease, LeaseMode


@dataclass(frozen=True)
class LeaseContext:
    """Lease and span around a piece of work."""

    arbiter: Arbiter
    recorder: SpanRecorder

    @asynccontextmanager
    async def turn(
        self,
        role: str,
        mode: LeaseMode,
        name: str,
        *,
        step: int | None,
        chunk: int | None = None,
        tokens: int = 0,
        reads: Mapping[str, int | None] | None = None,
        writes: str | None = None,
        works_for: str | None = None,
    ) -> AsyncIterator[tuple[Lease, Span]]:
        """Waits for the lease; the span covers the block alone. Inputs are awaited before, never inside.

        Args:
            works_for: the span's role, where it is one that works with another's parts and so under its leases.
        """
        async with self.arbiter.lease(role, mode, reads=dict(reads or {}), writes=writes) as lease:
            with self.recorder.span(
                name, step=step, role=works_for or role, mode=mode, chunk=chunk, tokens=tokens
            ) as span:
                yield lease, span
