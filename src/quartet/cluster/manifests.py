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
from quartet.cluster.items import Positions, Share, arrange, cut, is_items, is_large, placed
from quartet.cluster.structure import combine_structures


@dataclass(frozen=True)
class ObjectManifest:
    """What a worker says of its part of a result.

    Attributes:
        chunks: one share per reference; empty where the result holds no items, which is one reference, too.
        given: what the worker was given; None where the call was not split.
        is_small: the part has so few bytes that it travels with this manifest.
        note: what the worker says of a ``Noted`` result.
    """

    chunks: tuple[Share, ...]
    given: Share | None
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
    """

    parts: tuple[PartRefs, ...]
    part: int | None = None
    of: int = 1
    direct: bool = False


class Upstream(Exception):
    """What a call was to work on does not exist: the call that should have made it failed."""

    def __init__(self, outcome: Failure | Lost) -> None:
        self.outcome = outcome
        super().__init__(outcome)


Fetch = Callable[[Sequence[Any]], list[Any]]
"""References → values; a value may be a ``Failure`` or ``Lost``."""


def divide(value: Any, given: Share | None, chunks: int) -> tuple[ObjectManifest, list[Any]]:
    """A result as a manifest and so many chunks (None where there are fewer).

    Args:
        given: the worker's share of the items; None where the call was not split.

    Raises:
        ValueError: the result of a split call holds items whose number is no multiple of those given.
    """
    if isinstance(value, Noted):
        manifest, pieces = divide(value.value, given, chunks)
        return replace(manifest, note=value.note), pieces
    manifest = ObjectManifest((), given, not is_large(value))
    if not is_items(value):
        return manifest, [value] + [None] * (chunks - 1)
    share = placed(value, given)
    if chunks == 1:
        return replace(manifest, chunks=(share,)), [value]
    plan = plan_parts(len(share), chunks, share.table)
    shares = [
        Share(_at(share.positions, at), share.table.select(at) if share.table is not None else None) for at in plan
    ]
    return replace(manifest, chunks=tuple(shares)), [cut(value, at, share.table) for at in plan]


def share_of(manifests: Sequence[ObjectManifest], gather: Gather) -> Share:
    """The reader's part, in ascending order.

    Raises:
        ValueError: a result holds no items and cannot be split.
    """
    chunks = [chunk for manifest in manifests for chunk in manifest.chunks]
    if not chunks:
        raise ValueError("the result of the other group holds no items, so it cannot be split; pass it whole")
    positions = [chunk.positions for chunk in chunks]
    tables = [chunk.table for chunk in chunks if chunk.table is not None]
    table = combine_structures(tables, positions) if len(tables) == len(chunks) else None
    if gather.direct:
        return Share(positions[0] if len(chunks) == 1 else sorted(p for at in positions for p in at), table)
    part = plan_parts(sum(map(len, positions)), gather.of, table, positions)[gather.part or 0]
    return Share(part, table.select(part) if table is not None else None)


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


def fetch_value(fetch: Fetch, gather: Gather, manifests: Sequence[ObjectManifest], share: Share | None) -> Any:
    """The items of ``share`` from the chunks that hold them; None: all in order, or a result without items.

    Raises:
        Upstream: a part does not exist.
        ValueError: an item is in no chunk, or several ranks returned one value each.
    """
    chunks = [
        (ref, chunk, *_overlap(chunk.positions, None if share is None else share.positions))
        for part, manifest in zip(gather.parts, manifests, strict=True)
        for ref, chunk in zip(part.chunks, manifest.chunks, strict=False)
    ]
    if share is None and not chunks:
        if len(gather.parts) > 1:
            raise ValueError(f"{len(gather.parts)} ranks returned a value each, so there is no single one to pass on")
        return checked(fetch(gather.parts[0].chunks[:1]))[0]
    # An empty chunk is fetched only where nothing else is there to say what kind the value is of.
    needed = [entry for entry in chunks if len(entry[2])] or chunks[:1]
    values, shares = [], []
    for value, (_, chunk, local, at) in zip(checked(fetch([ref for ref, *_ in needed])), needed, strict=True):
        is_whole = len(local) == len(chunk)
        values.append(value if is_whole else cut(value, local, chunk.table))
        shares.append(Share(at, chunk.table if is_whole or chunk.table is None else chunk.table.select(local)))
    if share is None:
        return arrange(values, shares)
    if (found := sum(map(len, shares))) != len(share):
        raise ValueError(
            f"two results that are split together hold other items: {len(share)} are wanted, {found} of them found"
        )
    return arrange(values, shares, share.table)


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


# Token ids alone -----------------------------------------------------------------------------------------


def with_ids(fetch: Fetch, values: Sequence[Any]) -> list[Any]:
    """Arguments, with their token ids in all outlines among them, also in lists and tuples of batches.

    Raises:
        Upstream: the call that should have made the ids failed.
        ValueError: a sequence's ids are not where its batch says, or a reference is not to batches.
    """
    gathers: dict[int, Gather] = {}
    for gather in (gather for value in values for batch in _batches(value) for gather in batch.elsewhere):
        if not isinstance(gather, Gather):
            raise ValueError(f"the token ids of a batch are in results of calls, not in a {type(gather).__name__}")
        gathers[id(gather)] = gather
    refs = [(key, ref) for key, gather in gathers.items() for part in gather.parts for ref in part.chunks]
    sources: dict[int, list[RaggedBatch]] = {key: [] for key in gathers}
    for (key, _), source in zip(refs, checked(fetch([ref for _, ref in refs])) if refs else [], strict=True):
        if not isinstance(source, RaggedBatch):
            raise ValueError(f"the token ids of a batch are in other batches, not in a {type(source).__name__}")
        sources[key].append(source)

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
