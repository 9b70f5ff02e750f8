"""How a call on a group becomes calls on its workers, and how their results become one.

| mode | who is called | arguments | result |
|---|---|---|---|
| ``BROADCAST`` | everyone | the same for all | list with one entry per rank |
| ``SPLIT`` | everyone | items split over data-parallel parts, the rest whole | items in order, else list of parts' |
| ``RANK_ZERO``, ``OneRank(r)`` | one rank | as given | that rank's |
| ``PER_RANK`` | everyone | lists with one entry per rank | list with one entry per rank |
| ``Custom(distribute, collect)`` | as ``distribute`` says | as ``distribute`` says | what ``collect`` makes |
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from quartet.batch.ragged import RaggedBatch
from quartet.cluster.balance import plan_parts
from quartet.cluster.items import PerRank, Positions, Share, Whole, arrange, cut, is_items, num_items, placed
from quartet.cluster.layout import Layout
from quartet.cluster.structure import Structure

_F = TypeVar("_F", bound=Callable[..., Any])
_origins = itertools.count()


@dataclass(frozen=True)
class Call:
    """Arguments for one rank, and where the call is split its share of the items."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    share: Share | None = None


@dataclass(frozen=True)
class CallPlan:
    """One call per rank (None: not called), the ranks whose results count, and what becomes of those.

    Attributes:
        target: the segment table of all items together, where a split batch has one.
        is_split: results are parts of one whole.
    """

    calls: Sequence[Call | None]
    answers: Sequence[int]
    collect: Callable[[list[Any]], Any]
    target: Structure | None = None
    is_split: bool = False


