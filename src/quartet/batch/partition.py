"""Cuts a mini-batch into micro-batches under a token budget, as equal in cost as they come."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from quartet.config.errors import UserError


def plan_micro_batches(
    costs: Sequence[int], budget: int, *, multiple_of: int = 1, groups: Sequence[int] | None = None
) -> list[list[int]]:
    """Balanced parts, none of which costs more than ``budget``.

    Starts from the fewest parts that could hold the total, gives each item (dearest first) to the cheapest
    part, and takes more parts while one of them is over the budget. Without groups, costs of parts differ by
    at most one item's.

    Args:
        costs: tokens of each item, at least 0.
        budget: most tokens a part may cost.
        multiple_of: the number of parts is a multiple of this (data-parallel ranks take equally many). Parts
            are empty only where this asks for more parts than there are items.
        groups: one number per item; items of a group stay in one part while their joint cost fits the budget.
            A dearer group is cut into runs of its items.

    Returns:
        Item indices of each part, ascending; parts in the order of their first items, empty ones last. The
        result is a function of the arguments alone.

    Raises:
        UserError: an item costs more than ``budget``, or ``budget`` is below 1.
    """
    _check(costs, budget, multiple_of, groups)
    if not costs:
        return []
    blocks = _blocks(costs, budget, groups)
    block_costs = [sum(costs[i] for i in block) for block in blocks]
    most = _round_up(len(blocks), multiple_of)
    # Two blocks of more than half the budget never share a part; without this bound such input takes many
    # attempts.
    needed = max(-(-sum(costs) // budget), sum(2 * cost > budget for cost in block_costs), 1)
    num_parts = min(_round_up(needed, multiple_of), most)
    while True:
        parts, dearest = _longest_first(block_costs, num_parts)
        if dearest <= budget:
            break
        # About 3 % more: an attempt costs as much as the plan, and few are needed this way.
        num_parts = min(num_parts + _round_up(max(num_parts // 32, 1), multiple_of), most)
    plan = [sorted(i for b in part for i in blocks[b]) for part in parts]
    return sorted(plan, key=lambda part: part[0] if part else len(costs))


def _check(costs: Sequence[int], budget: int, multiple_of: int, groups: Sequence[int] | None) -> None:
    if multiple_of < 1:
        raise ValueError(f"multiple_of must be at least 1, found {multiple_of}")
    if groups is not None and len(groups) != len(costs):
        raise ValueError(f"{len(groups)} groups for {len(costs)} items")
    if budget < 1:
        raise UserError(
            "token_budget leaves no room for a token",
            found=f"token_budget={budget}",
            remedy="set token_budget above 0",
        )
    for i, cost in enumerate(costs):
        if cost < 0:
            raise ValueError(f"item {i} has a negative cost: {cost}")
        if cost > budget:
            raise UserError(
                "a sequence is longer than token_budget, so it fits no micro-batch",
                found=f"sequence {i} of {cost} tokens, token_budget={budget}",
                remedy=f"raise token_budget to at least {max(costs)} or shorten the sequences",
            )


def _round_up(number: int, multiple_of: int) -> int:
    return -(-number // multiple_of) * multiple_of


def _blocks(costs: Sequence[int], budget: int, groups: Sequence[int] | None) -> list[list[int]]:
    """Items that travel together."""
    if groups is None:
        return [[i] for i in range(len(costs))]
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    blocks: list[list[int]] = []
    for items in members.values():
        run: list[int] = []
        cost = 0
        for i in items:
            if run and cost + costs[i] > budget:
                blocks.append(run)
                run, cost = [], 0
            run.append(i)
            cost += costs[i]
        blocks.append(run)
    return blocks


def _longest_first(costs: Sequence[int], num_parts: int) -> tuple[list[list[int]], int]:
    """Longest-processing-time-first: the parts, and the cost of the dearest."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    # The count breaks ties, so that items of cost 0 fill empty parts; the index makes the rest deterministic.
    heap = [(0, 0, p) for p in range(num_parts)]
    dearest = 0
    for b in sorted(range(len(costs)), key=lambda b: (-costs[b], b)):
        cost, count, p = heap[0]
        parts[p].append(b)
        heapq.heapreplace(heap, (cost + costs[b], count + 1, p))
        dearest = max(dearest, cost + costs[b])
    return parts, dearest
