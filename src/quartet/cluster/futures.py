"""The result of a non-blocking call."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from quartet.cluster.dispatch import Call, Mode, Plan, Split, merge_results, portion, survey
from quartet.cluster.items import Part, Whole, arrange, is_items
from quartet.cluster.layout import Layout
from quartet.cluster.manifests import Gather, Manifest, PartRefs, share_of

if TYPE_CHECKING:
    from quartet.cluster.pending import Pending

_partitions = itertools.count()


class BatchFuture:
    """A result that is being made and stays where it is made until somebody asks for it.

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
        self, pending: Pending, mode: Mode, parts: Sequence[PartRefs], plan: Plan, partition: str | None
    ) -> None:
        self.parts = tuple(parts)
        self.partition = partition
        self.is_split = plan.is_split
        self._pending = pending
        self._mode = mode
        self._plan = plan

    def __reduce__(self) -> Any:
        raise TypeError("a BatchFuture is an argument by itself; inside another value nobody can follow it")

    def done(self) -> bool:
        """Whether the call has ended, well or badly."""
        return self._pending.done()

    def wait(self, timeout_s: float | None = None) -> list[Manifest]:
        """Waits for the call to end; the manifests of its parts, while the data stays where it is.

        Raises:
            WorkerError, WorkerDied, UserError: the call failed.
            TimeoutError: it has not ended within the time.
        """
        return self._pending.outcomes(timeout_s)

    def result(self, timeout_s: float | None = None) -> Any:
        """What the blocking call would have returned; raises as ``wait``."""
        manifests = self.wait(timeout_s)
        values = self._pending.fetch([ref for part in self.parts for ref in part.chunks])
        of_part = iter(values)
        pieces = [[next(of_part) for _ in part.chunks] for part in self.parts]
        whole = isinstance(self._mode, Split) and self._mode.results == "items"
        if whole and all(manifest.chunks for manifest in manifests):
            return _joined(manifests, pieces, self._plan)
        results = [_one(manifest, of) for manifest, of in zip(manifests, pieces, strict=True)]
        if whole:
            return merge_results(results, [m.given for m in manifests], [m.table for m in manifests], self._plan.target)
        return self._plan.collect(results)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result_soon().__await__()

    async def _result_soon(self) -> Any:
        manifests = await self.finished()
        # Small values came with their manifests; another thread costs more than to take them.
        return self.result() if all(m.is_small for m in manifests) else await asyncio.to_thread(self.result)

    async def finished(self) -> list[Manifest]:
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


def _one(manifest: Manifest, pieces: Sequence[Any]) -> Any:
    """One rank's result, whole."""
    if not manifest.chunks:
        return pieces[0]
    parts = [Part(v, info.positions, info.structure) for v, info in zip(pieces, manifest.chunks, strict=False)]
    return parts[0].value if len(parts) == 1 else arrange(_renumbered(parts))


def _renumbered(parts: Sequence[Part]) -> list[Part]:
    """One rank's chunks with their positions among that rank's items."""
    places = {p: i for i, p in enumerate(sorted(p for part in parts for p in part.positions))}
    return [Part(part.value, [places[p] for p in part.positions], part.structure) for part in parts]


def _joined(manifests: Sequence[Manifest], pieces: Sequence[Sequence[Any]], plan: Plan) -> Any:
    parts = [
        Part(value, info.positions, info.structure)
        for manifest, of in zip(manifests, pieces, strict=True)
        for value, info in zip(of, manifest.chunks, strict=False)
    ]
    target = plan.target
    same = target is not None and all(p.structure is not None and p.structure.origin == target.origin for p in parts)
    return arrange(parts, target if same else None, origin="joined")


# As arguments --------------------------------------------------------------------------------------------


def plan_call(mode: Mode, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plan, str | None]:
    """A call's plan, and the name of the way in which its items are divided.

    Raises:
        ValueError: the arguments do not fit the mode.
    """
    futures = [value for value in (*args, *kwargs.values()) if isinstance(value, BatchFuture)]
    if futures and isinstance(mode, Split):
        plan, partition = _split_futures(mode, layout, args, kwargs, futures)
    else:
        plan, partition = mode.plan(layout, args, kwargs), f"split-{next(_partitions)}"
    if futures:
        plan = _with_gathers(plan)
    return plan, partition if plan.is_split else None


def _with_gathers(plan: Plan) -> Plan:
    """A future that is still among the arguments is fetched whole by its reader."""

    def fetched(value: Any) -> Any:
        return Gather(value.parts) if isinstance(value, BatchFuture) else value

    def call(c: Call | None) -> Call | None:
        if c is None:
            return None
        args, kwargs = tuple(map(fetched, c.args)), {name: fetched(value) for name, value in c.kwargs.items()}
        return Call(args, kwargs, c.positions, c.table)

    return Plan([call(c) for c in plan.calls], plan.answers, plan.collect, plan.target, plan.is_split)


def _split_futures(
    mode: Split, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any], futures: Sequence[BatchFuture]
) -> tuple[Plan, str]:
    """Where both sides are split alike, each part goes one to one; otherwise the readers find their parts."""
    for future in futures:
        if not future.is_split and len(future.parts) > 1:
            raise ValueError(f"{len(future.parts)} ranks returned a result each; a PER_RANK method takes these")
    lead = futures[0]
    direct = len(lead.parts) == layout.parts and all(f.partition == lead.partition and f.is_split for f in futures)
    partition = str(lead.partition) if direct else f"{lead.partition}/{layout.parts}"
    shares = _driver_shares(lead, layout, direct, partition, args, kwargs)

    def gather(future: BatchFuture, part: int) -> Gather:
        parts = (future.parts[part],) if direct else future.parts
        return Gather(parts, part, layout.parts, direct, partition)

    def mine(value: Any, part: int) -> Any:
        if isinstance(value, BatchFuture):
            return gather(value, part)
        if shares is not None and is_items(value):
            return shares[part](value)
        return portion(value, (), None) if isinstance(value, Whole) else value

    of_part = [
        Call(tuple(mine(v, part) for v in args), {name: mine(v, part) for name, v in kwargs.items()})
        for part in range(layout.parts)
    ]
    plan = Plan([of_part[part] for part in layout.part_of], layout.answering, list, None, is_split=True)
    return plan, partition


def _driver_shares(
    lead: BatchFuture, layout: Layout, direct: bool, partition: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Callable[[Any], Any]] | None:
    """How to cut what the driver itself passes beside a future; waits for the future's manifests.

    None where it passes no items: then there is nothing to wait for.
    """
    literals = [value for value in (*args, *kwargs.values()) if is_items(value)]
    if not literals:
        return None
    _, count = survey(literals)
    manifests = lead.wait()
    if sum(manifest.num_items for manifest in manifests) != count:
        found = sum(manifest.num_items for manifest in manifests)
        raise ValueError(f"a split call needs arguments with equally many items, found {found} in a future and {count}")
    gathers = [Gather(lead.parts, part, layout.parts, False, partition) for part in range(layout.parts)]
    if direct:
        positions = [
            share_of([manifest], Gather((part,), 0, 1, True, partition))[0]
            for manifest, part in zip(manifests, lead.parts, strict=True)
        ]
    else:
        positions = [share_of(manifests, gather)[0] for gather in gathers]
    _, table = share_of(manifests, Gather(lead.parts, 0, 1, False, partition))
    return [partial(portion, part=at, structure=table) for at in positions]
