"""From a ragged batch to what a packed forward takes, and back.

Shapes: T stored tokens of the batch, P packed tokens, N packed segments, S sequences, M selected positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quartet.batch.ragged import RaggedBatch
from quartet.models.attention import AttentionContext, PackedAttention
from quartet.models.exact import ExactPackedAttention


@dataclass(frozen=True)
class Pack:
    """Segments laid one after the other, each followed by its descendants; equal lengths stand side by side.

    Attributes:
        input_ids: ``[P]``.
        position_ids: ``[P]``, restarting at 0 in each root and continuing in its descendants.
        lengths: ``[N]`` tokens of each packed segment.
        parents: ``[N]`` the packed segment that each continues, -1 for a root.
        leaves: ``[S]`` the packed segment that ends each sequence of the batch.
        source: ``[P]`` the stored token behind each packed one.
        owned: ``[P]`` bool, tokens of a leaf (not ancestors, whether shared or copied).
        previous: ``[P]`` the row of the token before, which predicts this one; -1 for the first token of a root.
    """

    input_ids: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    leaves: tuple[int, ...]
    source: Tensor
    owned: Tensor
    previous: Tensor
    num_stored: int

    def attention(self, *, exact: bool = False) -> AttentionContext:
        kind = ExactPackedAttention if exact else PackedAttention
        return kind(self.lengths, self.parents)

    def filled(self, num_tokens: int) -> Pack:
        """Returns a pack with a segment more that nothing reads, where this one has fewer tokens."""
        missing = num_tokens - len(self.source)
        if missing <= 0:
            return self
        zeros = self.source.new_zeros(missing)
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, zeros]),
            position_ids=torch.cat([self.position_ids, torch.arange(missing, device=zeros.device)]),
            lengths=(*self.lengths, missing),
            parents=(*self.parents, -1),
            source=torch.cat([self.source, zeros]),
            owned=torch.cat([self.owned, zeros.bool()]),
            previous=torch.cat([self.previous, zeros - 1]),
        )

    def predicted(self, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Finds where the stored tokens under ``mask [T]`` are predicted from.

        Returns:
            ``rows [M]`` of the packed hidden states (the token before; for the first token of a segment its
            parent's last), ``labels [M]``, and ``targets [M]``, the stored tokens, in packed order. Ancestors are
            never selected.

        Raises:
            ValueError: a selected token is the first of its sequence, so nothing predicts it.
        """
        selected = torch.nonzero(mask[self.source].bool() & self.owned).squeeze(1)
        rows = self.previous[selected]
        if bool((rows < 0).any()):
            raise ValueError("the first token of a sequence is under the mask, but nothing stands before it")
        return rows, self.input_ids[selected], self.source[selected]

    def own_rows(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Finds where the stored tokens under ``mask [T]`` stand themselves, in packed order.

        Returns:
            ``rows [M]`` of the packed hidden states, which have read the token, and ``targets [M]``, the stored
            tokens. Ancestors are never selected.
        """
        rows = torch.nonzero(mask[self.source].bool() & self.owned).squeeze(1)
        return rows, self.source[rows]

    def last_rows(self) -> Tensor:
        """Returns ``[S]`` row of each sequence's last token, in the batch's sequence order."""
        ends = torch.tensor(self.lengths, dtype=torch.int64).cumsum(0) - 1
        return ends[torch.tensor(self.leaves, dtype=torch.int64)].to(self.input_ids.device)

    def scatter(self, values: Tensor, targets: Tensor) -> Tensor:
        """Scatters ``[M, …]`` values of stored tokens → ``[T, …]``, 0 elsewhere."""
        out = values.new_zeros(self.num_stored, *values.shape[1:])
        return out.index_put((targets,), values)


def pack(batch: RaggedBatch, *, share: bool = True) -> Pack:
    """Lays the batch out for a packed forward.

    Args:
        share: every stored token that a sequence needs appears once, and descendants follow their ancestors. Without
            it every sequence is one root that holds copies of its ancestors.
    """
    return _shared(batch) if share else _copied(batch)


def _shared(batch: RaggedBatch) -> Pack:
    needed = {k for s in range(len(batch)) for k in batch.chain(s)}
    children: dict[int, list[int]] = {}
    for k in sorted(needed):
        children.setdefault(batch.parents[k], []).append(k)
    order: list[int] = []
    # Segments without children first, then by length: so the longest runs of equal leaves stand side by side.
    waiting = _dearest_last(children.get(-1, []), batch, children)
    while waiting:
        k = waiting.pop()
        order.append(k)
        waiting.extend(_dearest_last(children.get(k, []), batch, children))
    place = {k: i for i, k in enumerate(order)}
    lengths = tuple(batch.segment_lengths[k] for k in order)
    parents = tuple(place.get(batch.parents[k], -1) for k in order)
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + lengths[parent] if parent >= 0 else 0)
    leaves = tuple(place[leaf] for leaf in batch.leaves)
    return _assemble(batch, order, depths, lengths, parents, leaves)


def _dearest_last(siblings: Sequence[int], batch: RaggedBatch, children: dict[int, list[int]]) -> list[int]:
    """Sorts siblings in the order of a stack: what comes first in the pack stands last."""
    return sorted(siblings, key=lambda k: (k in children, batch.segment_lengths[k], k), reverse=True)


def _copied(batch: RaggedBatch) -> Pack:
    full_lengths = batch.sequence_lengths()
    order = sorted(range(len(batch)), key=lambda s: (full_lengths[s], s))
    pieces: list[int] = []
    depths: list[int] = []
    for s in order:
        depth = 0
        for k in batch.chain(s):
            pieces.append(k)
            depths.append(depth)
            depth += batch.segment_lengths[k]
    place = {s: i for i, s in enumerate(order)}
    lengths = tuple(full_lengths[s] for s in order)
    return _assemble(batch, pieces, depths, lengths, (-1,) * len(order), tuple(place[s] for s in range(len(batch))))


def _assemble(
    batch: RaggedBatch,
    pieces: Sequence[int],
    depths: Sequence[int],
    lengths: tuple[int, ...],
    parents: tuple[int, ...],
    leaves: tuple[int, ...],
) -> Pack:
    """Makes the pack of ``pieces``, stored segments in packed order; ``depths``: the position of each one's first
    token.
    """
    owners = set(batch.leaves)
    columns = [
        [batch.segment_offsets[k] for k in pieces],
        list(depths),
        [int(k in owners) for k in pieces],
    ]
    sizes = torch.tensor([batch.segment_lengths[k] for k in pieces], dtype=torch.int64)
    starts = sizes.cumsum(0) - sizes
    rows = torch.arange(int(sizes.sum()))
    within = rows - starts.repeat_interleave(sizes)
    stored, depth, own = torch.tensor(columns, dtype=torch.int64).repeat_interleave(sizes, 1)
    position_ids = depth + within
    source = stored + within
    previous = rows - 1
    heads = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    for i, parent in enumerate(parents):
        previous[heads[i] - lengths[i]] = heads[parent] - 1 if parent >= 0 else -1
    device = batch.device
    return Pack(
        input_ids=batch.input_ids[source.to(device)],
        position_ids=position_ids.to(device),
        lengths=lengths,
        parents=parents,
        leaves=leaves,
        source=source.to(device),
        owned=own.bool().to(device),
        previous=previous.to(device),
        num_stored=batch.num_tokens,
    )
