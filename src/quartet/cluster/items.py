"""Values that hold one entry per item: cut by item, and put back in order; how many bytes a value has, roughly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from quartet.batch.columns import ColumnSet
from quartet.batch.ragged import RaggedBatch
from quartet.cluster.structure import Sources, Structure, combine_structures, gather_tokens, sources

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


@dataclass(frozen=True)
class Whole:
    """An argument that every rank gets whole, although it looks like one entry per item: ``Whole([0.1, 0.9])``."""

    value: Any


@dataclass(frozen=True)
class PerRank:
    """An argument of which rank r gets ``values[r]``; a batch future of another group serves as such values, too."""

    values: Sequence[Any]


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
        if structure is None or not structure.describes(value):
            return value.select(indices)
        # Whole segments are copied at the speed of memory; ``select`` picks token by token.
        where: Sources = [(0, k) for k in structure.kept(indices)]
        return _assemble([value], [structure], structure.select(indices), where, indices)
    if isinstance(value, ColumnSet):
        return _cut_columns(value, indices, structure)
    if isinstance(value, list):
        return [value[i] for i in indices]
    if isinstance(indices, range):
        return value[indices.start : indices.stop]  # without a copy
    return value[torch.as_tensor(indices, dtype=torch.int64) if isinstance(value, Tensor) else np.asarray(indices, int)]


def _cut_columns(columns: ColumnSet, indices: Positions, structure: Structure | None) -> ColumnSet:
    picked = torch.as_tensor(indices, dtype=torch.int64)
    sequence = {name: values[picked] for name, values in columns.sequence.items()}
    ids = tuple(columns.ids[i] for i in indices)
    if not columns.token:
        return ColumnSet(ids, {}, sequence)
    if structure is None or not structure.fits(columns):
        raise ValueError(
            f"token columns {sorted(columns.token)} can only be split beside the batch that they belong to"
        )
    where: Sources = [(0, k) for k in structure.kept(indices)]
    target = structure.select(indices)
    token = {name: gather_tokens(name, target, where, [(structure, values)]) for name, values in columns.token.items()}
    return ColumnSet(ids, token, sequence)


# How large -----------------------------------------------------------------------------------------------


def is_large(value: Any) -> bool:
    return num_bytes(value) >= LARGE


def num_bytes(value: Any, depth: int = _DEPTH) -> int:
    """Bytes of the tensors, arrays and strings in a value; what lies deeper than a few containers is not looked at."""
    if isinstance(value, (Tensor, np.ndarray)):
        return int(value.nbytes)
    if isinstance(value, (bytes, bytearray, str)):
        return len(value)
    if isinstance(value, RaggedBatch):
        # Ids that are elsewhere are a view of one element.
        fields = [value.input_ids if value.has_ids else value.input_ids[:1]]
        fields += [*value.token.values(), *value.sequence.values()]
        return sum(f.nbytes for f in fields)
    if isinstance(value, ColumnSet):
        return sum(f.nbytes for f in (*value.token.values(), *value.sequence.values()))
    if depth and isinstance(value, Mapping):
        value = list(value.values())
    if depth and isinstance(value, (list, tuple)):
        looked = value[:_LOOKED_AT]
        return sum(num_bytes(item, depth - 1) for item in looked) * len(value) // max(len(looked), 1)
    return 8


# Back in order -------------------------------------------------------------------------------------------


def placed(value: Any, given: Share) -> Share:
    """Where the items of a result stand, and their table.

    A result holds its part's items in order, or equally many for each of them (the responses to a prompt).

    Args:
        value: items that a worker made of its part.
        given: that part.

    Raises:
        ValueError: the number of items is no multiple of the part's.
    """
    made, taken = num_items(value), len(given)
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


def arrange(
    values: Sequence[Any], shares: Sequence[Share], target: Structure | None = None, origin: str | None = None
) -> Any:
    """One value of all values' items, in the order of their positions.

    Args:
        shares: of the values; together they hold every position once.
        target: the segment table that the result shall have; by default the one of all shares together.
        origin: a name for that.

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
        return _arrange_batches(values, shares, order, target, origin)
    if isinstance(first, ColumnSet):
        return _arrange_columns(values, shares, order, target, origin)
    if isinstance(first, list):
        joined = [item for value in values for item in value]
        return joined if order is None else [joined[i] for i in order]
    if isinstance(first, Tensor):
        return _reordered(values, order)
    whole = np.concatenate(values)
    return whole if order is None else whole[order]


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


