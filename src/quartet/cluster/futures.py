"""Calls in flight, and results that stay where they were made.

A non-blocking call leaves each rank's result in the object store as one reference. An argument made of such a result is
a ``ResultReference``, which the worker that receives it fetches; the driver need not wait for the first call before it
makes the next.

Of a batch only the token ids may stay behind: an outline (``RaggedBatch.elsewhere``) holds ``ResultReference``s to
batches that have them, and the worker that receives it as an argument puts them in.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.cluster.errors import LostResult, WorkerFailure

if TYPE_CHECKING:
    from quartet.cluster.dispatch import CallPlan
    from quartet.cluster.group import WorkerGroup

POLL_S = 0.5
"""How often a call that takes long looks for ranks that failed."""
GRACE_S = 2.0
"""How long the other ranks may take to fail, too, after the first: their errors show which was the cause."""


class BatchFuture:
    """A call in flight: one small reference per rank that says how it ended.

    Where its result stays where it is made, one rank's can be an argument of another call and travels from worker to
    worker. It must then be an argument by itself, not inside another value.

    Attributes:
        seconds: from the call to each rank's answer, as far as they have come.

    Args:
        refs: of each rank its result, or where that stays what it says of it (``StoredResult``).
        plan: how the call was distributed.
        parts: references to the results, one per answering rank; none where ``refs`` are the results.
        during: the call, for messages.
        began_s: when the call began, before anything was sent to a rank.
    """

    def __init__(
        self,
        group: WorkerGroup,
        refs: Mapping[int, Any],
        plan: CallPlan,
        parts: Sequence[Any],
        during: str,
        began_s: float,
    ) -> None:
        self._group = group
        self._waiting = dict(refs)
        self._plan = plan
        self._parts = tuple(parts)
        self._during = during
        self._began_s = began_s
        self.seconds: dict[int, float] = {}
        self._values: dict[int, Any] = {}
        self._troubles: dict[int, WorkerFailure | LostResult] = {}
        self._since_s: float | None = None

    def __reduce__(self) -> Any:
        raise TypeError("a BatchFuture is an argument by itself; inside another value it cannot be followed")

    def result(self, timeout_s: float | None = None) -> Any:
        """Returns what the blocking call would have returned; raises as ``wait``."""
        answers = self.wait(timeout_s)
        return self._collected(self._group.backend.get(self._parts) if self._parts else answers)

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        """Returns what the answering ranks returned, or where that stays what they said of it.

        Raises:
            WorkerError, WorkerDied, UserError: a rank failed.
            TimeoutError: not all have ended within the time.
        """
        timeout_s = math.inf if timeout_s is None else timeout_s
        deadline, backend = time.monotonic() + timeout_s, self._group.backend
        while not self._is_over():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"{self._during} did not end within {timeout_s:g} s on ranks {sorted(self._waiting)} "
                    f"of group {self._group.name!r}"
                )
            ready = backend.wait([*self._waiting.values()], min(left, POLL_S))
            ended = [rank for rank, is_there in zip(self._waiting, ready, strict=True) if is_there]
            self._take(ended, backend.get([self._waiting[rank] for rank in ended]))
        if self._troubles:
            self._group.raise_for(self._troubles, self._during)
        return [self._values[rank] for rank in self._plan.answers]

    async def finished(self) -> list[Any]:
        """Waits as ``wait`` without blocking the event loop; each rank's is there as soon as it is made."""
        coming = {self._group.backend.soon(ref): rank for rank, ref in self._waiting.items()}
        while not self._is_over():
            ended, _ = await asyncio.wait(coming, timeout=self._grace_s(), return_when=asyncio.FIRST_COMPLETED)
            self._take([coming.pop(value) for value in ended], [value.result() for value in ended])
        if self._troubles:
            self._group.raise_for(self._troubles, self._during)
        return [self._values[rank] for rank in self._plan.answers]

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result_soon().__await__()

    async def _result_soon(self) -> Any:
        answers = await self.finished()
        return self._collected([await self._group.backend.soon(ref) for ref in self._parts] or answers)

    def reference(self) -> ResultReference:
        """Returns the result of the one rank that answers, as an argument; also for ``RaggedBatch.outline``.

        Raises:
            ValueError: several ranks answer, or their results come to the driver.
        """
        if len(self._parts) != 1:
            raise ValueError(f"{len(self._parts)} ranks leave a result of {self._during}: only one's can be passed on")
        return ResultReference(self._parts[0])

    def _is_over(self) -> bool:
        """Tells whether all ranks have ended, or one has failed and the others had time to follow."""
        return not self._waiting or self._grace_s() == 0.0

    def _grace_s(self) -> float | None:
        """Returns how long the other ranks still have; None while none has failed."""
        return None if self._since_s is None else max(self._since_s + GRACE_S - time.monotonic(), 0.0)

    def _take(self, ranks: Sequence[int], values: Sequence[Any]) -> None:
        for rank, value in zip(ranks, values, strict=True):
            if self._waiting.pop(rank, None) is None:  # another waiter for the same call was first
                continue
            self._values[rank] = value
            self.seconds[rank] = time.monotonic() - self._began_s
            if isinstance(value, (WorkerFailure, LostResult)):
                self._troubles[rank] = value
                self._since_s = self._since_s if self._since_s is not None else time.monotonic()

    def _collected(self, values: Sequence[Any]) -> Any:
        """Returns the call's result from those of the ranks that answer."""
        if troubles := {i: value for i, value in enumerate(values) if isinstance(value, (WorkerFailure, LostResult))}:
            self._group.raise_for(troubles, self._during)
        return self._plan.collect([*values], self._plan.shares)