class DispatchMode(Protocol):
    """A way to distribute a call."""

    def plan(self, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan: ...


@dataclass(frozen=True)
class Broadcast:
    """Every rank gets the same arguments, but of a ``PerRank`` its own entry."""

    def plan(self, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
        ranks = range(layout.world_size)
        if not any(isinstance(value, PerRank) for value in (*args, *kwargs.values())):
            return CallPlan([Call(args, kwargs)] * layout.world_size, ranks, list)
        return CallPlan([_each(layout, rank, args, kwargs) for rank in ranks], ranks, list)


@dataclass(frozen=True)
class PerRankLists:
    """Every argument is a list with one entry per rank."""

    def plan(self, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
        wrapped = tuple(PerRank(value) for value in args)
        named = {name: PerRank(value) for name, value in kwargs.items()}
        ranks = range(layout.world_size)
        return CallPlan([_each(layout, rank, wrapped, named) for rank in ranks], ranks, list)


@dataclass(frozen=True)
class OneRank:
    """Only ``rank`` is called, and its result returned."""

    rank: int

    def plan(self, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
        if not 0 <= self.rank < layout.world_size:
            raise ValueError(f"there is no rank {self.rank} among {layout.world_size}")
        calls = [Call(args, kwargs) if rank == self.rank else None for rank in range(layout.world_size)]
        return CallPlan(calls, [self.rank], lambda results: results[0])


@dataclass(frozen=True)
class Custom:
    """A mode made of two functions.

    Args:
        distribute: ``(layout, *args, **kwargs)`` → per rank ``(args, kwargs)``, or None for a rank that is not called.
        collect: ``(layout, results)`` → the call's result; results of ranks that were not called are None.
    """

    distribute: Callable[..., Sequence[tuple[tuple[Any, ...], dict[str, Any]] | None]]
    collect: Callable[[Layout, list[Any]], Any]

    def plan(self, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
        given = list(self.distribute(layout, *args, **kwargs))
        if len(given) != layout.world_size:
            raise ValueError(f"distribute returned {len(given)} entries for {layout.world_size} ranks")
        called = [rank for rank, entry in enumerate(given) if entry is not None]

        def collect(results: list[Any]) -> Any:
            of_rank = dict(zip(called, results, strict=True))
            return self.collect(layout, [of_rank.get(rank) for rank in range(layout.world_size)])

        return CallPlan([Call(*entry) if entry is not None else None for entry in given], called, collect)


@dataclass(frozen=True)
class Split:
    """Items are split over the data-parallel parts; all ranks of a part get the same, and one of them answers.

    Ragged batches, column sets, tensors, arrays and lists hold an entry per item and must hold equally many; all other
    arguments, and what is wrapped in ``Whole``, go to every rank. A ragged batch decides who gets what: parts have
    about equal tokens, groups stay whole where that is possible. Without one, items are dealt out in order. Where
    there are fewer items than parts, some parts are empty.

    Args:
        results: ``items``: results that hold an entry per item of their part (or equally many for each) are put back
            in the order of the arguments, tuples of them one by one; others form a list with an entry per part.
            ``parts``: always a list with an entry per part.
    """

    results: Literal["items", "parts"] = "items"

    def plan(self, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
        structure, count = survey([*args, *kwargs.values()])
        parts = plan_parts(count, layout.parts, structure)
        shares = [Share(part, structure.select(part) if structure is not None else None) for part in parts]
        of_part = [
            Call(
                tuple(portion(value, share.positions, structure) for value in args),
                {name: portion(value, share.positions, structure) for name, value in kwargs.items()},
                share,
            )
            for share in shares
        ]

        def collect(results: list[Any]) -> Any:
            return self.merge(results, shares, structure)

        return CallPlan([of_part[part] for part in layout.part_of], layout.answering, collect, structure, is_split=True)

    def merge(self, results: list[Any], shares: Sequence[Share], target: Structure | None) -> Any:
        """Results of parts with these items as the call's result."""
        return list(results) if self.results == "parts" else merge_results(results, shares, target)


BROADCAST, RANK_ZERO, PER_RANK, SPLIT = Broadcast(), OneRank(0), PerRankLists(), Split()


def survey(values: Sequence[Any]) -> tuple[Structure | None, int]:
    """The structure of the batch among the values, if there is one, and the number of items of all.

    Raises:
        ValueError: nothing holds items, or values hold different numbers of them.
    """
    found = [value for value in values if is_items(value)]
    counts = {num_items(value) for value in found}
    if len(counts) != 1:
        kinds = [f"{type(value).__name__} of {num_items(value)}" for value in found]
        raise ValueError(f"a split call needs arguments with equally many items, found {', '.join(kinds) or 'none'}")
    batch = next((value for value in found if isinstance(value, RaggedBatch)), None)
    return Structure.of(batch, f"split-{next(_origins)}") if batch is not None else None, counts.pop()


def portion(value: Any, part: Positions, structure: Structure | None) -> Any:
    """What a part gets of an argument."""
    if isinstance(value, Whole):
        return value.value
    return cut(value, part, structure) if is_items(value) else value


def merge_results(results: Sequence[Any], shares: Sequence[Share], target: Structure | None) -> Any:
    """Results of parts as one value; ``shares`` are what the parts were given, ``target`` the table of all items."""
    first = results[0]
    if isinstance(first, tuple) and all(isinstance(r, tuple) and len(r) == len(first) for r in results):
        return tuple(merge_results(each, shares, target) for each in zip(*results, strict=True))
    if all(result is None for result in results):
        return None
    if not all(is_items(result) for result in results):
        return list(results)
    made = [placed(result, share) for result, share in zip(results, shares, strict=True)]
    kept = target is not None and all(own.table is given.table for own, given in zip(made, shares, strict=True))
    return arrange(results, made, target if kept else None)


def _each(layout: Layout, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    def mine(value: Any) -> Any:
        if not isinstance(value, PerRank):
            return value
        if len(value.values) != layout.world_size:
            raise ValueError(f"{len(value.values)} values for {layout.world_size} ranks")
        return value.values[rank]

    return Call(tuple(mine(value) for value in args), {name: mine(value) for name, value in kwargs.items()})


# The mark ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """How a method is called on its group.

    ``chunks``: references into which each part of a result that travels to another group is divided.
    """

    mode: DispatchMode
    blocking: bool = True
    chunks: int = 1


def dispatch(mode: DispatchMode = BROADCAST, *, blocking: bool = True, chunks: int = 1) -> Callable[[_F], _F]:
    """Marks a worker's method: its group gets a method of the same name.

    Args:
        mode: who is called with what, and what becomes of the results.
        blocking: otherwise the group's method returns a ``BatchFuture`` at once.
        chunks: pieces into which each part of a non-blocking call's result is divided, so that a group with another
            split fetches no more than it needs.
    """
    if chunks < 1:
        raise ValueError(f"a result has at least one chunk, found chunks={chunks}")

    def mark(method: _F) -> _F:
        method.__quartet_dispatch__ = Mark(mode, blocking, chunks)  # type: ignore[attr-defined]
        return method

    return mark


def marks_of(cls: type) -> dict[str, Mark]:
    """The marked methods of a class by name; an override keeps the mark of what it overrides."""
    found: dict[str, Mark] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if isinstance(mark := getattr(value, "__quartet_dispatch__", None), Mark):
                found[name] = mark
    return found
