"""Cuts a mini-batch into micro-batches under a token budget, as equal in cost as they come.

In a part of a ragged batch a prompt that several of its sequences share is computed once. ``plan_tree_micro_batches``
cuts a batch under a budget, ``plan_tree_shares`` deals one out to several workers, ``deal`` knows costs alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from quartet.batch.ragged import RaggedBatch
from quartet.config.errors import UserError

_FINENESSES = (1, 2, 4, 8, 16)
"""Pieces of groups are at most a fair share over one of these."""
_EVEN = 1.02
"""Shares this close to a fair one are not made more equal."""


def plan_tree_micro_batches(
    batch: RaggedBatch, atoms: Sequence[Sequence[int]], budget: int, *, share: bool, budget_key: str
) -> list[list[int]]:
    """Balanced micro-batches of a ragged batch, none of which computes more than ``budget`` tokens.

    With ``share`` a part computes each segment that its sequences need once. Atoms with a common segment (the members
    of a group) stay in one part where they fit. A group that does not fit is cut, in the order of its tree, into the
    fewest runs of atoms, as equal as they come; each run computes a copy of its prefix.

    Args:
        atoms: sequences that must stay together, usually one each; every sequence of the batch once.
        share: otherwise every sequence counts with its ancestors, and groups do not matter.
        budget_key: the recipe key behind ``budget``, for messages.

    Returns:
        Sequence indices of each part, atoms in the order given; parts in the order of their first atoms. The result
        is a function of the arguments alone.

    Raises:
        UserError: an atom alone is above ``budget``.
        ValueError: a sequence is in no atom or in several, or an atom is empty.
    """
    if sorted(s for atom in atoms for s in atom) != list(range(len(batch))) or not all(atoms):
        raise ValueError(f"atoms must hold each of the {len(batch)} sequences once, found {[list(a) for a in atoms]}")
    tree = AtomTree(batch, atoms, share)
    _check_atoms(batch, atoms, [tree.cost([a]) for a in range(len(atoms))], budget, budget_key)
    blocks = tree.blocks(budget)
    costs = [tree.cost(block) for block in blocks]
    parts = sorted(sorted(a for b in part for a in blocks[b]) for part in _few_parts(costs, budget))
    return [[s for a in part for s in atoms[a]] for part in parts]


def plan_tree_shares(
    batch: RaggedBatch, atoms: Sequence[Sequence[int]], num_shares: int, *, share: bool
) -> list[list[int]]:
    """The atoms of a ragged batch dealt out to ``num_shares`` workers, as equal in computed tokens as they come.

    With ``share`` every worker computes each segment that its sequences need once, so a group is cut where that evens
    out more than copies of its prefix cost: the best of several finenesses is taken.

    Args:
        atoms: sequences that must stay together; none is empty.
        share: otherwise every sequence counts with its ancestors, and groups do not matter.

    Returns:
        Atoms of each worker, ascending, none where they run out. The result is a function of the arguments alone.
    """
    if not atoms:
        return [[] for _ in range(num_shares)]
    tree = AtomTree(batch, atoms, share)
    every = range(len(atoms))
    fair, largest = -(-tree.cost(every) // num_shares), max(tree.cost([a]) for a in every)
    best: list[list[int]] = []
    least = 0
    for fineness in _FINENESSES:
        cap = max(fair // fineness, largest)
        blocks = tree.blocks(cap)
        parts = [
            [a for b in part for a in blocks[b]] for part in deal([tree.cost(block) for block in blocks], num_shares)
        ]
        dearest = max(map(tree.cost, parts))
        if not best or dearest < least:
            best, least = parts, dearest
        if not share or cap == largest or least <= _EVEN * fair:
            break
    return [sorted(part) for part in best]


def deal(costs: Sequence[int], num_parts: int) -> list[list[int]]:
    """Items dealt to exactly so many parts, the dearest first, each to the cheapest part so far."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    # The count breaks ties, so that items of cost 0 fill empty parts; the index makes the rest deterministic.
    heap = [(0, 0, p) for p in range(num_parts)]
    for b in sorted(range(len(costs)), key=lambda b: (-costs[b], b)):
        cost, count, p = heap[0]
        parts[p].append(b)
        heapq.heapreplace(heap, (cost + costs[b], count + 1, p))
    return parts


