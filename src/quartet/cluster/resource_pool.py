"""Pools: how many processes on how many nodes, with what each of them needs; checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from quartet.config.errors import UserError

Strategy: TypeAlias = Literal["pack", "spread"]
_SLACK = 1e-9


@dataclass(frozen=True, eq=False)
class ResourcePool:
    """Processes per node, ``[4, 4]`` say: two nodes with four each. It holds one group at a time.

    Args:
        processes: one number per node; ranks count through them in order.
        cpus, gpus, resources: what each process needs; ``resources`` names what the cluster's nodes were started with.
        strategy: ``pack`` takes as few nodes as possible, so two entries may lie on one node; ``spread`` gives every
            entry a node of its own.
        nodes: the node of each entry by its key (``Node.key``), for workers that need none of its CPUs or GPUs: nothing
            is reserved there. Empty: the back end chooses, and reserves.
    """

    processes: Sequence[int]
    cpus: float = 1.0
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    strategy: Strategy = "pack"
    nodes: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "processes", tuple(self.processes))
        object.__setattr__(self, "resources", dict(self.resources))
        if not self.processes or min(self.processes) < 1 or min(self.needs.values(), default=0.0) < 0:
            raise UserError(
                "a pool needs at least one process on every node, and resources of 0 or more",
                found=f"processes={list(self.processes)}, each of which needs {describe_pool(self.needs)}",
                remedy="write one positive number per node, such as [4, 4]",
            )

    @property
    def world_size(self) -> int:
        return sum(self.processes)

    @property
    def needs(self) -> dict[str, float]:
        """What one process needs, by the names that Ray uses."""
        named = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: amount for name, amount in named.items() if amount}

    def bundles(self) -> list[dict[str, float]]:
        """Returns what each node must grant as a whole."""
        return [{name: n * amount for name, amount in self.needs.items()} for n in self.processes]


@dataclass(frozen=True)
class ClusterNode:
    """A machine of the cluster and what it has.

    ``key`` is the back end's name of it, and ``is_own`` says that this process is there.
    """

    name: str
    total: Mapping[str, float]
    key: str = ""
    is_own: bool = False

    def holds(self, needs: Mapping[str, float], amounts: Mapping[str, float]) -> int:
        """Returns how many processes with these needs fit into ``amounts``."""
        counts = [int(amounts.get(name, 0.0) / need + _SLACK) for name, need in needs.items() if need > 0]
        return min(counts, default=2**31)


def check_pool(pool: ResourcePool, nodes: Sequence[ClusterNode]) -> None:
    """
    Raises:
        UserError: the nodes can never grant the pool: more processes than they have devices for, on one node or in all.
    """
    room = [node.holds(pool.needs, node.total) for node in nodes]
    if max(pool.processes) > max(room, default=0) or pool.world_size > sum(room):
        has = "; ".join(f"{node.name} has {describe_pool(node.total, pool.needs)}" for node in nodes)
        raise UserError(
            f"the cluster cannot grant the pool {list(pool.processes)} ({pool.strategy})",
            found=f"each process needs {describe_pool(pool.needs)}; {has or 'there is no node'}",
            remedy=f"start nodes that have {' and '.join(pool.needs)}, or ask for fewer processes, or less for each",
        )


def pool_busy_error(
    pool: ResourcePool, nodes: Sequence[ClusterNode], free: Mapping[str, float], waited_s: float
) -> UserError:
    """Makes the error for a pool that could be granted, were others not holding what it needs.

    Args:
        free: what all nodes together have left.
    """
    has = "; ".join(f"{node.name} has {describe_pool(node.total, pool.needs)}" for node in nodes)
    return UserError(
        f"the pool {list(pool.processes)} ({pool.strategy}) was not granted within {waited_s:g} s",
        found=f"each process needs {describe_pool(pool.needs)}; {has}; free in all: {describe_pool(free, pool.needs)}",
        remedy="stop what holds the rest, wait longer, or ask for less",
    )


def describe_pool(amounts: Mapping[str, float], only: Mapping[str, float] | None = None) -> str:
    """Writes ``1 CPU and 2 GPU``, of the resources in ``only``."""
    names = list(only if only is not None else amounts)
    return " and ".join(f"{amounts.get(name, 0.0):g} {name}" for name in names) or "nothing"
