"""The segment table of a ragged batch without its tokens: enough to plan parts and to put columns back in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quartet.batch.columns import ColumnSet
from quartet.batch.ragged import RaggedBatch


@dataclass(frozen=True)
class Structure:
    """Segments and sequences as in ``RaggedBatch``.

    Segments of two structures are one and the same where ``origin`` and their ``keys`` are equal: both were cut from
    one table. Without an origin a structure's segments are its own.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    leaves: tuple[int, ...]
    ids: tuple[str, ...]
    origin: str | None
    keys: tuple[int, ...]

    @classmethod
    def of(cls, batch: RaggedBatch, origin: str | None = None) -> Structure:
        keys = tuple(range(len(batch.segment_lengths)))
        return cls(batch.segment_lengths, batch.parents, batch.leaves, batch.ids, origin, keys)

    def __len__(self) -> int:
        return len(self.leaves)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def chain(self, s: int) -> list[int]:
        """Segments of sequence ``s`` from its root to its leaf."""
        found = []
        k = self.leaves[s]
        while k >= 0:
            found.append(k)
            k = self.parents[k]
        return found[::-1]

    def describes(self, batch: RaggedBatch) -> bool:
        """Whether ``batch`` has these sequences, and its token fields lie as this table says."""
        ours = (self.ids, self.lengths, self.parents, self.leaves)
        return ours == (batch.ids, batch.segment_lengths, batch.parents, batch.leaves)

    def fits(self, columns: ColumnSet) -> bool:
        return columns.ids == self.ids and all(v.shape[0] == self.num_tokens for v in columns.token.values())

    def kept(self, indices: Sequence[int]) -> list[int]:
        """Segments that the sequences need, in the order in which ``RaggedBatch.select`` stores them."""
        return list(dict.fromkeys(k for s in indices for k in self.chain(s)))

    def select(self, indices: Sequence[int]) -> Structure:
        """The table of ``RaggedBatch.select(indices)``."""
        kept = self.kept(indices)
        new = {k: i for i, k in enumerate(kept)}
        return Structure(
            lengths=tuple(self.lengths[k] for k in kept),
            parents=tuple(new.get(self.parents[k], -1) for k in kept),
            leaves=tuple(new[self.leaves[s]] for s in indices),
            ids=tuple(self.ids[s] for s in indices),
            origin=self.origin,
            keys=tuple(self.keys[k] for k in kept),
        )

    def names(self, part: int) -> list[tuple[str | int, int]]:
        """What each segment is called among several parts, of which this is number ``part``."""
        home = self.origin if self.origin is not None else part
        return [(home, key) for key in self.keys]


def combine_structures(parts: Sequence[Structure], positions: Sequence[Sequence[int]], origin: str | None) -> Structure:
    """The table of all parts' sequences in the order of their positions, a segment that several parts hold once.

    Its segments keep their names where all parts were cut from one table, else they are named anew under ``origin``.
    """
    names = [part.names(p) for p, part in enumerate(parts)]
    order = sorted((position, p, s) for p, at in enumerate(positions) for s, position in enumerate(at))
    index: dict[tuple[str | int, int], int] = {}
    lengths: list[int] = []
    parents: list[int] = []
    leaves: list[int] = []
    for _, p, s in order:
        parent = -1
        for k in parts[p].chain(s):
            name = names[p][k]
            if name not in index:
                index[name] = len(lengths)
                lengths.append(parts[p].lengths[k])
                parents.append(parent)
            parent = index[name]
        leaves.append(parent)
    ids = tuple(parts[p].ids[s] for _, p, s in order)
    keys = tuple(range(len(lengths)))
    if len(homes := {part.origin for part in parts}) == 1 and None not in homes:
        origin, keys = homes.pop(), tuple(key for _, key in index)
    return Structure(tuple(lengths), tuple(parents), tuple(leaves), ids, origin, keys)


Sources = list[tuple[int, int] | None]
"""Per segment of a table the part that holds it and its place there; None where no part does."""


def sources(target: Structure, parts: Sequence[Structure], positions: Sequence[Sequence[int]]) -> Sources:
    """Where to take each segment of ``target``, the table of all parts' sequences in the order of their positions."""
    places = {p: (i, s) for i, at in enumerate(positions) for s, p in enumerate(at)}
    found: Sources = [None] * len(target.lengths)
    for position in range(len(target)):
        p, s = places[position]
        for mine, theirs in zip(target.chain(position), parts[p].chain(s), strict=True):
            if found[mine] is None:
                found[mine] = (p, theirs)
    return found


def gather_tokens(name: str, target: Structure, where: Sources, parts: Sequence[tuple[Structure, Tensor]]) -> Tensor:
    """A token field ``[T]`` of ``target`` from those of the parts; 0 in segments that no part holds.

    Raises:
        ValueError: a part's field has another length than its table.
    """
    for structure, values in parts:
        if values.shape[0] != structure.num_tokens:
            raise ValueError(f"token field {name!r} has {values.shape[0]} entries for {structure.num_tokens} tokens")
    pieces = [values.split(structure.lengths) if structure.lengths else () for structure, values in parts]
    like = parts[0][1]
    chosen = [
        pieces[at[0]][at[1]] if at is not None else like.new_zeros(length, *like.shape[1:])
        for at, length in zip(where, target.lengths, strict=True)
    ]
    return torch.cat(chosen) if chosen else like[:0]
