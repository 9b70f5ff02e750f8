"""How a call on a group becomes calls on its workers, and how their results become one.

| mode | who is called | arguments | result |
|---|---|---|---|
| ``BROADCAST`` | everyone | the same for all | list with one entry per rank |
| ``SPLIT`` | everyone | a batch split over data-parallel parts, the rest whole | in the batch's order, or a list |
| ``RANK_ZERO``, ``OneRank(r)`` | one rank | as given | that rank's |
| ``ONE_COPY`` | the ranks that hold the first copy of a role's model | the same for all | rank 0's |
| ``CustomDispatch(distribute, collect)`` | as ``distribute`` says | as ``distribute`` says | what ``collect`` makes |
| ``InLayout(mode, layout)`` | as ``mode`` says for another layout | | |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from quartet.batch.partition import AtomTree, balanced_partition
from quartet.batch.ragged import ColumnSet, RaggedBatch

_F = TypeVar("_F", bound=Callable[..., Any])
EVEN_ENOUGH = 1.05
"""Cost of the dearest part over the mean at which a plan is taken without cutting smaller."""
_NOWHERE = ("",)  # an outline refers to something; nothing fills this one


@dataclass(frozen=True)
class RankLayout:
    """Which ranks of a group work on the same part of a batch: ``peers`` ranks in a row, of which the first answers.

    Eight ranks with four peers::

        rank      0  1  2  3   4  5  6  7
        part      0  0  0  0   1  1  1  1
        answers   x            x
    """

    world_size: int
    peers: int = 1

    def __post_init__(self) -> None:
        if self.world_size % self.peers:
            raise ValueError(f"{self.world_size} processes cannot work on parts by {self.peers}")

    @property
    def parts(self) -> int:
        """How many parts a batch is split into."""
        return self.world_size // self.peers

    def part_of(self, rank: int) -> int:
        """Returns the part that a rank works on."""
        return rank // self.peers

    @property
    def answering(self) -> range:
        """Per part the rank that answers for it."""
        return range(0, self.world_size, self.peers)


# Splitting a batch ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchShare:
    """Some of a batch's sequences: where they stand in it, and their segment table."""

    positions: Sequence[int]
    table: RaggedBatch


