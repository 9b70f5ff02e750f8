"""Results that stay where they were made: what is known of them, and how the next worker fetches its part.

A non-blocking call leaves each part of its result in the object store as one reference per chunk, and a manifest that
says where the items stand. An argument made of such a result is a ``Gather``: the worker that receives it reads the
manifests and fetches only the chunks that it needs. Planning is a function of the manifests, so all workers of a group
agree on it without communication, and the driver need not wait for the first call before it makes the next.

Of a batch only the token ids may stay behind: an outline (``RaggedBatch.elsewhere``) holds ``Gather``s of batches that
have them, and the worker that receives it as an argument puts them in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quartet.batch.ragged import RaggedBatch
from quartet.cluster.balance import plan_parts
from quartet.cluster.errors import Failure, Lost
from quartet.cluster.items import Positions, Share, arrange, cut, is_items, is_large, num_items, placed
from quartet.cluster.structure import combine_structures


@dataclass(frozen=True)
class ObjectManifest:
    """What a worker says of its part of a result.

    Attributes:
        chunks: one share per reference; empty where the result holds no items, which is one reference, too.
        given: what the worker was given.
        is_small: the part has so few bytes that it travels with this manifest.
        note: what the worker says of a ``Noted`` result.
    """

    chunks: tuple[Share, ...]
    given: Share
    is_small: bool = False
    note: Any = None

    @property
    def num_items(self) -> int:
        return sum(len(chunk) for chunk in self.chunks)


@dataclass(frozen=True)
class Noted:
    """A worker's result that stays where it was made, and what the driver is told of it with the manifest."""

    value: Any
    note: Any


@dataclass(frozen=True)
class PartRefs:
    """References to one part: its manifest (None where only the chunks are read) and its chunks."""

    manifest: Any
    chunks: tuple[Any, ...]


@dataclass(frozen=True)
class Gather:
    """An argument that its reader fetches.

    Attributes:
        parts: where it comes from.
        part: which of ``of`` parts the reader gets; None for everything.
        direct: ``parts`` is what the reader gets: both sides are split the same way.
        origin: a name for the segment table of all parts together.
    """

    parts: tuple[PartRefs, ...]
    part: int | None = None
    of: int = 1
    direct: bool = False
    origin: str = ""


class Upstream(Exception):
    """What a call was to work on does not exist: the call that should have made it failed."""

    def __init__(self, outcome: Failure | Lost) -> None:
        self.outcome = outcome
        super().__init__(outcome)


Fetch = Callable[[Sequence[Any]], list[Any]]
"""References → values; a value may be a ``Failure`` or ``Lost``."""


def divide(value: Any, given: Share | None, chunks: int, origin: str) -> tuple[ObjectManifest, list[Any]]:
    """A result as a manifest and so many chunks (None where there are fewer).

    Args:
        given: the worker's share of the items; None where the call was not split.
        origin: a name for the result's own segment table, should it have a new one.

    Raises:
        ValueError: the result of a split call holds items whose number is no multiple of those given.
    """
    if isinstance(value, Noted):
        manifest, pieces = divide(value.value, given, chunks, origin)
        return replace(manifest, note=value.note), pieces
    manifest = ObjectManifest((), given if given is not None else Share(()), not is_large(value))
    if not is_items(value):
        return manifest, [value] + [None] * (chunks - 1)
    share = placed(value, given if given is not None else Share(range(num_items(value))))
    table = share.table
    if table is not None and table.origin is None:
        table = replace(table, origin=origin)
    if chunks == 1:
        return replace(manifest, chunks=(Share(share.positions, table),)), [value]
    pieces = plan_parts(len(share), chunks, table)
    shares = [Share(_at(share.positions, at), table.select(at) if table is not None else None) for at in pieces]
    return replace(manifest, chunks=tuple(shares)), [cut(value, at, table) for at in pieces]


def share_of(manifests: Sequence[ObjectManifest], gather: Gather) -> Share:
    """The reader's part, in ascending order.

    Raises:
        ValueError: a result holds no items and cannot be split.
    """
    chunks = [chunk for manifest in manifests for chunk in manifest.chunks]
    if not chunks:
        raise ValueError("the result of the other group holds no items, so it cannot be split; pass it whole")
    tables = [chunk.table for chunk in chunks if chunk.table is not None]
    positions = [chunk.positions for chunk in chunks]
    if len(tables) < len(chunks):
        if gather.direct:
            return Share(positions[0] if len(positions) == 1 else sorted(p for at in positions for p in at))
        return Share(plan_parts(sum(len(at) for at in positions), gather.of)[gather.part or 0])
    everything = sorted(p for at in positions for p in at)
    if gather.direct:
        places = {p: i for i, p in enumerate(everything)}
        return Share(
            everything, combine_structures(tables, [[places[p] for p in at] for at in positions], gather.origin)
        )
    table = combine_structures(tables, positions, gather.origin)
    part = plan_parts(len(everything), gather.of, table, positions)[gather.part or 0]
    return Share(part, table.select(part))


def _at(positions: Positions, indices: Positions) -> Positions:
    if isinstance(positions, range) and isinstance(indices, range):
        return positions[indices.start : indices.stop]
    return [positions[i] for i in indices]


