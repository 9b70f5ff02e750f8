"""Keys and values of running requests: one slot (row) per request in preallocated tensors, one pair per layer.

Shapes: S slots, B slots in use, Hk key/value heads, C capacity in tokens, D head size, L tokens of one run.

Running requests occupy the first B slots, so a decode step reads views of neighbouring slots and gathers nothing.
What a slot holds starts at its place 0: a whole sequence, or only what follows a prompt that is read from its block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

LENGTH_STEP = 32
"""Lengths are rounded up to it; up to 512 places the order of sums over them (their bits) then does not depend on how
many of them are empty."""


MIN_LENGTH = 64
"""Products over fewer keys round otherwise."""


def round_up(length: int) -> int:
    return max(-(-length // LENGTH_STEP) * LENGTH_STEP, MIN_LENGTH)


class KVCache:
    """Slots ``[S, Hk, C, D]`` per layer; dtype, heads and head size are those of the first keys that arrive.

    Slots start as zeros and are never uninitialised: a masked place still enters the product with its values, and
    0 · NaN is NaN.

    Attributes:
        keys, values: by layer; empty until something was written.
    """

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.num_slots = 0
        self.capacity = 0

    @property
    def num_tokens(self) -> int:
        """Places for tokens, used or not."""
        return self.num_slots * self.capacity

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (*self.keys.values(), *self.values.values()))

    def resize(self, num_slots: int, capacity: int) -> None:
        """Has exactly so many slots and places; what is stored in those that remain stays."""
        if (num_slots, capacity) == (self.num_slots, self.capacity):
            return
        kept, places = min(num_slots, self.num_slots), min(capacity, self.capacity)
        self.num_slots, self.capacity = num_slots, capacity
        for tensors in (self.keys, self.values):
            for layer, old in tensors.items():
                new = old.new_zeros(num_slots, old.shape[1], capacity, old.shape[3])
                new[:kept, :, :places] = old[:kept, :, :places]
                tensors[layer] = new

    def write(self, slots: Sequence[int], keys: Mapping[int, Tensor], values: Mapping[int, Tensor]) -> None:
        """Stores the same run of tokens, ``[Hk, L, D]`` per layer, from place 0 on in each of ``slots``.

        Makes the slots of layers of which none was written yet, with the heads and dtype of these runs.
        """
        for tensors, runs in ((self.keys, keys), (self.values, values)):
            for layer, run in runs.items():
                stored = tensors.get(layer)
                if stored is None:
                    stored = run.new_zeros(self.num_slots, run.shape[0], self.capacity, run.shape[2])
                    tensors[layer] = stored
                for slot in slots:
                    stored[slot, :, : run.shape[1]] = run

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first ``length`` tokens of one slot into another."""
        for stored in (*self.keys.values(), *self.values.values()):
            stored[target, :, :length] = stored[source, :, :length]

    def keep(self, slot: int, places: Sequence[int], start: int, end: int) -> None:
        """Of the tokens from place ``start`` up to ``end`` of a slot those at ``places`` alone, moved together."""
        behind = start + len(places)
        moves = list(places) != list(range(start, behind))
        for stored in (*self.keys.values(), *self.values.values()):
            if moves:
                stored[slot, :, start:behind] = stored[slot, :, places]
            stored[slot, :, behind:end] = 0

    def clear(self, slot: int) -> None:
        """Zeroes a slot whose content is not finite."""
        for stored in (*self.keys.values(), *self.values.values()):
            stored[slot].zero_()

    def release(self) -> None:
        """Gives the memory back."""
        self.keys, self.values = {}, {}
        self.num_slots = self.capacity = 0


def slot_shape(
    now: tuple[int, int], *, num_rows: int, longest: int, most: int, max_rows: int, limit: int | None
) -> tuple[int, int]:
    """Slots and capacity for what runs: growing by a half at a time, within the limit.

    Args:
        now: slots and capacity as they are; kept where they do.
        num_rows: slots in use.
        longest: places that the longest of them needs now; rounded up.
        most: places it may come to need.
        max_rows: slots that may ever be in use.
        limit: places in all; at least ``num_rows * most``.
    """
    slots, capacity = now
    if capacity < longest:
        capacity = max(longest, min(most, round_up(capacity + capacity // 2)))
    if slots < num_rows:
        slots = min(max_rows, max(num_rows, slots + slots // 2))
    if limit is None or slots * capacity <= limit:
        return slots, capacity
    if num_rows * capacity > limit:
        capacity = max(longest, min(most, capacity))
    return max(num_rows, min(slots, limit // capacity)), capacity
