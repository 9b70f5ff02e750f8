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
    enough = sum(processes * nodes for processes, nodes in wanted) <= sum(devices_per_node)
    return enough and fits(0, tuple(sorted(devices_per_node)))


def shrunk(wanted: Sequence[Want], devices_per_node: Sequence[int]) -> list[Want] | None:
    """The same pools, the largest ones made smaller step by step until they fit; None when one each does not."""
    free = [devices for devices in devices_per_node if devices > 0]
    if not free:
        return None
    # More than this no pool could have; counting down from what was asked for might never end.
    bounds = [(min(processes, max(free)), min(nodes, len(free))) for processes, nodes in wanted]
    smaller = list(bounds)
    while not packs(smaller, free):
        sizes = [processes * nodes for processes, nodes in smaller]
        largest = sizes.index(max(sizes))
        if sizes[largest] == 1:
            return None
        smaller[largest] = _below(bounds[largest], sizes[largest])
    return smaller


def _below(bound: Want, size: int) -> Want:
    """The largest shape within ``bound`` that has fewer than ``size`` devices; of equal ones that on fewest nodes."""
    shapes = [(min(bound[0], (size - 1) // nodes), nodes) for nodes in range(1, min(bound[1], size - 1) + 1)]
    return max(shapes, key=lambda shape: (shape[0] * shape[1], shape[0]))


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
