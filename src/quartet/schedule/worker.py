"""A role's turn: a lease, and inside of it a span. Everything that computes, really or only on a clock, passes here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from quartet.observe.spans import Span, SpanRecorder
from quartet.schedule.leases import Arbiter, Lease, Mode

_T = TypeVar("_T")


async def drained(work: Awaitable[_T]) -> _T:
    """Awaits work that goes on elsewhere; who is cancelled meanwhile is held until it has really ended.

    A lease given back earlier would let somebody else in beside it.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    return task.result()


@dataclass(frozen=True)
class Worker:
    """Lease and span around a piece of work."""

    arbiter: Arbiter
    recorder: SpanRecorder

    @asynccontextmanager
    async def turn(
        self,
        role: str,
        mode: Mode,
        name: str,
        *,
        step: int | None,
        chunk: int | None = None,
        tokens: int = 0,
        nbytes: int = 0,
        reads: Mapping[str, int | None] | None = None,
        writes: str | None = None,
    ) -> AsyncIterator[tuple[Lease, Span]]:
        """Waits for the lease; the span covers the block alone. Inputs are awaited before, never inside."""
        async with self.arbiter.lease(role, mode, reads=dict(reads or {}), writes=writes) as lease:
            with self.recorder.span(
                name, step=step, role=role, mode=mode, chunk=chunk, tokens=tokens or None, nbytes=nbytes or None
            ) as span:
                yield lease, span
