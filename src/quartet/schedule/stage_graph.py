"""A graph of stages on pools, and a plan for it: what an arbiter should prefer, and what is worth waiting for.

A stage waits for those it comes after, then for a slot of its pool. Which of several waiting stages goes first decides
how long the whole takes; what others wait for should. The *upward rank* of a stage (Topcuoglu et al. 2002, HEFT) is the
longest chain of seconds from its beginning to the end of the graph. It knows nothing of pools, so `plan` goes on from
there: it exchanges pairs in the order in which stages are placed and keeps what is shorter.

Preferring is not always enough. A pool that is free takes a long stage although a critical one asks a second later; to
leave it free is what an extra edge does, long after critical, as a placement may have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

Times = dict[str, tuple[float, float]]
"""Stage → its beginning and its end, in seconds."""


@dataclass(frozen=True)
class StageNode:
    """``seconds`` on a slot of ``pool``, once all of ``after`` have ended."""

    pool: str
    seconds: float
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageGraph:
    """Stages by name, each named after those it comes after. ``slots``: pool → stages at once, by default 1."""

    nodes: Mapping[str, StageNode]
    slots: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known: set[str] = set()
        for name, node in self.nodes.items():
            missing = set(node.after) - known
            if missing:
                raise ValueError(f"stage {name!r} comes after {sorted(missing)}, which do not stand before it")
            known.add(name)

    def upward_ranks(self) -> dict[str, float]:
        """Stage → seconds of the longest chain that begins with it."""
        ranks = {name: node.seconds for name, node in self.nodes.items()}
        for name in reversed(list(self.nodes)):
            for earlier in self.nodes[name].after:
                ranks[earlier] = max(ranks[earlier], self.nodes[earlier].seconds + ranks[name])
        return ranks

    def lower_bound(self) -> float:
        """No order takes less: the longest chain, and the work of each pool over its slots."""
        work: dict[str, float] = {}
        for node in self.nodes.values():
            work[node.pool] = work.get(node.pool, 0.0) + node.seconds
        loads = [seconds / self.slots.get(pool, 1) for pool, seconds in work.items()]
        return max([*self.upward_ranks().values(), *loads], default=0.0)

    def earliest(self, name: str, placed: Times) -> float:
        """When a stage can begin beside those that have their times, which include all that it comes after."""
        node = self.nodes[name]
        ready_s = max((placed[earlier][1] for earlier in node.after), default=0.0)
        beside = [times for other, times in placed.items() if self.nodes[other].pool == node.pool]
        for start_s in sorted({ready_s, *(end for _, end in beside if end > ready_s)}):
            moments = {start_s, *(begin for begin, _ in beside if start_s < begin < start_s + node.seconds)}
            busiest = max(sum(begin <= moment < end for begin, end in beside) for moment in moments)
            if busiest < self.slots.get(node.pool, 1):
                break
        return start_s

    def times(self, order: Sequence[str]) -> Times:
        """Every stage as early as it fits, placed in this order; a stage before its turn waits for what it comes after.

        Some order gives the shortest of all schedules (Kolisch 1996 on the serial scheme).
        """
        placed: Times = {}
        left = list(order)
        while left:
            name = next(n for n in left if all(earlier in placed for earlier in self.nodes[n].after))
            start_s = self.earliest(name, placed)
            placed[name] = (start_s, start_s + self.nodes[name].seconds)
            left.remove(name)
        return placed


@dataclass(frozen=True)
class Plan:
    """``ranks`` for the arbiter, the higher the earlier; ``after``: extra edges; ``seconds`` if all lasts as said."""

    ranks: Mapping[str, float]
    after: Mapping[str, tuple[str, ...]]
    seconds: float


def plan(graph: StageGraph) -> Plan:
    """Upward ranks, mended by exchanges of two stages while one makes the whole shorter."""
    upward = graph.upward_ranks()
    order = sorted(graph.nodes, key=lambda name: -upward[name])
    best, bound_s = graph.times(order), graph.lower_bound()
    improved = True
    while improved and _seconds(best) > bound_s:
        improved = False
        for other in _exchanged(order):
            times = graph.times(other)
            if _seconds(times) < _seconds(best):
                order, best, improved = other, times, True
                break
    ranks = {name: -start_s for name, (start_s, _) in best.items()}
    return Plan(ranks, _edges(graph, best), _seconds(best))


def _edges(graph: StageGraph, times: Times) -> dict[str, tuple[str, ...]]:
    """A stage that could have begun earlier comes after one of its pool that ends when it begins."""
    found: dict[str, tuple[str, ...]] = {}
    for name, node in graph.nodes.items():
        start_s = times[name][0]
        if start_s > max((times[earlier][1] for earlier in node.after), default=0.0):
            mates = [other for other, mate in graph.nodes.items() if mate.pool == node.pool and other != name]
            found[name] = (next(other for other in mates if times[other][1] == start_s),)
    return found


def _exchanged(order: Sequence[str]) -> Iterable[list[str]]:
    for i, j in combinations(range(len(order)), 2):
        other = list(order)
        other[i], other[j] = other[j], other[i]
        yield other


def _seconds(times: Times) -> float:
    return max((end_s for _, end_s in times.values()), default=0.0)
