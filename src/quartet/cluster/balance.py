"""Which items each data-parallel rank gets: about equal cost, groups whole where that is possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from quartet.batch.partition import AtomTree, balanced
from quartet.cluster.structure import Structure

EVEN_ENOUGH = 1.05
"""Cost of the dearest part over the mean at which a plan is taken without cutting smaller."""


def plan_parts(num_items: int, parts: int, structure: Structure | None = None) -> list[Sequence[int]]:
    """Item indices of each part, ascending; a function of the arguments alone.

    Items without a structure are dealt out in order, equally many each. Sequences of a batch are balanced by cost,
    cut no smaller than balance needs: first whole groups (sequences that share a root segment), then runs of a group's
    sequences, each of which stores what they share once more. Parts are empty where there are fewer items than parts.
    """
    if structure is None:
        return [range(a, b) for a, b in pairwise(num_items * p // parts for p in range(parts + 1))]
    if not len(structure):
        return [[] for _ in range(parts)]
    tree = AtomTree(structure.table, [[s] for s in range(len(structure))], share=True)
    cost = tree.block(range(len(structure))).cost
    best: list[Sequence[int]] = []
    least = float("inf")
    for blocks in _cuts(tree, parts, cost):
        dealt = map(sorted, balanced([tree.block(block).cost for block in blocks], parts))
        in_order = sorted(dealt, key=lambda part: part[0] if part else len(blocks))
        plan = [sorted(s for b in part for s in blocks[b]) for part in in_order]
        dearest = max(tree.block(part).cost for part in plan)
        if dearest < least:
            best, least = list(plan), dearest
        if least <= EVEN_ENOUGH * (cost / parts):
            break
    return best


def _cuts(tree: AtomTree, parts: int, cost: int) -> Iterator[list[Sequence[int]]]:
    """Ways to cut the batch into blocks that travel whole, the coarsest first."""
    groups = tree.groups()
    yield [*groups]
    for fineness in (1, 2, 4, sum(map(len, groups))):
        # Runs of about equally many sequences, so many that none is dearer than its part of the batch.
        counts = [min(-(-tree.block(group).cost * parts * fineness // cost), len(group)) for group in groups]
        yield [
            group[a:b]
            for group, count in zip(groups, counts, strict=True)
            for a, b in pairwise(len(group) * p // count for p in range(count + 1))
        ]
