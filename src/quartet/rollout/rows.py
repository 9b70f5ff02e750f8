"""The running requests as columns on the device, allocated once and changed in place.

Shapes: B running requests, R rows allocated, S slots, C capacity of a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quartet.models.memory import to_device
from quartet.rollout.drafter import NO_DRAFT, DraftTree
from quartet.rollout.prefix_cache import CacheBlock, KVCache, round_up
from quartet.rollout.sampler import SamplingRows
from quartet.rollout.scheduler import BAND, EngineRequest

SPARE_ROWS = 16
"""Query rows of a kernel call are rounded up to it, at the cost of the rows of the next block."""
CALL_TOKENS = 768
"""One more stretch costs as much as reading so many more tokens of a row (measured: 500 to 1000)."""


@dataclass
class RowRange:
    """Rows ``start`` to ``end``; the longest has ``longest`` tokens."""

    start: int
    end: int
    longest: int


def row_ranges(lengths: Sequence[int], round_up: Callable[[int], int]) -> list[RowRange]:
    """Cuts the rows where that lessens what is read, counting ``CALL_TOKENS`` per stretch.

    Cuts stand between bands; the best set of them is found by dynamic programming.
    """
    starts = range(0, len(lengths), BAND)
    band_longest = [max(lengths[start : start + BAND]) for start in starts]
    costs = [0]
    last_range: list[RowRange] = []
    for num_bands in range(1, len(starts) + 1):
        end = min(num_bands * BAND, len(lengths))
        longest, options = 0, []
        for first in range(num_bands - 1, -1, -1):
            longest = max(longest, band_longest[first])
            reads = (end - starts[first]) * round_up(longest)
            options.append((costs[first] + CALL_TOKENS + reads, first, longest))
        cost, first, longest = min(options)
        costs.append(cost)
        last_range.append(RowRange(starts[first], end, longest))
    found: list[RowRange] = []
    end = len(starts)
    while end:
        found.append(last_range[end - 1])
        end = found[-1].start // BAND
    return found[::-1]


@dataclass(frozen=True)
class SharedPrefixReads:
    """Which rows read a shared prompt, in an order in which those of one block stand together.

    Attributes:
        blocks: ``(block, its first place in the order, the place after its last)``.
        order: ``[N + spare]`` rows; the last ones repeat a row, so that every block's stretch can be read further.
        inverse: ``[B]`` each row's place in the order; 0 for a row that reads none.
        absent: ``[B, 1, 1]`` fp32, -inf for rows that read none, else 0; None where all rows read one.
    """

    blocks: list[tuple[CacheBlock, int, int]]
    order: Tensor
    inverse: Tensor
    absent: Tensor | None

    @classmethod
    def of(cls, running: Sequence[EngineRequest], device: torch.device) -> SharedPrefixReads | None:
        readers: dict[CacheBlock, list[int]] = {}
        for row, response in enumerate(running):
            if response.prefix is not None:
                readers.setdefault(response.prefix, []).append(row)
        if not readers:
            return None
        blocks: list[tuple[CacheBlock, int, int]] = []
        order: list[int] = []
        for block, rows in readers.items():
            blocks.append((block, len(order), len(order) + len(rows)))
            order += rows
        inverse = torch.zeros(len(running), dtype=torch.int64)
        inverse[order] = torch.arange(len(order))
        absent = None
        if len(order) < len(running):
            absent = torch.full((len(running), 1, 1), float("-inf"))
            absent[order] = 0
            absent = to_device(absent, device)
        order += order[:1] * SPARE_ROWS
        return cls(blocks, to_device(torch.tensor(order), device), to_device(inverse, device), absent)


class DecodeRows:
    """
    Args:
        max_rows: requests that may run at once.
        min_rows: rows that exist beyond the running ones if those are fewer; they hold zeros.

    Attributes:
        num_rows: B.
        version: changes with every ``load``.
        tokens, positions: ``[R]`` int64, each row's newest token and its place in the sequence.
        shifts: ``[R]`` int64, how far the positions that the model is told lie from these.
        places: ``[R]`` int64, where the newest token's keys and values go in the slot.
        num_generated: ``[B]`` tokens each response has, which is the index of the next.
        num_stored: ``[B]`` tokens in each slot, the newest one not among them.
        mask: ``[S, C]`` fp32, 0 at places up to the newest token's, -inf behind; added to attention scores.
        row_ranges: neighbouring rows that one kernel call reads, with the longest of each.
        shared: which rows read which shared prompt; None where none does.
    """

    def __init__(self, max_rows: int, min_rows: int, vocab_size: int, device: torch.device) -> None:
        self.num_rows = 0
        self.version = 0
        self.vocab_size = vocab_size
        num_allocated = max(max_rows, min_rows)
        self.tokens = torch.zeros(num_allocated, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.tokens)
        self.shifts = torch.zeros_like(self.tokens)
        self.places = torch.zeros_like(self.tokens)
        self.mask = torch.zeros(0, 0, device=device)
        self.row_ranges: list[RowRange] = []
        self.shared: SharedPrefixReads | None = None
        self.num_generated: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self.num_stored: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.sampling = SamplingRows.build((), vocab_size, device)
        self._slots = torch.arange(num_allocated, device=device)

    def load(self, running: Sequence[EngineRequest], changed: Sequence[int], shape: tuple[int, int]) -> None:
        """Takes over the requests in row order.

        Args:
            changed: rows that hold another request than before; the others must be as ``advance`` left them.
            shape: slots and capacity of the cache.
        """
        device = self.tokens.device
        if tuple(self.mask.shape) != shape:
            self.mask = torch.full(shape, float("-inf"), device=device)
            changed = range(len(running))
        if changed:
            there = [row for row in changed if row < len(running)]
            new = [running[row] for row in there]
            columns = [(r.token_ids[-1], r.position, r.num_stored, r.position_shift) for r in new]
            index = to_device(torch.tensor(there), device)
            tokens, positions, places, shifts = to_device(torch.tensor(columns), device).unbind(1)
            self.tokens[index], self.positions[index], self.places[index] = tokens, positions, places
            self.shifts[index] = shifts
            behind = torch.arange(shape[1], device=device) > places.unsqueeze(1)
            self.mask[index] = torch.zeros(behind.shape, device=device).masked_fill_(behind, float("-inf"))
        for column in (self.tokens, self.positions, self.places, self.shifts):
            column[len(running) :] = 0
        self.num_rows = len(running)
        self.version += 1
        self.num_generated = np.array([len(r.token_ids) for r in running], dtype=np.uint64)
        self.num_stored = np.array([r.num_stored for r in running], dtype=np.int64)
        self.sampling = SamplingRows.build([r.request.sampling for r in running], self.vocab_size, device)
        self.row_ranges = row_ranges([r.num_stored + 1 for r in running], round_up)
        self.shared = SharedPrefixReads.of(running, device)

    @property
    def longest(self) -> int:
        """Places that the longest row uses, the newest token's included."""
        return max(row_range.longest for row_range in self.row_ranges)

    def advance(self, tokens: Tensor) -> None:
        """Takes ``tokens [B]`` as the newest of their rows."""
        num_rows, capacity = self.num_rows, self.mask.shape[1]
        self.tokens[:num_rows] = tokens
        self.positions[:num_rows] += 1
        places = self.places[:num_rows]
        places += 1
        # A row at the end of its slot is about to retire or its slot to grow.
        seen = self._slots[:num_rows] * capacity + places.clamp(max=capacity - 1)
        self.mask.view(-1).index_fill_(0, seen, 0.0)
        self.num_generated += np.uint64(1)
        self.num_stored += 1
        for row_range in self.row_ranges:
            row_range.longest += 1


