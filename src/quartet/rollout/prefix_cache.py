"""Keys and values of prompts: computed once, read or copied by every response, kept for requests to come.

Shapes: Hk key/value heads, L tokens of a block, D head size, T packed tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from torch import Tensor

MIN_SHARED_TOKENS = 384
"""From this many prompt tokens that members of a group would store over again, they read the prompt's own block.

Reading a shared block costs one more kernel call per prompt and layer and joining two partial results; a copied
prompt is read from each member's slot. On two cores the two are equal at 250 to 450 repeated tokens
(``benchmarks/shared_prefix.py``).
"""


@dataclass(eq=False)
class Block:
    """Keys and values of one run of tokens, filled over one step or several.

    Attributes:
        parent: the block these tokens follow; None: they begin a sequence.
        shared: responses read it where it is; otherwise they copy it into their slots.
        reusable: a whole prompt, which later requests may have, too; not a response's own tokens.
        again: computed for requests that were running before, after new weights or sleep.
        keys, values: ``[Hk, L, D]`` by layer; the first ``done`` tokens are there.
        logits: ``[V]`` after the last token, once all are done.
        num_bytes: of all of these tensors.
        num_users: requests that rely on it now.
        last_used: the step, for eviction.
    """

    token_ids: tuple[int, ...]
    parent: Block | None = None
    shared: bool = False
    reusable: bool = True
    again: bool = False
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    done: int = 0
    logits: Tensor | None = None
    num_bytes: int = 0
    num_users: int = 0
    last_used: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def start(self) -> int:
        """Position of the first token."""
        return 0 if self.parent is None else self.parent.start + len(self.parent)

    @property
    def chain(self) -> tuple[Block, ...]:
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

    def finish(self, logits: Tensor) -> None:
        """Takes the logits ``[V]`` after the last token."""
        self.logits = logits
        self.num_bytes += logits.numel() * logits.element_size()


class PrefixCache:
    """All blocks that exist, and which of them later requests may find by their tokens.

    Attributes:
        num_tokens: of all blocks, filled or about to be.
    """

    def __init__(self) -> None:
        self._prompts: dict[tuple[int, ...], Block] = {}
        self._others: set[Block] = set()
        self._clock = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._prompts) + len(self._others)

    @property
    def blocks(self) -> Iterable[Block]:
        yield from self._prompts.values()
        yield from self._others

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self.blocks)

    def find(self, token_ids: tuple[int, ...]) -> Block | None:
        """The block of exactly this prompt, complete or not."""
        return self._prompts.get(token_ids)

    def hold(self, block: Block) -> None:
        """Counts one more user of ``block`` and of what it follows; takes in blocks that are new."""
        for link in block.chain:
            self._clock += 1
            link.last_used = self._clock
            link.num_users += 1
            if link.num_users == 1 and self._prompts.get(link.token_ids) is not link and link not in self._others:
                self.num_tokens += len(link)
                if link.reusable and link.token_ids not in self._prompts:
                    self._prompts[link.token_ids] = link
                else:
                    self._others.add(link)

    def drop(self, block: Block) -> None:
        """Takes a user away. An idle block stays if later requests can use it: a prompt, complete."""
        for link in block.chain:
            link.num_users -= 1
            if not link.num_users and (link in self._others or link.done < len(link)):
                self._remove(link)

    def discard(self, block: Block) -> None:
        """Lets nobody find the block any more; it goes with its last user."""
        if self._prompts.get(block.token_ids) is block:
            if block.num_users:
                del self._prompts[block.token_ids]
                self._others.add(block)
            else:
                self._remove(block)

    def evict(self, num_tokens: int, wanted: Collection[tuple[int, ...]] = ()) -> bool:
        """Gives back at least ``num_tokens`` by idle prompts, the least recently used first.

        Args:
            wanted: prompts of waiting requests, which go last.

        Returns:
            Whether that many could be given back; if not, nothing is.
        """
        if num_tokens <= 0:
            return True
        idle = [block for block in self._prompts.values() if not block.num_users]
        if sum(map(len, idle)) < num_tokens:
            return False
        for block in sorted(idle, key=lambda b: (b.token_ids in wanted, b.last_used)):
            if num_tokens <= 0:
                break
            num_tokens -= len(block)
            self._remove(block)
        return True

    def trim(self, limit: int, wanted: Collection[tuple[int, ...]]) -> None:
        """Evicts idle prompts that nobody waits for until those left hold at most ``limit`` tokens."""
        idle = [b for b in self._prompts.values() if not b.num_users and b.token_ids not in wanted]
        excess = sum(map(len, idle)) - limit
        for block in sorted(idle, key=lambda b: b.last_used):
            if excess <= 0:
                break
            excess -= len(block)
            self._remove(block)

    def clear(self) -> None:
        """Forgets all blocks, also those in use: the weights they were computed with are gone."""
        self._prompts.clear()
        self._others.clear()
        self.num_tokens = 0

    def _remove(self, block: Block) -> None:
        self.num_tokens -= len(block)
        self._others.discard(block)
        if self._prompts.get(block.token_ids) is block:
            del self._prompts[block.token_ids]