def fetch_manifests(fetch: Fetch, gathers: Sequence[Gather]) -> list[list[ObjectManifest]]:
    """Per argument the manifests of its parts.

    Raises:
        Upstream: a part does not exist.
    """
    found = iter(checked(fetch([part.manifest for gather in gathers for part in gather.parts])))
    return [[next(found) for _ in gather.parts] for gather in gathers]


def checked(values: list[Any]) -> list[Any]:
    """The values, unless one of them stands for a call that failed."""
    for value in values:
        if isinstance(value, (Failure, Lost)):
            raise Upstream(value)
    return values


def fetch_whole(fetch: Fetch, gather: Gather, manifests: Sequence[ObjectManifest]) -> Any:
    """All items of all parts in order; of a result without items the single value.

    Raises:
        Upstream: a part does not exist.
        ValueError: several ranks returned one value each.
    """
    if not any(manifest.chunks for manifest in manifests):
        if len(gather.parts) > 1:
            raise ValueError(f"{len(gather.parts)} ranks returned a value each, so there is no single one to pass on")
        return checked(fetch(gather.parts[0].chunks[:1]))[0]
    return arrange(*_chunks(fetch, gather, manifests, None), origin=gather.origin)


def fetch_part(fetch: Fetch, gather: Gather, manifests: Sequence[ObjectManifest], share: Share) -> Any:
    """The items of ``share``, from the chunks that hold them.

    Raises:
        Upstream: a part does not exist.
        ValueError: an item is in no chunk.
    """
    values, shares = _chunks(fetch, gather, manifests, share.positions)
    found = sum(map(len, shares))
    if found != len(share):
        raise ValueError(
            f"two results that are split together hold other items: {len(share)} are wanted, {found} of them found"
        )
    return arrange(values, shares, share.table, gather.origin)


def with_ids(fetch: Fetch, values: Sequence[Any]) -> list[Any]:
    """Arguments, with their token ids in all outlines among them, also in lists and tuples of batches.

    Raises:
        Upstream: the call that should have made the ids failed.
        ValueError: a sequence's ids are not where its batch says, or a reference is not to batches.
    """
    gathers: dict[int, Gather] = {}
    for batch in (batch for value in values for batch in _batches(value)):
        for gather in batch.elsewhere:
            if not isinstance(gather, Gather):
                raise ValueError(f"the token ids of a batch are in results of calls, not in a {type(gather).__name__}")
            gathers[id(gather)] = gather
    if not gathers:
        return list(values)
    refs = {key: [ref for part in gather.parts for ref in part.chunks] for key, gather in gathers.items()}
    found = iter(checked(fetch([ref for of_gather in refs.values() for ref in of_gather])))
    sources = {key: [next(found) for _ in of_gather] for key, of_gather in refs.items()}
    for source in (source for of_gather in sources.values() for source in of_gather):
        if not isinstance(source, RaggedBatch):
            raise ValueError(f"the token ids of a batch are in other batches, not in a {type(source).__name__}")

    def fill(batch: RaggedBatch) -> RaggedBatch:
        return batch.filled([source for gather in batch.elsewhere for source in sources[id(gather)]])

    return [
        fill(value) if isinstance(value, RaggedBatch) else type(value)(map(fill, value)) if _batches(value) else value
        for value in values
    ]


def _batches(value: Any) -> Sequence[RaggedBatch]:
    if isinstance(value, RaggedBatch):
        return [value]
    is_plain = type(value) in (list, tuple)
    return value if is_plain and all(isinstance(item, RaggedBatch) for item in value) else ()


def _chunks(
    fetch: Fetch, gather: Gather, manifests: Sequence[ObjectManifest], positions: Positions | None
) -> tuple[list[Any], list[Share]]:
    """The chunks that hold items at ``positions`` (None: all), cut down to these and numbered among them."""
    chunks = [
        (ref, chunk, *_overlap(chunk.positions, positions))
        for part, manifest in zip(gather.parts, manifests, strict=True)
        for ref, chunk in zip(part.chunks, manifest.chunks, strict=False)
    ]
    # An empty chunk is fetched only where nothing else is there to say what kind the value is of.
    needed = [entry for entry in chunks if len(entry[2])] or chunks[:1]
    values, shares = [], []
    for value, (_, chunk, local, at) in zip(checked(fetch([ref for ref, *_ in needed])), needed, strict=True):
        is_whole = len(local) == len(chunk)
        values.append(value if is_whole else cut(value, local, chunk.table))
        shares.append(Share(at, chunk.table if is_whole or chunk.table is None else chunk.table.select(local)))
    return values, shares


def _overlap(held: Positions, wanted: Positions | None) -> tuple[Positions, Positions]:
    """Which items of a chunk are wanted, and where they stand among the wanted ones."""
    if wanted is None:
        return range(len(held)), held
    if isinstance(held, range) and isinstance(wanted, range):
        low, high = max(held.start, wanted.start), min(held.stop, wanted.stop)
        size = max(high - low, 0)
        return range(low - held.start, low - held.start + size), range(low - wanted.start, low - wanted.start + size)
    place = {p: i for i, p in enumerate(wanted)}
    local = [i for i, p in enumerate(held) if p in place]
    return local, [place[held[i]] for i in local]