def _reordered(values: Sequence[Tensor], order: Sequence[int] | None) -> Tensor:
    joined = torch.cat(list(values)) if len(values) > 1 else values[0]
    return joined if order is None else joined[torch.as_tensor(order, dtype=torch.int64, device=joined.device)]


def _arrange_batches(
    batches: Sequence[RaggedBatch],
    shares: Sequence[Share],
    order: Sequence[int] | None,
    target: Structure | None,
    origin: str | None,
) -> RaggedBatch:
    known = [share.table for share in shares if share.table is not None]
    tables = known if len(known) == len(shares) else [Structure.of(batch) for batch in batches]
    positions = [share.positions for share in shares]
    table = target if target is not None else combine_structures(tables, positions, origin)
    where = sources(table, tables, positions)
    if None in where:  # a segment that no sequence needs has no tokens to put there
        table = combine_structures(tables, positions, origin)
        where = sources(table, tables, positions)
    return _assemble(batches, tables, table, where, order)


def _assemble(
    batches: Sequence[RaggedBatch],
    tables: Sequence[Structure],
    table: Structure,
    where: Sources,
    order: Sequence[int] | None,
) -> RaggedBatch:
    """A batch with the given table; everything that is no token field is joined and reordered by the batch itself."""

    def tokens(name: str, fields: Sequence[Tensor]) -> Tensor:
        return gather_tokens(name, table, where, list(zip(tables, fields, strict=True)))

    bare = [_without_tokens(batch) for batch in batches]
    rest = RaggedBatch.concat(bare)
    if order is not None:
        rest = rest.select(order)
    return RaggedBatch(
        input_ids=tokens("input_ids", [b.input_ids for b in batches]) if rest.has_ids else rest.input_ids,
        segment_lengths=table.lengths,
        parents=table.parents,
        leaves=table.leaves,
        ids=rest.ids,
        token={name: tokens(name, [b.token[name] for b in batches]) for name in batches[0].token},
        sequence=rest.sequence,
        objects=rest.objects,
        elsewhere=rest.elsewhere,
    )


def _without_tokens(batch: RaggedBatch) -> RaggedBatch:
    """Its sequences with one token each and everything that belongs to sequences."""
    return RaggedBatch(
        input_ids=torch.zeros(len(batch), dtype=torch.int64),
        segment_lengths=(1,) * len(batch),
        parents=(-1,) * len(batch),
        leaves=tuple(range(len(batch))),
        ids=batch.ids,
        sequence=batch.sequence,
        objects=batch.objects,
        elsewhere=batch.elsewhere,
    )


def _arrange_columns(
    columns: Sequence[ColumnSet],
    shares: Sequence[Share],
    order: Sequence[int] | None,
    target: Structure | None,
    origin: str | None,
) -> ColumnSet:
    ids = [i for part in columns for i in part.ids]
    sequence = {name: _reordered([part.sequence[name] for part in columns], order) for name in columns[0].sequence}
    token = {}
    if columns[0].token:
        tables = [share.table for share in shares if share.table is not None]
        if len(tables) < len(shares):
            raise ValueError(f"token columns {sorted(columns[0].token)} came without the batch that they belong to")
        positions = [share.positions for share in shares]
        table = target if target is not None else combine_structures(tables, positions, origin)
        where = sources(table, tables, positions)
        token = {
            name: gather_tokens(name, table, where, [(t, c.token[name]) for t, c in zip(tables, columns, strict=True)])
            for name in columns[0].token
        }
    return ColumnSet(tuple(ids if order is None else (ids[i] for i in order)), token, sequence)
