"""Calls in flight: what their ranks answer, or fail with; and the arguments that several of them have."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quartet.cluster.backend import Backend, Ref
from quartet.cluster.dispatch import Call
from quartet.cluster.errors import Failure, Lost
from quartet.cluster.items import is_large
from quartet.cluster.manifests import Gather

if TYPE_CHECKING:
    from quartet.cluster.processes import ProcessManager

POLL_S = 0.5
"""How often a call that takes long looks for ranks that failed."""
GRACE_S = 2.0
"""How long the other ranks may take to fail, too, after the first: their errors show which was the cause."""


class Pending:
    """A call in flight: one small reference per rank that says how it ended."""

    def __init__(self, processes: ProcessManager, refs: Mapping[int, Ref], answers: Sequence[int], during: str) -> None:
        self._processes = processes
        self._waiting = dict(refs)
        self._answers = answers
        self._during = during
        self._values: dict[int, Any] = {}
        self._troubles: dict[int, Failure | Lost] = {}
        self._since_s: float | None = None

    def done(self) -> bool:
        """Whether all ranks have ended, or one has failed and the others had time to follow."""
        self._look(0.0)
        return self._is_over()

    def outcomes(self, timeout_s: float | None = None) -> list[Any]:
        """What the answering ranks returned.

        Raises:
            WorkerError, WorkerDied, UserError: a rank failed.
            TimeoutError: not all have ended within the time.
        """
        deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        self._take_all(POLL_S if timeout_s is None else min(timeout_s, POLL_S))
        while not self._is_over():
            left = deadline - time.monotonic() if deadline is not None else POLL_S
            if left <= 0 and deadline is not None:
                raise TimeoutError(
                    f"{self._during} did not end within {timeout_s:g} s on ranks {sorted(self._waiting)} "
                    f"of group {self._processes.spec.name!r}"
                )
            self._look(max(min(left, POLL_S), 0.0))
        if self._troubles:
            self._processes.raise_for(self._troubles, self._during)
        return [self._values[rank] for rank in self._answers]

    async def outcomes_soon(self) -> list[Any]:
        """``outcomes`` without blocking the event loop; each rank's is there as soon as it is made."""
        coming = {self._processes.backend.soon(ref): rank for rank, ref in self._waiting.items()}
        while not self._is_over():
            ended, _ = await asyncio.wait(coming, timeout=self._grace_s(), return_when=asyncio.FIRST_COMPLETED)
            self._take([coming.pop(value) for value in ended], [value.result() for value in ended])
        if self._troubles:
            # It reads what the dead worker wrote, on its node.
            await asyncio.to_thread(self._processes.raise_for, self._troubles, self._during)
        return [self._values[rank] for rank in self._answers]

    def fetch(self, refs: Sequence[Ref]) -> list[Any]:
        """Values that a finished call left behind. Raises as ``outcomes``."""
        values = self._processes.backend.get(refs)
        troubles = {i: value for i, value in enumerate(values) if isinstance(value, (Failure, Lost))}
        if troubles:
            self._processes.raise_for(troubles, self._during)
        return values

    def _is_over(self) -> bool:
        return not self._waiting or self._grace_s() == 0.0

    def _grace_s(self) -> float | None:
        """How long the other ranks still have; None while none has failed."""
        return None if self._since_s is None else max(self._since_s + GRACE_S - time.monotonic(), 0.0)

    def _take_all(self, timeout_s: float) -> None:
        """The usual case, in one step: nothing is taken in where not all are there in time."""
        with contextlib.suppress(TimeoutError):
            ranks = list(self._waiting)
            self._take(ranks, self._processes.backend.get(list(self._waiting.values()), timeout_s))

    def _look(self, timeout_s: float) -> None:
        """Takes in what has ended; waits for that no longer than the time."""
        if not self._waiting:
            return
        ranks = list(self._waiting)
        backend = self._processes.backend
        ready = backend.wait([self._waiting[rank] for rank in ranks], timeout_s, fetch=True)
        ended = [rank for rank, is_there in zip(ranks, ready, strict=True) if is_there]
        self._take(ended, backend.get([self._waiting[rank] for rank in ended]))

    def _take(self, ranks: Sequence[int], values: Sequence[Any]) -> None:
        for rank, value in zip(ranks, values, strict=True):
            if self._waiting.pop(rank, None) is None:  # another waiter for the same call was first
                continue
            self._values[rank] = value
            if isinstance(value, (Failure, Lost)):
                self._troubles[rank] = value
                self._since_s = self._since_s if self._since_s is not None else time.monotonic()


class Shared:
    """Arguments that several ranks receive are stored once, if they are large."""

    def __init__(self, backend: Backend, calls: Sequence[Call | None]) -> None:
        self._backend = backend
        self._stored: dict[int, Ref] = {}
        self._readers: dict[int, int] = {}
        if len(calls) > 1:
            for call in calls:
                for value in (*call.args, *call.kwargs.values()) if call is not None else ():
                    self._readers[id(value)] = self._readers.get(id(value), 0) + 1

    def flat(self, call: Call) -> tuple[tuple[str, ...], list[Any]]:
        """Names of the keyword arguments, and all arguments one after the other."""
        return tuple(call.kwargs), [self._once(value) for value in (*call.args, *call.kwargs.values())]

    def _once(self, value: Any) -> Any:
        if self._readers.get(id(value), 0) < 2 or isinstance(value, Gather) or not is_large(value):
            return value
        if id(value) not in self._stored:
            self._stored[id(value)] = self._backend.put(value)
        return self._stored[id(value)]
