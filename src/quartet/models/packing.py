"""From a ragged batch to what a packed forward takes, and back.

Shapes: T stored tokens of the batch, P packed tokens (every sequence with its ancestors), M selected positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quartet.batch.ragged import RaggedBatch
from quartet.models.attention import PackedAttention


@dataclass(frozen=True)
class Pack:
    """Sequences laid one after the other, sorted by length so that equal lengths share a kernel call.

    Attributes:
        input_ids: ``[P]``.
        position_ids: ``[P]``, restarting at 0 in each sequence.
        lengths: tokens of each packed sequence.
        order: the batch's sequence behind each packed one.
        source: ``[P]`` the stored token behind each packed one.
        owned: ``[P]`` bool, tokens of a leaf (not copied ancestors).
    """

    input_ids: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...]
    order: tuple[int, ...]
    source: Tensor
    owned: Tensor
    num_stored: int

    def attention(self) -> PackedAttention:
        return PackedAttention(self.lengths)

    def predicted(self, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where the stored tokens under ``mask [T]`` are predicted from.

        Returns:
            ``rows [M]`` of the packed hidden states (the token before), ``labels [M]``, and ``targets [M]``, the
            stored tokens, in packed order. Ancestors are never selected.

        Raises:
            ValueError: a selected token is the first of its sequence, so nothing predicts it.
        """
        selected = torch.nonzero(mask[self.source].bool() & self.owned).squeeze(1)
        if bool((self.position_ids[selected] == 0).any()):
            raise ValueError("the first token of a sequence is under the mask, but nothing stands before it")
        return selected - 1, self.input_ids[selected], self.source[selected]

    def last_rows(self) -> Tensor:
        """``[S]`` row of each sequence's last token, in the batch's sequence order."""
        ends = torch.tensor(self.lengths, dtype=torch.int64).cumsum(0) - 1
        rows = torch.empty_like(ends)
        rows[torch.tensor(self.order, dtype=torch.int64)] = ends
        return rows.to(self.input_ids.device)

    def scatter(self, values: Tensor, targets: Tensor) -> Tensor:
        """``[M]`` values of stored tokens → ``[T]``, 0 elsewhere."""
        out = torch.zeros(self.num_stored, dtype=values.dtype, device=values.device)
        return out.index_put((targets,), values)


def pack(batch: RaggedBatch) -> Pack:
    """Lays the batch out for a packed forward; ancestors are copied to each of their sequences."""
    full_lengths = batch.sequence_lengths()
    order = sorted(range(len(batch)), key=lambda s: (full_lengths[s], s))
    offsets = batch.segment_offsets
    source: list[Tensor] = []
    owned: list[Tensor] = []
    for s in order:
        chain = batch.chain(s)
        source.extend(torch.arange(offsets[k], offsets[k + 1]) for k in chain)
        length, leaf = full_lengths[s], batch.segment_lengths[chain[-1]]
        own = torch.zeros(length, dtype=torch.bool)
        own[length - leaf :] = True
        owned.append(own)
    lengths = tuple(full_lengths[s] for s in order)
    rows = torch.cat(source).to(batch.device)
    return Pack(
        input_ids=batch.input_ids[rows],
        position_ids=torch.cat([torch.arange(n) for n in lengths]).to(batch.device),
        lengths=lengths,
        order=tuple(order),
        source=rows,
        owned=torch.cat(owned).to(batch.device),
        num_stored=batch.num_tokens,
    )
