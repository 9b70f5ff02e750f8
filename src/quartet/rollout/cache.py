"""Keys and values of running requests: one slot (row) per request in preallocated tensors, one pair per
layer.

Shapes: S slots, B slots in use, Hk key/value heads, C capacity in tokens, D head size, L tokens of one
request.

Running requests occupy the first B slots, so a decode step reads ``[:B]`` views and gathers nothing. A
prompt is computed once per group and its keys and values are copied into each member's slot: on the CPU one
attention call over all slots is faster than one per shared prompt, and decode reads a slot once either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LENGTH_STEP = 32
"""Lengths are rounded up to it: below, the attention kernel's summation order (its bits) would depend on the
length.
"""


def round_up(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of one run of tokens, one ``[Hk, L, D]`` tensor per layer."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def part(self, start: int, end: int) -> KeyValues:
        """A view of tokens ``start`` to ``end``."""
        return KeyValues(tuple(k[:, start:end] for k in self.keys), tuple(v[:, start:end] for v in self.values))

    def clone(self) -> KeyValues:
        return KeyValues(tuple(k.clone() for k in self.keys), tuple(v.clone() for v in self.values))

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))


class KVCache:
    """Slots ``[S, Hk, C, D]`` per layer; dtype, heads and head size are those of the first keys that arrive.

    Slots start as zeros and are never uninitialised: a masked position still enters the product with its
    values, and 0 · NaN is NaN.
    """

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.num_slots = 0
        self.capacity = 0

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Makes room for ``num_slots`` requests of ``capacity`` tokens; what is stored stays. Never
        shrinks.
        """
        num_slots = max(num_slots, self.num_slots)
        capacity = max(round_up(capacity), self.capacity)
        if (num_slots, capacity) == (self.num_slots, self.capacity):
            return
        self.num_slots, self.capacity = num_slots, capacity
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                new = old.new_zeros(num_slots, old.shape[1], capacity, old.shape[3])
                new[: old.shape[0], :, : old.shape[2]] = old
                tensors[layer] = new

    def write(self, slots: Sequence[int], run: KeyValues) -> None:
        """Stores the same run of tokens from position 0 in each of ``slots``."""
        if not self.keys:
            self.keys, self.values = self._allocate(run.keys), self._allocate(run.values)
        index = torch.tensor(slots, device=self.keys[0].device)
        length = run.keys[0].shape[1]
        for tensors, parts in ((self.keys, run.keys), (self.values, run.values)):
            for stored, part in zip(tensors, parts, strict=True):
                stored[index, :, :length] = part.unsqueeze(0).expand(len(slots), -1, -1, -1)

    def _allocate(self, like: Sequence[Tensor]) -> list[Tensor]:
        return [part.new_zeros(self.num_slots, part.shape[0], self.capacity, part.shape[2]) for part in like]

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copies ``(source, target, length)``: the first ``length`` tokens of one slot into another."""
        for source, target, length in moves:
            for stored in (*self.keys, *self.values):
                stored[target, :, :length] = stored[source, :, :length]

    def clear(self, slot: int) -> None:
        """Zeroes a slot whose content is not finite."""
        for stored in (*self.keys, *self.values):
            stored[slot].zero_()

    def release(self) -> None:
        """Gives the memory back; the next ``reserve`` and ``write`` allocate anew."""
        self.keys, self.values = [], []
        self.num_slots = self.capacity = 0