def _few_parts(costs: Sequence[int], budget: int) -> list[list[int]]:
    """Blocks that stay whole into few parts of equal cost; at most as many as blocks."""
    if not costs:
        return []
    # Two blocks of more than half the budget never share a part; without this bound such input takes many
    # attempts.
    num_parts = max(-(-sum(costs) // budget), sum(2 * cost > budget for cost in costs), 1)
    while True:
        parts = deal(costs, min(num_parts, len(costs)))
        if all(sum(costs[b] for b in part) <= budget for part in parts):
            return parts
        # About 3 % more: an attempt costs as much as the plan, and few are needed this way.
        num_parts += max(num_parts // 32, 1)


class AtomTree:
    """Atoms (sequences that stay together) of a batch, and the segments that each needs."""

    def __init__(self, batch: RaggedBatch, atoms: Sequence[Sequence[int]], share: bool) -> None:
        self._lengths, self._share = batch.segment_lengths, share
        self._chains = [[batch.chain(s) for s in atom] for atom in atoms]
        self._needed = [{k for chain in of_atom for k in chain} for of_atom in self._chains]

    def cost(self, part: Sequence[int]) -> int:
        """Tokens that a part of these atoms computes."""
        if self._share:
            return sum(self._lengths[k] for k in set().union(*(self._needed[a] for a in part)))
        return sum(self._lengths[k] for a in part for chain in self._chains[a] for k in chain)

    def blocks(self, cap: int) -> list[list[int]]:
        """Atoms that travel together: whole groups, or the runs of at most ``cap`` tokens into which they are cut."""
        if not self._share:
            return [[a] for a in range(len(self._chains))]
        # In the order of the tree, so that neighbours have most in common.
        groups = [sorted(group, key=self._chains.__getitem__) for group in self.groups()]
        return [run for group in groups for run in self._equal_runs(group, cap)]

    def groups(self) -> list[list[int]]:
        """Atoms that have a root in common, directly or through others; each list ascends."""
        roots = [[chain[0] for chain in of_atom] for of_atom in self._chains]
        leader: dict[int, int] = {}

        def find(root: int) -> int:
            while (above := leader.setdefault(root, root)) != root:
                leader[root] = root = leader[above]
            return root

        for first, *others in roots:
            for root in others:
                leader[find(root)] = find(first)
        groups: dict[int, list[int]] = {}
        for a, of_atom in enumerate(roots):
            groups.setdefault(find(of_atom[0]), []).append(a)
        return list(groups.values())

    def _equal_runs(self, group: Sequence[int], budget: int) -> list[list[int]]:
        """The fewest runs of ``group`` under ``budget``, and of these the ones whose dearest costs least."""
        runs = self._filled(group, budget)
        if len(runs) == 1:
            return runs
        low, high = max(self.cost([a]) for a in group), budget
        while low < high:
            middle = (low + high) // 2
            found = self._filled(group, middle)
            if len(found) <= len(runs):
                runs, high = found, middle
            else:
                low = middle + 1
        return runs

    def _filled(self, group: Sequence[int], cap: int) -> list[list[int]]:
        """Runs filled one after the other up to ``cap`` distinct tokens."""
        runs: list[list[int]] = []
        held: set[int] = set()
        cost = 0
        for a in group:
            more = sum(self._lengths[k] for k in self._needed[a] - held)
            if not runs or cost + more > cap:
                runs.append([])
                held, cost, more = set(), 0, self.cost([a])
            runs[-1].append(a)
            held |= self._needed[a]
            cost += more
        return runs


def _check_atoms(
    batch: RaggedBatch, atoms: Sequence[Sequence[int]], costs: Sequence[int], budget: int, key: str
) -> None:
    for atom, cost in zip(atoms, costs, strict=True):
        if cost <= budget:
            continue
        names = ", ".join(repr(batch.ids[s]) for s in atom[:4]) + (", …" if len(atom) > 4 else "")
        problem, noun = "a sequence is", "sequence"
        if len(atom) > 1:
            problem, noun = "sequences that must stay together are", "sequences"
        raise UserError(
            f"{problem} longer than {key}",
            found=f"{noun} {names} of {cost} tokens, {key}={budget}",
            remedy=f"raise {key} to at least {max(costs)} or shorten the sequences",
        )
