"""The result of a non-blocking call."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quartet.cluster.dispatch import Call, CallPlan, DispatchMode, Split, portion, survey
from quartet.cluster.items import Positions, Share, arrange, is_items
from quartet.cluster.layout import Layout
from quartet.cluster.manifests import Gather, ObjectManifest, PartRefs, share_of

if TYPE_CHECKING:
    from quartet.cluster.pending import Pending

_partitions = itertools.count()


class BatchFuture:
    """A result that is being made and stays where it is made until it is asked for.

    As an argument of another group's call it travels from worker to worker; the driver sees manifests only. It must
    then be an argument by itself, not inside another value.

    Args:
        pending: the call in flight.
        mode: of the call.
        parts: references to the parts of the result, one per answering rank.
        plan: how the call was distributed.
        partition: a name for the way in which the items are divided over the parts.
    """

    def __init__(
        self, pending: Pending, mode: DispatchMode, parts: Sequence[PartRefs], plan: CallPlan, partition: str | None
    ) -> None:
        self.parts = tuple(parts)
        self.partition = partition
        self.is_split = plan.is_split
        self._pending = pending
        self._mode = mode
        self._plan = plan

    def __reduce__(self) -> Any:
        raise TypeError("a BatchFuture is an argument by itself; inside another value it cannot be followed")

    def done(self) -> bool:
        """Whether the call has ended, well or badly."""
        return self._pending.done()

    def wait(self, timeout_s: float | None = None) -> list[ObjectManifest]:
        """Waits for the call to end; the manifests of its parts, while the data stays where it is.

        Raises:
            WorkerError, WorkerDied, UserError: the call failed.
            TimeoutError: it has not ended within the time.
        """
        return self._pending.outcomes(timeout_s)

    def result(self, timeout_s: float | None = None) -> Any:
        """What the blocking call would have returned; raises as ``wait``."""
        manifests = self.wait(timeout_s)
        values = iter(self._pending.fetch([ref for part in self.parts for ref in part.chunks]))
        results = [
            _of_one_rank(manifest, [next(values) for _ in part.chunks])
            for manifest, part in zip(manifests, self.parts, strict=True)
        ]
        if not isinstance(self._mode, Split):
            return self._plan.collect(results)
        return self._mode.merge(results, [manifest.given for manifest in manifests], self._plan.target)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result_soon().__await__()

    async def _result_soon(self) -> Any:
        manifests = await self.finished()
        # Small values came with their manifests; another thread costs more than to take them.
        return self.result() if all(m.is_small for m in manifests) else await asyncio.to_thread(self.result)

    async def finished(self) -> list[ObjectManifest]:
        """``wait`` without blocking the event loop."""
        return await self._pending.outcomes_soon()

    def __len__(self) -> int:
        """How many ranks answer."""
        return len(self.parts)

    def __getitem__(self, rank: int) -> Gather:
        """The result of one rank, as an argument."""
        return Gather((self.parts[rank],))

    def reference(self, rank: int = 0) -> Gather:
        """The batch that an answering rank returned, for ``RaggedBatch.outline``; it does not keep the manifest."""
        return Gather((PartRefs(None, self.parts[rank].chunks),))


def _of_one_rank(manifest: ObjectManifest, pieces: Sequence[Any]) -> Any:
    """One rank's result, whole: its chunks by their positions among that rank's items."""
    if len(manifest.chunks) < 2:
        return pieces[0]
    places = {p: i for i, p in enumerate(sorted(p for chunk in manifest.chunks for p in chunk.positions))}
    shares = [Share([places[p] for p in chunk.positions], chunk.table) for chunk in manifest.chunks]
    return arrange(pieces, shares)


# As arguments --------------------------------------------------------------------------------------------


def plan_call(
    mode: DispatchMode, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[CallPlan, str | None]:
    """A call's plan, and the name of the way in which its items are divided.

    Raises:
        ValueError: the arguments do not fit the mode.
    """
    futures = [value for value in (*args, *kwargs.values()) if isinstance(value, BatchFuture)]
    if futures and isinstance(mode, Split):
        return _split_futures(layout, args, kwargs, futures)
    plan = mode.plan(layout, args, kwargs)
    if futures:
        plan = replace(plan, calls=[_fetching(call) if call is not None else None for call in plan.calls])
    return plan, f"split-{next(_partitions)}" if plan.is_split else None


def _fetching(call: Call) -> Call:
    """A future that is still among the arguments is fetched whole by its reader."""

    def fetched(value: Any) -> Any:
        return Gather(value.parts) if isinstance(value, BatchFuture) else value

    kwargs = {name: fetched(value) for name, value in call.kwargs.items()}
    return replace(call, args=tuple(map(fetched, call.args)), kwargs=kwargs)


def _split_futures(
    layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any], futures: Sequence[BatchFuture]
) -> tuple[CallPlan, str]:
    """Where both sides are split alike, each part goes one to one; otherwise the readers find their parts."""
    for future in futures:
        if not future.is_split and len(future.parts) > 1:
            raise ValueError(f"{len(future.parts)} ranks returned a result each; a PER_RANK method takes these")
    lead = futures[0]
    direct = len(lead.parts) == layout.parts and all(f.partition == lead.partition and f.is_split for f in futures)
    partition = str(lead.partition) if direct else f"{lead.partition}/{layout.parts}"

    def gather(future: BatchFuture, part: int) -> Gather:
        parts = (future.parts[part],) if direct else future.parts
        return Gather(parts, part, layout.parts, direct, partition)

    own: list[Positions] = [()] * layout.parts
    table = None
    if literals := [value for value in (*args, *kwargs.values()) if is_items(value)]:
        # What the driver itself passes is cut here, as the readers will cut the future: its manifests are waited for.
        _, count = survey(literals)
        manifests = lead.wait()
        if (found := sum(manifest.num_items for manifest in manifests)) != count:
            raise ValueError(
                f"a split call needs arguments with equally many items, found {found} in a future and {count}"
            )
        of_part = [[manifest] for manifest in manifests] if direct else [manifests] * layout.parts
        own = [share_of(seen, gather(lead, part)).positions for part, seen in enumerate(of_part)]
        table = share_of(manifests, Gather(lead.parts, 0, 1, False, partition)).table

    def mine(value: Any, part: int) -> Any:
        return gather(value, part) if isinstance(value, BatchFuture) else portion(value, own[part], table)

    calls = [
        Call(tuple(mine(v, part) for v in args), {name: mine(v, part) for name, v in kwargs.items()})
        for part in range(layout.parts)
    ]
    return CallPlan([calls[part] for part in layout.part_of], layout.answering, list, None, is_split=True), partition
