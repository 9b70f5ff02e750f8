"""Values that hold one entry per item: cut by item, and put back in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from quartet.batch.columns import ColumnSet
from quartet.batch.ragged import RaggedBatch
from quartet.cluster.structure import Sources, Structure, combine, gather_tokens, sources

Positions: TypeAlias = Sequence[int]
"""Where the items of a part stand among all items; a range where they stand together, as there may be many."""


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
    kept = structure.kept(indices)
    token = {}
    for name, values in columns.token.items():
        pieces = values.split(structure.lengths)
        token[name] = torch.cat([pieces[k] for k in kept]) if kept else values[:0]
    return ColumnSet(ids, token, sequence)


# Back in order -------------------------------------------------------------------------------------------


def placed(value: Any, given: Positions, structure: Structure | None) -> tuple[Positions, Structure | None]:
    """Where the items of a result stand, and its structure.

    A result holds its part's items in order, or equally many for each of them (the responses to a prompt).

    Args:
        value: items that a worker made of its part.
        given: positions of the part's items.
        structure: of the batch in the part.

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
    if isinstance(given, range):
        positions = range(given.start * times, given.stop * times)
    else:
        positions = [p * times + i for p in given for i in range(times)]
    if isinstance(value, RaggedBatch):
        same = structure is not None and structure.describes(value)
        return positions, structure if same else Structure.of(value)
    if isinstance(value, ColumnSet) and structure is not None and structure.fits(value):
        return positions, structure
    return positions, None


@dataclass(frozen=True)
class Part:
    """Items of a value, where they stand among all of them, and their segment table where they have one."""

    value: Any
    positions: Positions
    structure: Structure | None = None


def arrange(parts: Sequence[Part], target: Structure | None = None, origin: str | None = None) -> Any:
    """One value of all parts' items, in the order of their positions.

    Args:
        parts: together they hold every position once.
        target: the segment table that the result shall have; by default the one of all parts together.

    Raises:
        ValueError: positions are missing or twice, or parts of one value are of several kinds.
    """
    order = _order([part.positions for part in parts])
    held = [part for part in parts if len(part.positions)] or list(parts[:1])
    values = [part.value for part in held]
    if len({type(value) for value in values}) > 1:
        raise ValueError(f"parts of one value are of several kinds: {sorted({type(v).__name__ for v in values})}")
    first = values[0]
    if isinstance(first, (RaggedBatch, ColumnSet)):
        return _arrange_sequences(held, order, target, origin)
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


def _arrange_sequences(
    parts: Sequence[Part], order: Sequence[int] | None, target: Structure | None, origin: str | None
) -> RaggedBatch | ColumnSet:
    tables = [part.structure for part in parts]
    known = [table for table in tables if table is not None]
    values = [part.value for part in parts]
    if isinstance(values[0], ColumnSet):
        return _arrange_columns(values, order, known if len(known) == len(parts) else None, parts, target, origin)
    if len(known) < len(parts):
        known = [Structure.of(value) for value in values]
    positions = [part.positions for part in parts]
    table = target if target is not None else combine(known, positions, origin)
    where = sources(table, known, positions)
    if None in where:  # a segment that no sequence needs has no tokens to put there
        table = combine(known, positions, origin)
        where = sources(table, known, positions)
    return _assemble(values, known, table, where, order)


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
    order: Sequence[int] | None,
    tables: Sequence[Structure] | None,
    parts: Sequence[Part],
    target: Structure | None,
    origin: str | None,
) -> ColumnSet:
    ids = [i for part in columns for i in part.ids]
    sequence = {name: _reordered([part.sequence[name] for part in columns], order) for name in columns[0].sequence}
    token = {}
    if columns[0].token:
        if tables is None:
            raise ValueError(f"token columns {sorted(columns[0].token)} came without the batch that they belong to")
        positions = [part.positions for part in parts]
        table = target if target is not None else combine(tables, positions, origin)
        where = sources(table, tables, positions)
        token = {
            name: gather_tokens(name, table, where, [(t, c.token[name]) for t, c in zip(tables, columns, strict=True)])
            for name in columns[0].token
        }
    return ColumnSet(tuple(ids if order is None else (ids[i] for i in order)), token, sequence)
