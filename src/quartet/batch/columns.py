"""What a scoring pass returns: columns keyed by sequence id, joined to a batch without touching it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from quartet.batch.ragged import RaggedBatch


@dataclass(frozen=True)
class ColumnSet:
    """Columns of one pass over one batch.

    Args:
        ids: the sequences, in the batch's order.
        token: fields ``[T]`` in the batch's stored layout, 0 where the pass computed nothing.
        sequence: fields ``[S]``.
    """

    ids: tuple[str, ...]
    token: Mapping[str, Tensor] = field(default_factory=dict)
    sequence: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token", MappingProxyType(dict(self.token)))
        object.__setattr__(self, "sequence", MappingProxyType(dict(self.sequence)))

    def __reduce__(self) -> tuple[type[ColumnSet], tuple[object, ...]]:
        # A mapping proxy cannot be pickled, and columns travel between processes.
        return ColumnSet, (self.ids, dict(self.token), dict(self.sequence))

    @classmethod
    def concat(cls, parts: Sequence[ColumnSet]) -> ColumnSet:
        """Columns of consecutive chunks, for the concatenated batch."""
        return cls(
            ids=tuple(i for part in parts for i in part.ids),
            token={name: torch.cat([part.token[name] for part in parts]) for name in parts[0].token},
            sequence={name: torch.cat([part.sequence[name] for part in parts]) for name in parts[0].sequence},
        )


def join(batch: RaggedBatch, *columns: ColumnSet) -> RaggedBatch:
    """The batch with the columns as fields.

    Raises:
        ValueError: the columns belong to other sequences, or a field would be written twice.
    """
    for column_set in columns:
        if column_set.ids != batch.ids:
            raise ValueError(f"columns belong to sequences {column_set.ids[:3]}…, the batch has {batch.ids[:3]}…")
        taken = (set(column_set.token) & set(batch.token)) | (set(column_set.sequence) & set(batch.sequence))
        if taken:
            raise ValueError(f"the batch already has {sorted(taken)}")
        batch = batch.with_token(**column_set.token).with_sequence(**column_set.sequence)
    return batch
