"""Whether pools fit on the nodes of a cluster, and the largest ones that do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

Want = tuple[int, int]
"""``(processes, nodes)``: so many devices on each of so many different nodes."""


def packs(wanted: Sequence[Want], devices_per_node: Sequence[int]) -> bool:
    """True when every pool finds its nodes and no device is given away twice. Exact, not a heuristic."""

    @cache
    def fits(first: int, free: tuple[int, ...]) -> bool:
        if first == len(order):
            return True
        processes, nodes = order[first]
        return any(fits(first + 1, rest) for rest in _takings(free, processes, nodes))

    order = sorted(wanted, reverse=True)
    return fits(0, tuple(sorted(devices_per_node)))


def shrunk(wanted: Sequence[Want], devices_per_node: Sequence[int]) -> list[Want] | None:
    """The same pools, the largest ones made smaller step by step until they fit; None when one each does not."""
    smaller = [(processes, min(nodes, len(devices_per_node))) for processes, nodes in wanted]
    while not packs(smaller, devices_per_node):
        sizes = [processes * nodes for processes, nodes in smaller]
        largest = sizes.index(max(sizes))
        processes, nodes = smaller[largest]
        if processes > 1:
            smaller[largest] = (processes - 1, nodes)
        elif nodes > 1:
            smaller[largest] = (processes, nodes - 1)
        else:
            return None
    return smaller


def _takings(free: tuple[int, ...], processes: int, nodes: int) -> Iterator[tuple[int, ...]]:
    """What may be left of ``free`` devices per node (sorted) after a pool took its own; equal nodes are one case."""

    def choose(values: list[int], missing: int) -> Iterator[dict[int, int]]:
        if not values:
            if missing == 0:
                yield {}
            return
        value, rest = values[0], values[1:]
        for used in range(min(missing, free.count(value)), -1, -1):
            for others in choose(rest, missing - used):
                yield {value: used, **others}

    for used in choose(sorted({value for value in free if value >= processes}), nodes):
        left = list(free)
        for value, times in used.items():
            for _ in range(times):
                left.remove(value)
                left.append(value - processes)
        yield tuple(sorted(left))
