"""How a ragged batch is split over data-parallel parts, and what is made of the parts put back in its order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from quartet.batch.partition import AtomTree, balanced
from quartet.batch.ragged import ColumnSet, RaggedBatch

EVEN_ENOUGH = 1.05
"""Cost of the dearest part over the mean at which a plan is taken without cutting smaller."""
_NOWHERE = ("",)  # an outline refers to something; nothing fills this one


@dataclass(frozen=True)
class Share:
    """Some of a batch's sequences: where they stand in it, and their segment table."""

    positions: Sequence[int]
    table: RaggedBatch


def table_of(batch: RaggedBatch) -> RaggedBatch:
    """The segment table of a batch: an outline without any field."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return RaggedBatch(nothing, batch.segment_lengths, batch.parents, batch.leaves, batch.ids, elsewhere=_NOWHERE)


def shares_of(table: RaggedBatch, parts: int) -> list[Share]:
    """What each of so many parts gets of the batch with this table."""
    return [Share(part, table.select(part)) for part in plan_parts(table, parts)]


def plan_parts(table: RaggedBatch, parts: int) -> list[list[int]]:
    """Indices of the sequences of each part, ascending; a function of the arguments alone.

    Sequences are balanced by cost, cut no smaller than balance needs: first whole groups (sequences that share a root
    segment), then runs of a group's sequences, each of which stores what they share once more. Parts are empty where
    there are fewer sequences than parts.
    """
    if not len(table):
        return [[] for _ in range(parts)]
    tree = AtomTree(table, [[s] for s in range(len(table))], share=True)
    cost = tree.block(range(len(table))).cost
    best: list[list[int]] = []
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


def merge_results(results: Sequence[Any], shares: Sequence[Share], table: RaggedBatch) -> Any:
    """Results of parts as one value, in the order of the batch with this table.

    Columns of the parts' sequences, and tensors with an entry per sequence, are put together; other results form a
    list, or are None where all of them are.

    Raises:
        ValueError: columns are of other sequences than the part's.
    """
    held = [(result, share) for result, share in zip(results, shares, strict=True) if share.positions]
    values = [result for result, _ in held] or results[:1]
    flat = [position for _, share in held for position in share.positions]
    order = sorted(range(len(flat)), key=flat.__getitem__)
    if all(isinstance(value, ColumnSet) for value in values):
        columns = ColumnSet.concat(values) if len(values) > 1 else values[0]
        return _merged_columns(columns, [share.table for _, share in held], order, table)
    if all(isinstance(value, Tensor) and value.ndim and len(value) == len(at.positions) for value, at in held):
        whole = torch.cat([*values])
        return whole[torch.tensor(order, dtype=torch.int64, device=whole.device)]
    return None if all(result is None for result in results) else list(results)


def _merged_columns(
    columns: ColumnSet, tables: Sequence[RaggedBatch], order: Sequence[int], table: RaggedBatch
) -> ColumnSet:
    own = RaggedBatch.concat(tables) if tables else table
    if columns.ids != own.ids or any(v.shape[0] != own.num_tokens for v in columns.token.values()):
        raise ValueError(f"columns {sorted({*columns.token, *columns.sequence})} are not of the part's sequences")
    if [*order] == [*range(len(table))] and all(
        getattr(own, name) == getattr(table, name) for name in ("segment_lengths", "parents", "leaves")
    ):
        return columns  # as they are: they may be large
    batch = replace(own, token=columns.token, sequence=columns.sequence)
    segments: list[int | None] = [None] * len(table.parents)
    for s in reversed(range(len(order))):  # of a segment that several parts hold the first one's values count
        for k, of_part in zip(table.chain(s), batch.chain(order[s]), strict=True):
            segments[k] = of_part
    merged = batch.regrouped(segments, table.segment_lengths, table.parents, table.leaves, order)
    return ColumnSet(merged.ids, merged.token, merged.sequence)
