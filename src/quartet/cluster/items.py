"""Values that hold one entry per item: cut by item, and put back in order; how many bytes a value has, roughly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from quartet.batch.columns import ColumnSet
from quartet.batch.ragged import RaggedBatch
from quartet.cluster.structure import Structure

Positions: TypeAlias = Sequence[int]
"""Where the items of a part stand among all items; a range where they stand together, as there may be many."""
LARGE = 64 * 2**10
"""Bytes from which one stored copy is cheaper than several sent ones."""
_DEPTH = 3
_LOOKED_AT = 1000


@dataclass(frozen=True)
class Share:
    """Some of all items: where they stand among them, and the segment table of their batch where they have one."""

    positions: Positions
    table: Structure | None = None

    def __len__(self) -> int:
        return len(self.positions)


def is_items(value: Any) -> bool:
    """Ragged batches, column sets, tensors, arrays and lists hold an entry per item; everything else is one value."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value.ndim > 0
    return isinstance(value, (RaggedBatch, ColumnSet, list))


def num_items(value: Any) -> int:
    return len(value.ids) if isinstance(value, ColumnSet) else len(value)


def cut(value: Any, indices: Positions, structure: Structure | None) -> Any:
    """The items ``indices`` of a value, in that order; ``structure`` is that of the batch beside a column set.

    Raises:
        ValueError: a column set has token fields, and no batch of its sequences is beside it.
    """
    if isinstance(value, RaggedBatch):
        return value.select(indices)
    if isinstance(value, list):
        return [value[i] for i in indices]
    if not isinstance(value, ColumnSet):
        if isinstance(indices, range):
            return value[indices.start : indices.stop]  # without a copy
        return value[_index(indices) if isinstance(value, Tensor) else np.asarray(indices, int)]
    token: Mapping[str, Tensor] = {}
    if value.token:
        if structure is None or not structure.fits(value):
            raise ValueError(
                f"token columns {sorted(value.token)} can only be split beside the batch that they belong to"
            )
        token = replace(structure.table, token=value.token).select(indices).token
    sequence = {name: values[_index(indices)] for name, values in value.sequence.items()}
    return ColumnSet(tuple(value.ids[i] for i in indices), token, sequence)


def _index(indices: Positions) -> Tensor:
    return torch.as_tensor(indices, dtype=torch.int64)


# How large -----------------------------------------------------------------------------------------------


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


# Back in order -------------------------------------------------------------------------------------------


def placed(value: Any, given: Share | None) -> Share:
    """Where the items of a result stand, and their table.

    A result holds its part's items in order, or equally many for each of them (the responses to a prompt).

    Args:
        value: items that a worker made of its part.
        given: that part; None where there are no parts.

    Raises:
        ValueError: the number of items is no multiple of the part's.
    """
    made = num_items(value)
    given = Share(range(made)) if given is None else given
    taken = len(given)
    times = made // taken if taken else 0
    if times * taken != made:
        raise ValueError(
            f"{made} results for {taken} items cannot be put back in order: return equally many for each item"
        )
    positions: Positions
    if isinstance(given.positions, range):
        positions = range(given.positions.start * times, given.positions.stop * times)
    else:
        positions = [p * times + i for p in given.positions for i in range(times)]
    table = given.table
    if isinstance(value, RaggedBatch):
        return Share(positions, table if table is not None and table.describes(value) else Structure.of(value))
    fits = isinstance(value, ColumnSet) and table is not None and table.fits(value)
    return Share(positions, table if fits else None)


def arrange(values: Sequence[Any], shares: Sequence[Share], target: Structure | None = None) -> Any:
    """One value of all values' items, in the order of their positions.

    Args:
        shares: of the values; together they hold every position once.
        target: the segment table that the result shall have; by default the one of all shares together.

    Raises:
        ValueError: positions are missing or twice, or the values are of several kinds.
    """
    order = _order([share.positions for share in shares])
    held = [i for i, share in enumerate(shares) if len(share)] or [0]
    values, shares = [values[i] for i in held], [shares[i] for i in held]
    if len({type(value) for value in values}) > 1:
        raise ValueError(f"parts of one value are of several kinds: {sorted({type(v).__name__ for v in values})}")
    first = values[0]
    if isinstance(first, RaggedBatch):
        if target is not None and len(target.table.segments_of(range(len(target)))) < len(target.names):
            target = None  # a segment that no sequence needs has no tokens to put there
        batch = RaggedBatch.concat(values) if len(values) > 1 else first
        structures = [s.table if s.table is not None else Structure.of(v) for v, s in zip(values, shares, strict=True)]
        return _regrouped(batch, Structure.concat(structures), order, target)
    if isinstance(first, ColumnSet):
        columns = ColumnSet.concat(values) if len(values) > 1 else first
        if not columns.token:
            return columns if order is None else cut(columns, order, None)
        known = [share.table for share in shares if share.table is not None]
        if len(known) < len(shares):
            raise ValueError(f"token columns {sorted(columns.token)} came without the batch that they belong to")
        own = Structure.concat(known)
        batch = replace(own.table, token=columns.token, sequence=columns.sequence)
        batch = _regrouped(batch, own, order, target)
        return ColumnSet(batch.ids, batch.token, batch.sequence)
    if isinstance(first, list):
        joined = [item for value in values for item in value]
        return joined if order is None else [joined[i] for i in order]
    if isinstance(first, Tensor):
        whole = torch.cat(list(values)) if len(values) > 1 else first
        return whole if order is None else whole[_index(order).to(whole.device)]
    array = np.concatenate(values)
    return array if order is None else array[order]


def _order(positions: Sequence[Positions]) -> list[int] | None:
    """For each position the place of its item in the parts one after the other; None where all are in place."""
    if all(isinstance(at, range) for at in positions):
        bounds = [(at[0], at[-1] + 1) for at in positions if len(at)]
        if [start for start, _ in bounds] == [0, *(stop for _, stop in bounds)][:-1]:
            return None
    flat = [p for at in positions for p in at]
    order = sorted(range(len(flat)), key=flat.__getitem__)
    if any(flat[i] != p for p, i in enumerate(order)):
        raise ValueError(f"items are missing or twice: positions {flat[:8]}… of {len(flat)}")
    return None if flat == list(range(len(flat))) else order


def _regrouped(
    batch: RaggedBatch, own: Structure, order: Sequence[int] | None, target: Structure | None
) -> RaggedBatch:
    """A batch of parts one after the other, ``own`` its structure, in that order and over the target's segments."""
    places = range(len(batch)) if order is None else order
    target = own.merged(places) if target is None else target
    if order is None and target.describes(batch):
        return batch  # as it is: it may be large
    table = target.table
    segments: list[int | None] = [None] * len(table.parents)
    for s in reversed(range(len(places))):  # of a segment that several parts hold the first one's values count
        for k, held in zip(table.chain(s), batch.chain(places[s]), strict=True):
            segments[k] = held
    return batch.regrouped(segments, table.segment_lengths, table.parents, table.leaves, places)
