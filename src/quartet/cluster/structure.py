"""The segment table of a ragged batch without its tokens: enough to plan parts and to put columns back in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

import torch

from quartet.batch.columns import ColumnSet
from quartet.batch.ragged import RaggedBatch

_NOWHERE = ("",)  # an outline refers to something; nothing fills this one


@dataclass(frozen=True)
class Structure:
    """Segments and sequences of a batch, and a name for each segment.

    Segments of two structures that are named alike are one and the same: both were cut from one table.

    Args:
        table: an outline without any field.
    """

    table: RaggedBatch
    names: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, batch: RaggedBatch) -> Structure:
        """The batch's own, whose segments are no others'."""
        table = RaggedBatch(
            torch.zeros(0, dtype=torch.int64),
            batch.segment_lengths,
            batch.parents,
            batch.leaves,
            batch.ids,
            elsewhere=_NOWHERE,
        )
        origin = uuid4().hex
        return cls(table, tuple((origin, k) for k in range(len(batch.parents))))

    def __len__(self) -> int:
        return len(self.table)

    def describes(self, batch: RaggedBatch) -> bool:
        """Whether ``batch`` has these sequences, and its token fields lie as this table says."""
        ours, theirs = ((b.ids, b.segment_lengths, b.parents, b.leaves) for b in (self.table, batch))
        return ours == theirs

    def fits(self, columns: ColumnSet) -> bool:
        size = self.table.num_tokens
        return columns.ids == self.table.ids and all(v.shape[0] == size for v in columns.token.values())

    def select(self, indices: Sequence[int]) -> Structure:
        """The structure of ``RaggedBatch.select(indices)``."""
        names = tuple(self.names[k] for k in self.table.segments_of(indices))
        return Structure(self.table.select(indices), names)

    @classmethod
    def concat(cls, parts: Sequence[Structure]) -> Structure:
        """Of batches one after the other; segments that several of them hold stand there several times."""
        return cls(RaggedBatch.concat([p.table for p in parts]), tuple(name for p in parts for name in p.names))

    def merged(self, order: Sequence[int]) -> Structure:
        """The sequences in that order, segments that are named alike stored once."""
        table, names = self.table, self.names
        first: dict[tuple[str, int], int] = {}
        for k in (k for s in order for k in table.chain(s)):
            first.setdefault(names[k], k)
        place = {name: i for i, name in enumerate(first)}
        kept = list(first.values())
        parents = [-1 if table.parents[k] < 0 else place[names[table.parents[k]]] for k in kept]
        leaves = [place[names[table.leaves[s]]] for s in order]
        lengths = [table.segment_lengths[k] for k in kept]
        return Structure(table.regrouped(kept, lengths, parents, leaves, order), tuple(first))
