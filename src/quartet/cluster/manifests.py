"""Results that stay where they were made: what is known of them, and how a worker that is given one fetches it.

A non-blocking call leaves each rank's result in the object store as one reference, with a small manifest beside it. An
argument made of such a result is a ``Reference``, which the worker that receives it fetches; the driver need not wait
for the first call before it makes the next.

Of a batch only the token ids may stay behind: an outline (``RaggedBatch.elsewhere``) holds ``Reference``s to batches
that have them, and the worker that receives it as an argument puts them in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.cluster.errors import Failure, Lost


@dataclass(frozen=True)
class ObjectManifest:
    """What a worker says of its result.

    Attributes:
        is_small: it has so few bytes that it travels with this manifest.
        note: what the worker says of a ``Noted`` result.
    """

    is_small: bool
    note: Any = None


@dataclass(frozen=True)
class Noted:
    """A worker's result that stays where it was made, and what the driver is told of it with the manifest."""

    value: Any
    note: Any


@dataclass(frozen=True)
class Reference:
    """An argument that its reader fetches: a worker's result, by the back end's reference to it."""

    ref: Any


class Upstream(Exception):
    """What a call was to work on does not exist: the call that should have made it failed."""

    def __init__(self, outcome: Failure | Lost) -> None:
        self.outcome = outcome
        super().__init__(outcome)


Fetch = Callable[[Sequence[Any]], list[Any]]
"""References → values; a value may be a ``Failure`` or ``Lost``."""


def fetched(fetch: Fetch, values: Sequence[Any]) -> list[Any]:
    """Arguments, with what they refer to in the place of references, and with their token ids in all outlines.

    Raises:
        Upstream: the call that should have made one of them failed.
        ValueError: as ``with_ids``.
    """
    found = iter(_checked(fetch, [value.ref for value in values if isinstance(value, Reference)]))
    return with_ids(fetch, [next(found) if isinstance(value, Reference) else value for value in values])


def _checked(fetch: Fetch, refs: Sequence[Any]) -> list[Any]:
    """The values, unless one of them stands for a call that failed."""
    values = fetch(refs) if refs else []
    for value in values:
        if isinstance(value, (Failure, Lost)):
            raise Upstream(value)
    return values


def with_ids(fetch: Fetch, values: Sequence[Any]) -> list[Any]:
    """Arguments, with their token ids in all outlines among them, also in lists and tuples of batches.

    Raises:
        Upstream: the call that should have made the ids failed.
        ValueError: a sequence's ids are not where its batch says, or a reference is not to batches.
    """
    references: dict[int, Reference] = {}
    for reference in (ref for value in values for batch in _batches(value) for ref in batch.elsewhere):
        if not isinstance(reference, Reference):
            raise ValueError(f"the token ids of a batch are in results of calls, not in a {type(reference).__name__}")
        references[id(reference)] = reference
    found = _checked(fetch, [reference.ref for reference in references.values()])
    for source in found:
        if not isinstance(source, RaggedBatch):
            raise ValueError(f"the token ids of a batch are in other batches, not in a {type(source).__name__}")
    sources: dict[int, RaggedBatch] = dict(zip(references, found, strict=True))

    def fill(batch: RaggedBatch) -> RaggedBatch:
        return batch.filled([sources[id(reference)] for reference in batch.elsewhere])

    return [
        fill(value) if isinstance(value, RaggedBatch) else type(value)(map(fill, value)) if _batches(value) else value
        for value in values
    ]


def _batches(value: Any) -> Sequence[RaggedBatch]:
    if isinstance(value, RaggedBatch):
        return [value]
    is_plain = type(value) in (list, tuple)
    return value if is_plain and all(isinstance(item, RaggedBatch) for item in value) else ()


# How large -----------------------------------------------------------------------------------------------

LARGE = 64 * 2**10
"""Bytes from which one stored copy is cheaper than several sent ones."""
_DEPTH = 3
_LOOKED_AT = 1000


def is_large(value: Any) -> bool:
    return num_bytes(value) >= LARGE


def num_bytes(value: Any, depth: int = _DEPTH) -> int:
    """Bytes of the tensors, arrays and strings in a value; what lies deeper than a few containers is not looked at."""
    if isinstance(value, (Tensor, np.ndarray)):
        return int(value.nbytes)
    if isinstance(value, (bytes, bytearray, str)):
        return len(value)
    if isinstance(value, (RaggedBatch, ColumnSet)):
        fields = [*value.token.values(), *value.sequence.values()]
        # Ids that are elsewhere are a view of one element.
        fields += [value.input_ids] if isinstance(value, RaggedBatch) and value.has_ids else []
        return sum(f.nbytes for f in fields)
    if depth and isinstance(value, Mapping):
        value = list(value.values())
    if depth and isinstance(value, (list, tuple)):
        looked = value[:_LOOKED_AT]
        return sum(num_bytes(item, depth - 1) for item in looked) * len(value) // max(len(looked), 1)
    return 8