# Arguments and results of workers ---------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredResult:
    """A worker's result that stays where it was made, and what the driver is told of it."""

    value: Any
    note: Any


@dataclass(frozen=True)
class ResultReference:
    """An argument that its reader fetches: a worker's result, by the back end's reference to it."""

    ref: Any


class UpstreamFailed(Exception):
    """What a call was to work on does not exist: the call that should have made it failed."""

    def __init__(self, outcome: WorkerFailure | LostResult) -> None:
        self.outcome = outcome
        super().__init__(outcome)


Fetch = Callable[[Sequence[Any]], list[Any]]
"""References → values; a value may be a ``WorkerFailure`` or ``LostResult``."""


def fetch_arguments(fetch: Fetch, values: Sequence[Any]) -> list[Any]:
    """Fetches arguments, with what they refer to in the place of references, and with their token ids in all outlines,
    also in lists and tuples of batches.

    Raises:
        Upstream: the call that should have made one of them failed.
        ValueError: a sequence's ids are not where its batch says.
    """
    found = iter(_checked(fetch, [value for value in values if isinstance(value, ResultReference)]))
    values = [next(found) if isinstance(value, ResultReference) else value for value in values]
    references = {id(ref): ref for value in values for batch in _batches(value) for ref in batch.elsewhere}
    sources = dict(zip(references, _checked(fetch, [*references.values()]), strict=True))

    def fill(batch: RaggedBatch) -> RaggedBatch:
        return batch.filled([sources[id(reference)] for reference in batch.elsewhere])

    return [
        fill(value) if isinstance(value, RaggedBatch) else type(value)(map(fill, value)) if _batches(value) else value
        for value in values
    ]


def _checked(fetch: Fetch, references: Sequence[ResultReference]) -> list[Any]:
    """Returns the values, unless one of them stands for a call that failed."""
    values = fetch([reference.ref for reference in references]) if references else []
    for value in values:
        if isinstance(value, (WorkerFailure, LostResult)):
            raise UpstreamFailed(value)
    return values


def _batches(value: Any) -> Sequence[RaggedBatch]:
    if isinstance(value, RaggedBatch):
        return [value]
    is_plain = type(value) in (list, tuple)
    return value if is_plain and all(isinstance(item, RaggedBatch) for item in value) else ()


MAY_BE_LARGE = (RaggedBatch, ColumnSet, Tensor, dict, list, tuple)
"""Arguments of several ranks that are stored once, in the place of a copy in each call."""
