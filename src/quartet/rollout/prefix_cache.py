"""Keys and values of prompts: computed once, read or copied by every response, kept for requests to come.

Shapes: Hk key/value heads, L tokens of a block, D head size, D' hidden size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from torch import Tensor

from quartet.rollout.protocol import PromptKey

MIN_SHARED_TOKENS = 1536
"""From this many prompt tokens that members of a group would store over again, they read the prompt's own block.

Reading a shared block costs one more kernel call per prompt and layer and joining two partial results; a copied
prompt is read from each member's slot, over and over. Below this the copies are the quicker way.
"""


@dataclass(eq=False)
class Block:
    """Keys and values of one run of tokens, filled over one step or several.

    Attributes:
        content_digests: ``(position, digest)`` of what the tokens do not say.
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
    parent: Block | None = None
    shared: bool = False
    reusable: bool = True
    again: bool = False
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    done: int = 0
    last_hidden: Tensor | None = None
    num_bytes: int = 0
    num_users: int = 0
    content_digests: tuple[tuple[int, bytes], ...] = ()

    @property
    def key(self) -> PromptKey:
        return self.token_ids, self.content_digests

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
        self._blocks: OrderedDict[Block, None] = OrderedDict()
        self._prompts: dict[PromptKey, Block] = {}
        self.num_tokens = 0
        self.idle_tokens = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self._blocks)

    def find(self, token_ids: tuple[int, ...], content_digests: tuple[tuple[int, bytes], ...] = ()) -> Block | None:
        """The block of exactly this prompt, complete or not."""
        return self._prompts.get((token_ids, content_digests))

    def hold(self, block: Block) -> None:
        """Counts one more user of ``block`` and of what it follows; takes in blocks that are new."""
        for link in block.chain:
            if link not in self._blocks:
                self.num_tokens += len(link)
                if link.reusable:
                    self._prompts.setdefault(link.key, link)
            elif link.num_users == 0:
                self.idle_tokens -= len(link)
            link.num_users += 1
            self._blocks[link] = None
            self._blocks.move_to_end(link)

    def drop(self, block: Block) -> None:
        """Takes a user away. An idle block stays if later requests can use it: a prompt, complete."""
        for link in block.chain:
            link.num_users -= 1
            if link.num_users == 0:
                self.idle_tokens += len(link)
                if self._prompts.get(link.key) is not link or link.done < len(link):
                    self._remove(link)

    def discard(self, block: Block) -> None:
        """The block is not found any more; it goes with its last user."""
        if self._prompts.get(block.key) is block:
            del self._prompts[block.key]
            if not block.num_users:
                self._remove(block)

    def evict(self, num_tokens: int, wanted: Callable[[], Collection[Block]]) -> bool:
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

    def trim(self, limit: int, wanted: Callable[[], Collection[Block]]) -> None:
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

    def _remove(self, block: Block) -> None:
        block.empty()
        self.num_tokens -= len(block)
        self.idle_tokens -= len(block)
        del self._blocks[block]
        if self._prompts.get(block.key) is block:
            del self._prompts[block.key]
