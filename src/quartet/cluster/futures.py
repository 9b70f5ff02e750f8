"""Calls in flight: what their ranks answer, or fail with; and the result of a non-blocking call."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quartet.cluster.backend import Ref
from quartet.cluster.errors import Failure, Lost
from quartet.cluster.manifests import Reference

if TYPE_CHECKING:
    from quartet.cluster.dispatch import CallPlan
    from quartet.cluster.processes import ProcessManager

POLL_S = 0.5
"""How often a call that takes long looks for ranks that failed."""
GRACE_S = 2.0
"""How long the other ranks may take to fail, too, after the first: their errors show which was the cause."""


class Pending:
    """A call in flight: one small reference per rank that says how it ended.

    Attributes:
        seconds: from the call to each rank's answer, as far as they have come.

    Args:
        began_s: when the call began, before anything was sent to a rank.
    """

    def __init__(
        self, processes: ProcessManager, refs: Mapping[int, Ref], answers: Sequence[int], during: str, began_s: float
    ) -> None:
        self._processes = processes
        self._waiting = dict(refs)
        self._began_s = began_s
        self.seconds: dict[int, float] = {}
        self._answers = answers
        self._during = during
        self._values: dict[int, Any] = {}
        self._troubles: dict[int, Failure | Lost] = {}
        self._since_s: float | None = None

    def done(self) -> bool:
        """Whether all ranks have ended, or one has failed and the others had time to follow."""
        self._look(0.0)
        return self._is_over()

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        """What the answering ranks returned.

        Raises:
            WorkerError, WorkerDied, UserError: a rank failed.
            TimeoutError: not all have ended within the time.
        """
        timeout_s = math.inf if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        self._take_all(min(timeout_s, POLL_S))
        while not self._is_over():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"{self._during} did not end within {timeout_s:g} s on ranks {sorted(self._waiting)} "
                    f"of group {self._processes.spec.name!r}"
                )
            self._look(min(left, POLL_S))
        if self._troubles:
            self._processes.raise_for(self._troubles, self._during)
        return [self._values[rank] for rank in self._answers]

    async def finished(self) -> list[Any]:
        """``wait`` without blocking the event loop; each rank's is there as soon as it is made."""
        coming = {self._processes.backend.soon(ref): rank for rank, ref in self._waiting.items()}
        while not self._is_over():
            ended, _ = await asyncio.wait(coming, timeout=self._grace_s(), return_when=asyncio.FIRST_COMPLETED)
            self._take([coming.pop(value) for value in ended], [value.result() for value in ended])
        if self._troubles:
            # It reads what the dead worker wrote, on its node.
            await asyncio.to_thread(self._processes.raise_for, self._troubles, self._during)
        return [self._values[rank] for rank in self._answers]

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
        ready = backend.wait([self._waiting[rank] for rank in ranks], timeout_s)
        ended = [rank for rank, is_there in zip(ranks, ready, strict=True) if is_there]
        self._take(ended, backend.get([self._waiting[rank] for rank in ended]))

    def _take(self, ranks: Sequence[int], values: Sequence[Any]) -> None:
        for rank, value in zip(ranks, values, strict=True):
            if self._waiting.pop(rank, None) is None:  # another waiter for the same call was first
                continue
            self._values[rank] = value
            self.seconds[rank] = time.monotonic() - self._began_s
            if isinstance(value, (Failure, Lost)):
                self._troubles[rank] = value
                self._since_s = self._since_s if self._since_s is not None else time.monotonic()


class BatchFuture(Pending):
    """A result that is being made and stays where it is made until it is asked for.

    As an argument of another call one rank's result travels from worker to worker; the driver sees manifests only,
    which ``wait`` and ``finished`` return. It must then be an argument by itself, not inside another value.

    Args:
        refs: of each rank the manifest of its result.
        plan: how the call was distributed.
        parts: references to the results, one per answering rank; none where ``refs`` are the results.
        during, began_s: as for ``Pending``.
    """

    def __init__(
        self,
        processes: ProcessManager,
        refs: Mapping[int, Ref],
        plan: CallPlan,
        parts: Sequence[Ref],
        during: str,
        began_s: float,
    ) -> None:
        super().__init__(processes, refs, plan.answers, during, began_s)
        self.parts = tuple(parts)
        self._plan = plan

    def __reduce__(self) -> Any:
        raise TypeError("a BatchFuture is an argument by itself; inside another value it cannot be followed")

    def result(self, timeout_s: float | None = None) -> Any:
        """What the blocking call would have returned; raises as ``wait``."""
        return self._collected(self.wait(timeout_s))

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result_soon().__await__()

    async def _result_soon(self) -> Any:
        found = await self.finished()
        # Small values came with their manifests; another thread costs more than to take them.
        if not self.parts or all(manifest.is_small for manifest in found):
            return self._collected(found)
        return await asyncio.to_thread(self._collected, found)

    def _collected(self, found: Sequence[Any]) -> Any:
        """The call's result from ``found``, what its ranks returned: their results, or the manifests of these."""
        values = self._processes.backend.get(self.parts) if self.parts else list(found)
        if troubles := {i: value for i, value in enumerate(values) if isinstance(value, (Failure, Lost))}:
            self._processes.raise_for(troubles, self._during)
        return self._plan.collect(values, self._plan.shares)

    def reference(self) -> Reference:
        """The result of the one rank that answers, as an argument; also for ``RaggedBatch.outline``.

        Raises:
            ValueError: several ranks answer, or their results come to the driver.
        """
        if len(self.parts) != 1:
            raise ValueError(f"{len(self.parts)} ranks leave a result of {self._during}: only one's can be passed on")
        return Reference(self.parts[0])
