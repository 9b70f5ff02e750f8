"""Divides items into parts of nearly equal cost (multiway number partitioning), under a cap where one is given.

``balanced`` takes the best of two well-known ways, longest first and largest differencing, and improves it by moves and
swaps. ``best_fit`` finds how many parts a cap needs. All are functions of their arguments alone: ranks that call them
with the same numbers come to the same parts.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

Parts = list[list[int]]
_Division = list[tuple[int, int, list[int]]]
"""Its parts that are not empty as (cost, first item, items), ascending. First items differ: lists are never compared.
Nothing is taken off the costs, as it is in the paper: only differences count."""

_NEAR = 10_000
"""A part dearer than a fair one by less than one part in so many is not improved."""
_MOST_PAIRS = 20_000
"""Pairs of items that an improvement looks at; most end after a few hundred."""


def longest_first(costs: Sequence[int], num_parts: int) -> Parts:
    """Items dealt to exactly so many parts, the dearest first, each to the cheapest part so far."""
    parts: Parts = [[] for _ in range(num_parts)]
    # The count breaks ties, so that items of cost 0 fill empty parts; the index makes the rest deterministic.
    heap = [(0, 0, p) for p in range(num_parts)]
    for i in _largest_first(costs):
        cost, count, p = heap[0]
        parts[p].append(i)
        heapq.heapreplace(heap, (cost + costs[i], count + 1, p))
    return parts


def _largest_first(numbers: Sequence[int]) -> list[int]:
    """Indices; of equal numbers the first one first."""
    return sorted(range(len(numbers)), key=numbers.__getitem__, reverse=True)


def largest_differencing(costs: Sequence[int], num_parts: int, *, equal_counts: bool = False) -> Parts:
    """Items in exactly so many parts by the method of Karmarkar and Karp (1982), for any number of parts.

    Every item begins as a division of its own, with one part that is not empty. The two divisions whose dearest and
    cheapest parts differ most are joined, the dearest part of one with the cheapest of the other, until one is left.

    Args:
        equal_counts: a division begins with as many items of nearly equal cost as there are parts, so that all parts
            get as many items, give or take one: better where there are two or three for each.
    """
    if num_parts == 1 or not costs:
        return [list(range(len(costs))), *([] for _ in range(num_parts - 1))]
    ascending = sorted((cost, i, [i]) for i, cost in enumerate(costs))
    size = num_parts if equal_counts else 1
    heap: list[tuple[int, int, _Division]] = []
    for first in range(0, len(ascending), size):
        division = ascending[first : first + size]
        heap.append((-_spread(division, num_parts), first, division))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, into = heapq.heappop(heap)
        _, other, added = heap[0]
        if len(into) < len(added):
            into, added = added, into
        # Where both together have more parts than there may be, the cheapest of one meet the dearest of the other.
        num_joined = max(len(into) + len(added) - num_parts, 0)
        if len(added) == 1:  # Most often an item: one insertion is quicker than to sort.
            part = added[0]
            if num_joined:
                (a, i, x), (b, j, y) = into.pop(0), part
                part = (a + b, min(i, j), x + y)
            insort(into, part)
        else:
            for k, (b, j, y) in zip(range(num_joined), reversed(added[:num_joined]), strict=True):
                a, i, x = into[k]
                into[k] = (a + b, min(i, j), x + y)
            into += added[num_joined:]
            into.sort()
        heapq.heapreplace(heap, (-_spread(into, num_parts), min(first, other), into))
    filled = [items for _, _, items in heap[0][2]]
    return filled + [[] for _ in range(num_parts - len(filled))]


def _spread(division: _Division, num_parts: int) -> int:
    return division[-1][0] - (division[0][0] if len(division) == num_parts else 0)


def best_fit(sizes: Sequence[int], cap: int) -> Parts:
    """Items in few parts of at most ``cap``: the largest first, each to the part that has least room left for it.

    At most 11/9 of the fewest parts possible, and two thirds of one (Johnson 1974); no size is above ``cap``.
    """
    parts: Parts = []
    rooms: list[tuple[int, int]] = []
    for i in _largest_first(sizes):
        at = bisect_left(rooms, (sizes[i], 0))
        if at < len(rooms):
            room, p = rooms.pop(at)
        else:
            room, p = cap, len(parts)
            parts.append([])
        parts[p].append(i)
        insort(rooms, (room - sizes[i], p))
    return parts


def balanced(costs: Sequence[int], num_parts: int) -> Parts:
    """Items in exactly so many parts, the dearest as cheap as was found; as ``balanced_under`` without a cap."""
    parts = balanced_under(costs, num_parts, costs, sum(costs))
    assert parts is not None
    return parts


def balanced_under(costs: Sequence[int], num_parts: int, sizes: Sequence[int], cap: int) -> Parts | None:
    """Items in exactly so many parts, the dearest as cheap as was found; None where no way keeps to ``cap``.

    Of the ways that keep to the cap none is cheaper: longest first by costs and by sizes, differencing by costs (with
    and without equal counts). With
    costs and sizes above 0 a part is empty only where items run out.

    Args:
        sizes: what ``cap`` limits, the sum of each part; no item is above it.
    """
    best: Parts | None = None
    least = 0
    bound = max(-(-sum(costs) // num_parts), max(costs, default=0))
    ways = [
        lambda: largest_differencing(costs, num_parts),
        lambda: longest_first(costs, num_parts),
        lambda: largest_differencing(costs, num_parts, equal_counts=True),
        lambda: longest_first(sizes, num_parts),
    ]
    for way in ways if sizes is not costs else ways[:3]:
        parts = way()
        dearest = max(_totals(costs, parts))
        if (best is None or dearest < least) and max(_totals(sizes, parts)) <= cap:
            best, least = parts, dearest
        if best is not None and least == bound:
            return best
    if best is None:
        best = _within(sizes, num_parts, cap)
    if best is not None:
        _improve(best, costs, sizes, cap, bound + bound // _NEAR)
    return best


def _within(sizes: Sequence[int], num_parts: int, cap: int) -> Parts | None:
    """Items in exactly so many parts of at most ``cap``, where that is found."""
    parts = largest_differencing(sizes, num_parts)
    if max(_totals(sizes, parts)) <= cap:
        return parts
    parts = best_fit(sizes, cap)
    if len(parts) > num_parts:
        return None
    while len(parts) < num_parts:
        # No part is left empty while another has several items.
        fullest = max(parts, key=len)
        parts.append([fullest.pop()] if len(fullest) > 1 else [])
    return parts


def _totals(costs: Sequence[int], parts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(map(costs.__getitem__, part)) for part in parts]


def _improve(parts: Parts, costs: Sequence[int], sizes: Sequence[int], cap: int, enough: int) -> None:
    """Moves or swaps an item of the dearest part as long as that makes it cheaper and it is dearer than ``enough``."""
    totals, filled = _totals(costs, parts), _totals(sizes, parts)
    left = _MOST_PAIRS
    while left > 0:
        ascending = sorted(range(len(parts)), key=totals.__getitem__)
        dearest = ascending.pop()
        if totals[dearest] <= enough:
            return
        gain, best = 0, None
        for p in ascending:
            gap = totals[dearest] - totals[p]
            # The best that two parts can do is to become equal.
            if gap <= 2 * gain or left <= 0:
                break
            room, spare = cap - filled[p], filled[dearest] - cap
            for i in parts[dearest]:
                for j in (None, *parts[p]):
                    less = costs[i] - (0 if j is None else costs[j])
                    if less <= gain or gap - less <= gain:
                        continue
                    smaller = sizes[i] - (0 if j is None else sizes[j])
                    if spare <= smaller <= room:
                        gain, best = min(less, gap - less), (p, i, j)
            left -= len(parts[dearest]) * (len(parts[p]) + 1)
        if best is None:
            return
        p, i, j = best
        _move(i, parts[dearest], parts[p])
        if j is not None:
            _move(j, parts[p], parts[dearest])
        for q in (p, dearest):
            (totals[q],), (filled[q],) = _totals(costs, [parts[q]]), _totals(sizes, [parts[q]])


def _move(item: int, source: list[int], target: list[int]) -> None:
    source.remove(item)
    target.append(item)
