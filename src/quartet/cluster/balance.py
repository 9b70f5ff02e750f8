"""Which items each data-parallel rank gets: about equal tokens, groups whole where that is possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from quartet.batch.partition import deal
from quartet.cluster.structure import Structure

EVEN_ENOUGH = 1.05
"""Tokens of the dearest part over the mean at which a plan is taken without cutting smaller."""


def plan_parts(
    num_items: int, parts: int, structure: Structure | None = None, chunks: Sequence[Sequence[int]] = ()
) -> list[Sequence[int]]:
    """Item indices of each part, ascending; a function of the arguments alone.

    Items without a structure are dealt out in order, equally many each. Sequences of a batch are balanced by tokens,
    cut no smaller than balance needs: first whole ``chunks`` (how the data already lies), then whole groups (sequences
    that share a root segment), then runs of a group's sequences, each of which stores what they share once more.
    Parts are empty where there are fewer items than parts.
    """
    if structure is None:
        return [range(a, b) for a, b in pairwise(num_items * p // parts for p in range(parts + 1))]
    if not len(structure):
        return [[] for _ in range(parts)]
    mean = structure.num_tokens / parts
    best: list[Sequence[int]] = []
    fewest = float("inf")
    for blocks in _cuts(structure, parts, chunks):
        plan = _dealt(structure, blocks, parts)
        dearest = max(_tokens(structure, part) for part in plan)
        if dearest < fewest:
            best, fewest = plan, dearest
        if fewest <= EVEN_ENOUGH * mean:
            break
    return best


def _cuts(structure: Structure, parts: int, chunks: Sequence[Sequence[int]]) -> Iterator[list[list[int]]]:
    """Ways to cut the batch into blocks that travel whole, the coarsest first."""
    if chunks:
        yield [list(chunk) for chunk in chunks if chunk]
    groups = _groups(structure)
    yield groups
    for fineness in (1, 2, 4, len(structure)):
        yield [run for group in groups for run in _runs(structure, group, parts * fineness)]


def _dealt(structure: Structure, blocks: Sequence[Sequence[int]], parts: int) -> list[Sequence[int]]:
    """Blocks dealt to exactly so many parts, the dearest first to the cheapest part."""
    costs = [_tokens(structure, block) for block in blocks]
    dealt = sorted(map(sorted, deal(costs, parts)), key=lambda part: part[0] if part else len(costs))
    return [sorted(s for b in part for s in blocks[b]) for part in dealt]


def _tokens(structure: Structure, indices: Sequence[int]) -> int:
    return sum(structure.lengths[k] for k in structure.kept(indices))


def _groups(structure: Structure) -> list[list[int]]:
    """Sequences by their root segment; each list ascends."""
    found: dict[int, list[int]] = {}
    for s in range(len(structure)):
        found.setdefault(structure.chain(s)[0], []).append(s)
    return list(found.values())


def _runs(structure: Structure, group: Sequence[int], parts: int) -> list[list[int]]:
    """A group as runs of about equally many sequences, so many that none is dearer than a ``parts``-th of the batch."""
    pieces = min(-(-_tokens(structure, group) * parts // structure.num_tokens), len(group))
    return [list(group[a:b]) for a, b in pairwise(len(group) * p // pieces for p in range(pieces + 1))]
