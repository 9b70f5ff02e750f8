"""The shape of a draft: drafted tokens that follow a row's newest one in a chain, or branch.

Shapes: N nodes, one drafted token each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor


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
        """With these nodes alone, rising, and each of their parents among them."""
        return self if len(nodes) == len(self) else _only(self, tuple(nodes))


@lru_cache(maxsize=4096)
def _only(tree: DraftTree, nodes: tuple[int, ...]) -> DraftTree:
    place = {node: i for i, node in enumerate((-1, *nodes), -1)}
    return DraftTree(tuple(place[tree.parents[i]] for i in nodes), tuple(tree.nodes[i] for i in nodes))


@lru_cache(maxsize=256)
def chain(num: int) -> DraftTree:
    """One token behind the other."""
    return DraftTree(tuple(range(-1, num - 1)), tuple(range(num)))


NO_DRAFT = chain(0)


def branching(paths: Sequence[Sequence[int]]) -> DraftTree:
    """A node per path, which ends in it.

    Args:
        paths: of ranks among a head's tokens: ``(0, 2)`` is the third of the second head's behind the likeliest of the
            first's. Shorter ones first; each continues another by one.
    """
    place = {tuple(path): i for i, path in enumerate(paths)}
    parents = tuple(place[tuple(path[:-1])] if len(path) > 1 else -1 for path in paths)
    return DraftTree(parents, tuple(range(len(paths))))
