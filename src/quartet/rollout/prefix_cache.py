"""Keys and values of prompts: computed once, read or copied by every response, kept for requests to come.

Shapes: Hk key/value heads, L tokens of a block, D head size, D' hidden size.

Keys and values of running requests: one slot (row) per request in preallocated tensors, one pair per layer.

Shapes: S slots, B slots in use, Hk key/value heads, C capacity in tokens, D head size, L tokens of one run.

Running requests occupy the first B slots, so a decode step reads views of neighbouring slots and gathers nothing.
What a slot holds starts at its place 0: a whole sequence, or only what follows a prompt that is read from its block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

MIN_SHARED_TOKENS = 1536
"""From this many prompt tokens that members of a group would store over again, they read the prompt's own block.

Reading a shared block costs one more kernel call per prompt and layer and joining two partial results; a copied
prompt is read from each member's slot, over and over. Below this the copies are the quicker way.
"""


@dataclass(eq=False)
class CacheBlock:
    """Keys and values of one run of tokens, filled over one step or several.

    Attributes:
        parent: the block these tokens follow; None: they begin a sequence.
        shared: responses read it where it is; otherwise they copy it into their slots.
        reusable: a whole prompt, which later requests may have, too; not a response's own tokens.
        again: computed for requests that were running before, after new weights or a lost cache.
        keys, values: ``[Hk, L, D]`` by layer; the first ``done`` tokens are there.
        last_hidden: ``[D']`` of the last token, once all are done; it gives the logits of what follows.
        num_bytes: of all of these tensors.
        num_users: requests that rely on it now.
    """

    token_ids: tuple[int, ...]
    parent: CacheBlock | None = None
    shared: bool = False
    reusable: bool = True
    again: bool = False
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    done: int = 0
    last_hidden: Tensor | None = None
    num_bytes: int = 0
    num_users: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def start(self) -> int:
        """Position of the first token."""
        return 0 if self.parent is None else self.parent.start + len(self.parent)

    @property
    def chain(self) -> tuple[CacheBlock, ...]:
        """The blocks of the whole sequence, root first."""
        return (self,) if self.parent is None else (*self.parent.chain, self)

    def store(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Puts ``k, v [Hk, n, D]`` of tokens from ``start`` on."""
        end = start + k.shape[1]
        for tensors, new in ((self.keys, k), (self.values, v)):
            stored = tensors.get(layer)
            if stored is None:
                stored = tensors[layer] = new.new_zeros(new.shape[0], len(self), new.shape[2])
                self.num_bytes += stored.numel() * stored.element_size()
            stored[:, start:end] = new

    def empty(self) -> None:
        """Gives its memory back, also while the block is still referred to."""
        self.keys, self.values, self.last_hidden = {}, {}, None
        self.done = self.num_bytes = 0

    def finish(self, last_hidden: Tensor) -> None:
        """Takes the hidden state ``[D']`` of the last token."""
        self.last_hidden = last_hidden
        self.num_bytes += last_hidden.numel() * last_hidden.element_size()


class PrefixCache:
    """All blocks that exist, and which of them later requests may find by their tokens.

    Attributes:
        num_tokens: of all blocks, filled or about to be.
        idle_tokens: of those without a user.
    """

    def __init__(self) -> None:
        # The least recently used first.
        self._blocks: OrderedDict[CacheBlock, None] = OrderedDict()
        self._prompts: dict[tuple[int, ...], CacheBlock] = {}
        self.num_tokens = 0
        self.idle_tokens = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self._blocks)

    def find(self, token_ids: tuple[int, ...]) -> CacheBlock | None:
        """Returns the block of exactly this prompt, complete or not."""
        return self._prompts.get(token_ids)

    def hold(self, block: CacheBlock) -> None:
        """Counts one more user of ``block`` and of what it follows; takes in blocks that are new."""
        for link in block.chain:
            if link not in self._blocks:
                self.num_tokens += len(link)
                if link.reusable:
                    self._prompts.setdefault(link.token_ids, link)
            elif link.num_users == 0:
                self.idle_tokens -= len(link)
            link.num_users += 1
            self._blocks[link] = None
            self._blocks.move_to_end(link)

    def drop(self, block: CacheBlock) -> None:
        """Takes a user away. An idle block stays if later requests can use it: a prompt, complete."""
        for link in block.chain:
            link.num_users -= 1
            if link.num_users == 0:
                self.idle_tokens += len(link)
                if self._prompts.get(link.token_ids) is not link or link.done < len(link):
                    self._remove(link)

    def discard(self, block: CacheBlock) -> None:
        """Takes care that the block is not found any more; it goes with its last user."""
        if self._prompts.get(block.token_ids) is block:
            del self._prompts[block.token_ids]
            if not block.num_users:
                self._remove(block)

    def evict(self, num_tokens: int, wanted: Callable[[], Collection[CacheBlock]]) -> bool:
        """Gives back at least ``num_tokens`` by idle prompts, the least recently used first.

        Args:
            wanted: blocks that waiting requests will use, which go last.

        Returns:
            Whether that many could be given back; if not, nothing is.
        """
        if num_tokens <= 0:
            return True
        if self.idle_tokens < num_tokens:
            return False
        keep = wanted()
        idle = [block for block in self._blocks if not block.num_users]
        for block in sorted(idle, key=lambda b: b in keep):
            if num_tokens <= 0:
                break
            num_tokens -= len(block)
            self._remove(block)
        return True

    def trim(self, limit: int, wanted: Callable[[], Collection[CacheBlock]]) -> None:
        """Evicts idle prompts that no request waits for while idle ones hold more than ``limit`` tokens."""
        if self.idle_tokens <= limit:
            return
        keep = wanted()
        for block in list(self._blocks):
            if self.idle_tokens <= limit:
                break
            if not block.num_users and block not in keep:
                self._remove(block)

    def clear(self) -> None:
        """Forgets all blocks, also those in use: the weights they were computed with are gone."""
        self._blocks.clear()
        self._prompts.clear()
        self.num_tokens = self.idle_tokens = 0

    def _remove(self, block: CacheBlock) -> None:
        block.empty()
        self.num_tokens -= len(block)
        self.idle_tokens -= len(block)
        del self._blocks[block]
        if self._prompts.get(block.token_ids) is block:
            del self._prompts[block.token_ids]


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
        """Keeps of the tokens from place ``start`` up to ``end`` of a slot those at ``places`` alone, moved
        together."""
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


def next_slot_shape(
    now: tuple[int, int], *, num_rows: int, longest: int, most: int, max_rows: int, limit: int | None
) -> tuple[int, int]:
    """Returns slots and capacity for what runs: growing by a half at a time, within the limit.

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
