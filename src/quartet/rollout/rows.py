"""The running requests as columns on the device, allocated once and changed in place.

Shapes: B running requests, R rows allocated, S slots, C capacity of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quartet.rollout.cache import round_up
from quartet.rollout.placement import Stretch, stretches
from quartet.rollout.prefix_cache import Block
from quartet.rollout.sampler import SamplingRows
from quartet.rollout.scheduler import Response

SPARE_ROWS = 16
"""Query rows of a kernel call are rounded up to it, at the cost of the rows of the next block."""


@dataclass(frozen=True)
class SharedReads:
    """Which rows read a shared prompt, in an order in which those of one block stand together.

    Attributes:
        blocks: ``(block, its first place in the order, the place after its last)``.
        order: ``[N + spare]`` rows; the last ones repeat a row, so that every block's stretch can be read further.
        inverse: ``[B]`` each row's place in the order; 0 for a row that reads none.
        absent: ``[B, 1, 1]`` fp32, -inf for rows that read none, else 0; None where all rows read one.
    """

    blocks: list[tuple[Block, int, int]]
    order: Tensor
    inverse: Tensor
    absent: Tensor | None

    @classmethod
    def of(cls, running: Sequence[Response], device: torch.device) -> SharedReads | None:
        readers: dict[Block, list[int]] = {}
        for row, response in enumerate(running):
            if response.prefix is not None:
                readers.setdefault(response.prefix, []).append(row)
        if not readers:
            return None
        blocks: list[tuple[Block, int, int]] = []
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
            absent = absent.to(device)
        order += order[:1] * SPARE_ROWS
        return cls(blocks, torch.tensor(order, device=device), inverse.to(device), absent)


class Rows:
    """
    Args:
        max_rows: requests that may run at once.
        min_rows: rows that exist beyond the running ones if those are fewer; they hold zeros.

    Attributes:
        num_rows: B.
        version: changes with every ``load``.
        tokens, positions: ``[R]`` int64, each row's newest token and its position in the sequence.
        places: ``[R]`` int64, where the newest token's keys and values go in the slot.
        num_generated: ``[B]`` tokens each response has, which is the index of the next.
        mask: ``[S, C]`` fp32, 0 at places up to the newest token's, -inf behind; added to attention scores.
        stretches: neighbouring rows that one kernel call reads, with the longest of each.
        shared: who reads which shared prompt, if anybody does.
    """

    def __init__(self, max_rows: int, min_rows: int, vocab_size: int, device: torch.device) -> None:
        self.num_rows = 0
        self.version = 0
        self.vocab_size = vocab_size
        num_allocated = max(max_rows, min_rows)
        self.tokens = torch.zeros(num_allocated, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.tokens)
        self.places = torch.zeros_like(self.tokens)
        self.mask = torch.zeros(0, 0, device=device)
        self.stretches: list[Stretch] = []
        self.shared: SharedReads | None = None
        self.num_generated: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self.sampling = SamplingRows.build((), vocab_size, device)
        self._slots = torch.arange(num_allocated, device=device)

    def load(self, running: Sequence[Response], changed: Sequence[int], shape: tuple[int, int]) -> None:
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
            columns = [(running[row].token_ids[-1], running[row].position, running[row].num_stored) for row in there]
            index = torch.tensor(there, device=device)
            tokens, positions, places = torch.tensor(columns, device=device).unbind(1)
            self.tokens[index], self.positions[index], self.places[index] = tokens, positions, places
            behind = torch.arange(shape[1], device=device) > places.unsqueeze(1)
            self.mask[index] = torch.zeros(behind.shape, device=device).masked_fill_(behind, float("-inf"))
        for column in (self.tokens, self.positions, self.places):
            column[len(running) :] = 0
        self.num_rows = len(running)
        self.version += 1
        self.num_generated = np.array([len(r.token_ids) for r in running], dtype=np.uint64)
        self.sampling = SamplingRows.build([r.request.sampling for r in running], self.vocab_size, device)
        self.stretches = stretches([r.num_stored + 1 for r in running], round_up)
        self.shared = SharedReads.of(running, device)

    @property
    def longest(self) -> int:
        """Places that the longest row uses, the newest token's included."""
        return max(stretch.longest for stretch in self.stretches)

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
        for stretch in self.stretches:
            stretch.longest += 1
