"""What drafts tokens that the native engine verifies, and the shape of a draft: a chain of tokens, or a tree of them.

Shapes: N nodes, one drafted token each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from quartet.config.engines import BaseSpeculationConfig
from quartet.config.plugins import load_object, plugin_entries
from quartet.models.packed_model import PackedCausalLM

if TYPE_CHECKING:
    from quartet.rollout.engine import NativeEngine
    from quartet.rollout.scheduler import EngineRequest


@dataclass(frozen=True)
class DraftTree:
    """
    Attributes:
        parents: ``[N]`` the node that each one follows, -1: the row's newest token. Parents stand before children.
        nodes: ``[N]`` what the nodes are called in the tree that this one is a part of.
    """

    parents: tuple[int, ...]
    nodes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """``[N]``, 1 behind the row's newest token."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 + (found[parent] if parent >= 0 else 0))
        return tuple(found)

    @cached_property
    def depth(self) -> int:
        return max(self.depths, default=0)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """``[1 + N]`` nodes behind the row's newest token, then those behind each node."""
        found: list[list[int]] = [[] for _ in range(1 + len(self))]
        for node, parent in enumerate(self.parents):
            found[1 + parent].append(node)
        return tuple(map(tuple, found))

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Every way to the end, as tokens of the row: 0 the newest, ``1 + node``. One where nothing branches."""
        ways: list[tuple[int, ...]] = [(0,)]
        for node, parent in enumerate(self.parents):
            ways.append((*ways[1 + parent], 1 + node))
        return tuple(way for way, behind in zip(ways, self.children, strict=True) if not behind)

    @cached_property
    def sees(self) -> Tensor:
        """``[1 + N, 1 + N]`` bool: which of the row's tokens each one follows, itself included."""
        found = torch.eye(1 + len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            found[1 + node] |= found[1 + parent]
        return found

    def only(self, nodes: Sequence[int]) -> DraftTree:
        """Returns the tree with these nodes alone, rising, and each of their parents among them."""
        return self if len(nodes) == len(self) else _only(self, tuple(nodes))


@lru_cache(maxsize=4096)
def _only(tree: DraftTree, nodes: tuple[int, ...]) -> DraftTree:
    place = {node: i for i, node in enumerate((-1, *nodes), -1)}
    return DraftTree(tuple(place[tree.parents[i]] for i in nodes), tuple(tree.nodes[i] for i in nodes))


@lru_cache(maxsize=256)
def chain_tree(num: int) -> DraftTree:
    """Makes a tree of ``num`` tokens, one behind the other."""
    return DraftTree(tuple(range(-1, num - 1)), tuple(range(num)))


NO_DRAFT = chain_tree(0)


class Drafter(Protocol):
    """Proposes tokens to follow each running request's newest one. The engine computes them in one forward and keeps
    those that it would have drawn anyway (``NativeEngine.step``).

    Attributes:
        reads_hidden: drafts are made from ``Response.hidden``.
    """

    reads_hidden: bool

    def propose(self, engine: NativeEngine, computing: Callable[[], AbstractContextManager[object]]) -> None:
        """Calls ``Response.propose`` of those running requests that get a draft.

        Args:
            engine: it holds requests; none may run yet.
            computing: in which its model may be computed with.
        """

    def verified(self, response: EngineRequest, kept: Sequence[int], *, ended: bool) -> None:
        """Notes of each draft which nodes of ``response.tree`` were kept; ``ended``: nothing was tried behind them."""

    def finished(self, response: EngineRequest) -> None:
        """Notes that a response ended by itself and has all its tokens."""

    def forget(self, response: EngineRequest) -> None:
        """Forgets a response that ended, in whatever way."""

    def by_depth(self) -> tuple[Sequence[int], Sequence[int]]:
        """Counts the places at each depth that had drafted tokens, and those of which one was kept."""

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Returns the named tensors that a trainer sends with the model's own weights."""

    def mark(self) -> dict[str, Any]:
        """Returns what it has learned, which ``state`` is from now on."""

    def state(self) -> dict[str, Any]:
        """Returns what it had learned at the time of the last ``mark``: tensors by name, and plain values as
        ``REST``."""

    def load(self, state: Mapping[str, Any]) -> None: ...


class DrafterModel(Protocol):
    """A drafter's model, which learns along with the actor's."""

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Returns the weights, named as they travel beside the actor's."""


def make_drafter(
    speculation: BaseSpeculationConfig | None, packed: PackedCausalLM, model: DrafterModel | None = None
) -> Drafter | None:
    """Makes the drafter of ``speculation``; None where that is None.

    Args:
        packed: the policy.
        model: the trainer's own, where the engine shares the policy with it.

    Raises:
        UserError: what the drafter reads is not there, or does not belong to the policy.
    """
    if speculation is None:
        return None
    return cast(Drafter, load_object(plugin_entries("drafters")[speculation.type].drafter)(speculation, packed, model))


def load_drafter_model(speculation: BaseSpeculationConfig | None, packed: PackedCausalLM) -> DrafterModel | None:
    """Loads the model that tokens are drafted with for the policy ``packed``; None where drafting needs none.

    Raises:
        UserError: it is not there, or another policy's.
    """
    target = None if speculation is None else plugin_entries("drafters")[speculation.type].model
    return None if target is None else cast(DrafterModel, load_object(target)(speculation, packed))
