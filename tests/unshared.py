"""A ragged batch as independent sequences: what its operations and computations are compared with."""

from __future__ import annotations

from dataclasses import replace

import torch

from quartet.batch.ragged import RaggedBatch


def rows_of(batch: RaggedBatch, s: int) -> list[int]:
    """Stored tokens of sequence ``s``, its ancestors' first."""
    offsets = batch.segment_offsets
    return [t for k in batch.chain(s) for t in range(offsets[k], offsets[k + 1])]


def unshared(batch: RaggedBatch) -> RaggedBatch:
    """Every sequence as one root segment; fields are copied, masks are 0 on what were ancestors' tokens."""
    sequences = range(len(batch))
    rows = torch.tensor([t for s in sequences for t in rows_of(batch, s)])
    is_own = torch.tensor([t >= batch.leaf_span(s)[0] for s in sequences for t in rows_of(batch, s)])
    token = {name: values[rows] for name, values in batch.token.items()}
    return replace(
        batch,
        input_ids=batch.input_ids[rows],
        segment_lengths=tuple(batch.sequence_lengths()),
        parents=(-1,) * len(batch),
        leaves=tuple(sequences),
        token={name: values & is_own if name.endswith("_mask") else values for name, values in token.items()},
    )