def segment_table(batch: RaggedBatch) -> RaggedBatch:
    """Returns the segment table of a batch: an outline without any field."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return RaggedBatch(nothing, batch.segment_lengths, batch.parents, batch.leaves, batch.ids, elsewhere=_NOWHERE)


def split_table(table: RaggedBatch, parts: int) -> list[BatchShare]:
    """Returns what each of so many parts gets of the batch with this table."""
    return [BatchShare(part, table.select(part)) for part in plan_parts(table, parts)]


def plan_parts(table: RaggedBatch, parts: int) -> list[list[int]]:
    """Returns the indices of the sequences of each part, ascending; a function of the arguments alone.

    Sequences are balanced by cost, cut no smaller than balance needs: first whole groups (sequences that share a root
    segment), then runs of a group's sequences, each of which stores what they share once more. Parts are empty where
    there are fewer sequences than parts.
    """
    if not len(table):
        return [[] for _ in range(parts)]
    tree = AtomTree(table, [[s] for s in range(len(table))], share=True)
    cost = tree.block(range(len(table))).cost
    best: list[list[int]] = []
    least = float("inf")
    for blocks in _cuts(tree, parts, cost):
        dealt = map(sorted, balanced_partition([tree.block(block).cost for block in blocks], parts))
        in_order = sorted(dealt, key=lambda part: part[0] if part else len(blocks))
        plan = [sorted(s for b in part for s in blocks[b]) for part in in_order]
        dearest = max(tree.block(part).cost for part in plan)
        if dearest < least:
            best, least = list(plan), dearest
        if least <= EVEN_ENOUGH * (cost / parts):
            break
    return best


def _cuts(tree: AtomTree, parts: int, cost: int) -> Iterator[list[Sequence[int]]]:
    """Yields ways to cut the batch into blocks that travel whole, the coarsest first."""
    groups = tree.groups()
    yield [*groups]
    for fineness in (1, 2, 4, sum(map(len, groups))):
        # Runs of about equally many sequences, so many that none is dearer than its part of the batch.
        counts = [min(-(-tree.block(group).cost * parts * fineness // cost), len(group)) for group in groups]
        yield [
            group[a:b]
            for group, count in zip(groups, counts, strict=True)
            for a, b in pairwise(len(group) * p // count for p in range(count + 1))
        ]


def merge_results(results: Sequence[Any], shares: Sequence[BatchShare], table: RaggedBatch) -> Any:
    """Merges results of parts into one value, in the order of the batch with this table.

    Columns of the parts' sequences, and tensors with an entry per sequence, are put together; other results form a
    list, or are None where all of them are.

    Raises:
        ValueError: columns are of other sequences than the part's.
    """
    held = [(result, share) for result, share in zip(results, shares, strict=True) if share.positions]
    values = [result for result, _ in held] or results[:1]
    flat = [position for _, share in held for position in share.positions]
    order = sorted(range(len(flat)), key=flat.__getitem__)
    if all(isinstance(value, ColumnSet) for value in values):
        columns = ColumnSet.concat(values) if len(values) > 1 else values[0]
        return _merged_columns(columns, [share.table for _, share in held], order, table)
    if all(isinstance(value, Tensor) and value.ndim and len(value) == len(at.positions) for value, at in held):
        whole = torch.cat([*values])
        return whole[torch.tensor(order, dtype=torch.int64, device=whole.device)]
    return None if all(result is None for result in results) else list(results)


def _merged_columns(
    columns: ColumnSet, tables: Sequence[RaggedBatch], order: Sequence[int], table: RaggedBatch
) -> ColumnSet:
    own = RaggedBatch.concat(tables) if tables else table
    if columns.ids != own.ids or any(v.shape[0] != own.num_tokens for v in columns.token.values()):
        raise ValueError(f"columns {sorted({*columns.token, *columns.sequence})} are not of the part's sequences")
    if [*order] == [*range(len(table))] and all(
        getattr(own, name) == getattr(table, name) for name in ("segment_lengths", "parents", "leaves")
    ):
        return columns  # as they are: they may be large
    batch = replace(own, token=columns.token, sequence=columns.sequence)
    segments: list[int | None] = [None] * len(table.parents)
    for s in reversed(range(len(order))):  # of a segment that several parts hold the first one's values count
        for k, of_part in zip(table.chain(s), batch.chain(order[s]), strict=True):
            segments[k] = of_part
    merged = batch.regrouped(segments, table.segment_lengths, table.parents, table.leaves, order)
    return ColumnSet(merged.ids, merged.token, merged.sequence)


# Modes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankCall:
    """Arguments for one rank, and where the driver has split them its share of the items.

    A future among the arguments is fetched whole by its reader.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    share: BatchShare | None = None

    @classmethod
    def each(cls, change: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankCall:
        """Makes a call with what ``change`` makes of each argument."""
        return cls(tuple(map(change, args)), {name: change(value) for name, value in kwargs.items()})

    def values(self) -> list[Any]:
        """Returns all arguments one after the other, those that are passed by keyword last."""
        return [*self.args, *self.kwargs.values()]


@dataclass(frozen=True)
class CallPlan:
    """One call per rank (None: not called), the ranks whose results count, and what becomes of those.

    Attributes:
        collect: ``(results, shares)`` → the call's result; ``shares`` are the items that each was made of, None where
            the call was not split.
    """

    calls: Sequence[RankCall | None]
    answers: Sequence[int]
    collect: Callable[[list[Any], Sequence[BatchShare | None]], Any]

    @property
    def shares(self) -> list[BatchShare | None]:
        """Of each rank that answers."""
        return [call.share for call in (self.calls[rank] for rank in self.answers) if call is not None]


class DispatchMode(Protocol):
    """A way to distribute a call."""

    def plan(self, layout: RankLayout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
        """
        Raises:
            ValueError: the arguments do not fit the mode.
        """


def _of_every_rank(results: list[Any], shares: Sequence[BatchShare | None]) -> Any:
    return results


@dataclass(frozen=True)
class Broadcast:
    """Every rank gets the same arguments."""

    def plan(self, layout: RankLayout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
        return CallPlan([RankCall(args, kwargs)] * layout.world_size, range(layout.world_size), _of_every_rank)


@dataclass(frozen=True)
class OneRank:
    """Only ``rank`` is called, and its result returned."""

    rank: int

    def plan(self, layout: RankLayout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
        if not 0 <= self.rank < layout.world_size:
            raise ValueError(f"there is no rank {self.rank} among {layout.world_size}")
        calls = [RankCall(args, kwargs) if rank == self.rank else None for rank in range(layout.world_size)]
        return CallPlan(calls, [self.rank], lambda results, shares: results[0])


@dataclass(frozen=True)
class FirstRanks:
    """Ranks 0 to ``num - 1`` are called, and the result of rank 0 returned.

    Args:
        awaits_all: otherwise only rank 0 is waited for, and its result can be passed on as a future.
    """

    num: int
    awaits_all: bool = True

    def plan(self, layout: RankLayout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
        calls = [RankCall(args, kwargs) if rank < self.num else None for rank in range(layout.world_size)]
        answers = range(self.num if self.awaits_all else 1)
        return CallPlan(calls, answers, lambda results, shares: results[0])


@dataclass(frozen=True)
class CustomDispatch:
    """A mode made of two functions.

    Args:
        distribute: ``(layout, *args, **kwargs)`` → per rank ``(args, kwargs)``, or None for a rank that is not called.
        collect: ``(layout, results)`` → the call's result; results of ranks that were not called are None.
    """

    distribute: Callable[..., Sequence[tuple[tuple[Any, ...], dict[str, Any]] | None]]
    collect: Callable[[RankLayout, list[Any]], Any]

    def plan(self, layout: RankLayout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
        given = list(self.distribute(layout, *args, **kwargs))
        if len(given) != layout.world_size:
            raise ValueError(f"distribute returned {len(given)} entries for {layout.world_size} ranks")
        called = [rank for rank, entry in enumerate(given) if entry is not None]

        def collect(results: list[Any], shares: Sequence[BatchShare | None]) -> Any:
            of_rank = dict(zip(called, results, strict=True))
            return self.collect(layout, [of_rank.get(rank) for rank in range(layout.world_size)])

        return CallPlan([RankCall(*entry) if entry is not None else None for entry in given], called, collect)


@dataclass(frozen=True)
class SplitBatch:
    """A ragged batch is split over the data-parallel parts; all ranks of a part get the same, and one of them answers.

    All other arguments go to every rank. Parts have about equal tokens, groups stay whole where that is possible. Where
    there are fewer sequences than parts, some parts are empty. For results see ``merge_results``.
    """

    def plan(self, layout: RankLayout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
        batches = [value for value in (*args, *kwargs.values()) if isinstance(value, RaggedBatch)]
        if len(batches) != 1:
            raise ValueError(f"a split call needs one ragged batch among its arguments, found {len(batches)}")
        table, calls = segment_table(batches[0]), []
        for share in split_table(table, layout.parts):
            part = batches[0].select(share.positions)
            call = RankCall.each(partial(_instead, batches[0], part), args, kwargs)
            calls.append(replace(call, share=share))
        return CallPlan(
            [calls[layout.part_of(rank)] for rank in range(layout.world_size)],
            layout.answering,
            lambda results, shares: merge_results(results, [share for share in shares if share is not None], table),
        )


def _instead(batch: RaggedBatch, part: RaggedBatch, value: Any) -> Any:
    return part if value is batch else value


@dataclass(frozen=True)
class InLayout:
    """As ``mode`` for ranks that share data by another layout than their group's: that of one of its roles."""

    mode: DispatchMode
    layout: RankLayout

    def plan(self, layout: RankLayout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
        return self.mode.plan(self.layout, args, kwargs)


BROADCAST, RANK_ZERO, SPLIT = Broadcast(), OneRank(0), SplitBatch()
ONE_COPY = FirstRanks(1)
"""Of a model that several ranks hold between them all these ranks: who calls a role's workers knows how many."""


# The mark ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DispatchInfo:
    """How a method is called on its group."""

    mode: DispatchMode
    blocking: bool = True


def dispatch(mode: DispatchMode = BROADCAST, *, blocking: bool = True) -> Callable[[_F], _F]:
    """Marks a worker's method: its group gets a method of the same name.

    Args:
        mode: who is called with what, and what becomes of the results.
        blocking: otherwise the group's method returns a ``BatchFuture`` at once.
    """

    def mark(method: _F) -> _F:
        method.__quartet_dispatch__ = DispatchInfo(mode, blocking)  # type: ignore[attr-defined]
        return method

    return mark


def dispatched_methods(cls: type) -> dict[str, DispatchInfo]:
    """Returns the marked methods of a class by name; an override keeps the mark of what it overrides."""
    found: dict[str, DispatchInfo] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if isinstance(mark := getattr(value, "__quartet_dispatch__", None), DispatchInfo):
                found[name] = mark
    return found