@dataclass(frozen=True)
class DraftRows:
    """The new tokens of every row in one step: its newest one, and those that are proposed to follow it.

    Shapes: T tokens, row after row; k tokens of a row at most.

    Attributes:
        trees: which of each row's proposed tokens follows which.
        starts: each row's number of tokens in its slot, which is the place of its newest.
        tokens, positions, shifts: ``[T]`` int64, as of the rows.
        rows, places: ``[T]`` int64, slot and place that keys and values go to.
        grid: ``[B, k]`` each row's tokens as indices of T; shorter rows repeat their last.
        back: ``[T]`` each token's index in the flat grid.
        sees: ``[B, k, k]`` bool: which tokens of its row each one follows, itself included.
    """

    trees: Sequence[DraftTree]
    starts: Sequence[int]
    tokens: Tensor
    positions: Tensor
    shifts: Tensor
    rows: Tensor
    places: Tensor
    grid: Tensor
    back: Tensor
    sees: Tensor

    @classmethod
    def of(cls, rows: DecodeRows, drafts: Sequence[Sequence[int]], trees: Sequence[DraftTree]) -> DraftRows:
        """Makes the new tokens of ``rows`` in one step, with ``drafts`` and ``trees`` in row order."""
        sizes = torch.tensor([1 + len(draft) for draft in drafts])
        most = int(sizes.max())
        first = sizes.cumsum(0) - sizes
        owner = torch.arange(len(drafts)).repeat_interleave(sizes)
        offset = torch.arange(len(owner)) - first[owner]
        proposed = torch.tensor([token for draft in drafts for token in (0, *draft)])
        depth = torch.tensor([depth for tree in trees for depth in (0, *tree.depths)])
        grid = first.unsqueeze(1) + torch.minimum(torch.arange(most), sizes.unsqueeze(1) - 1)
        sees = torch.zeros(len(drafts), most, most, dtype=torch.bool)
        sees[:, :, 0] = True
        for row, tree in enumerate(trees):
            sees[row, : 1 + len(tree), : 1 + len(tree)] = tree.sees
        device = rows.tokens.device
        columns = to_device(torch.stack([owner, offset, depth, proposed, owner * most + offset]), device)
        owner, offset, depth, proposed, back = columns.unbind(0)
        return cls(
            trees=trees,
            starts=rows.num_stored.tolist(),
            tokens=torch.where(offset == 0, rows.tokens[owner], proposed),
            positions=rows.positions[owner] + depth,
            shifts=rows.shifts[owner],
            rows=owner,
            places=rows.places[owner] + offset,
            grid=to_device(grid, device),
            back=back,
            sees=to_device(sees, device),
        )

    @classmethod
    def newest(cls, rows: DecodeRows) -> DraftRows:
        """Makes the new tokens of ``rows`` where nothing is proposed."""
        return cls.of(rows, [()] * rows.num_rows, [NO_DRAFT] * rows.num_rows)

    def stored(self, cache: KVCache, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores ``k, v [1, Hk, T, D]`` of the new tokens in the layer's slots ``[S, Hk, C, D]``, and returns these."""
        keys, values = cache.keys[layer], cache.values[layer]
        for slots, new in ((keys, k), (values, v)):
            slots[self.rows, :, self.places] = new.squeeze(0).transpose(0, 1)
        return keys, values
