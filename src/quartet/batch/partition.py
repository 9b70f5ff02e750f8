"""Cuts a mini-batch into micro-batches under a token budget, as equal in cost as they come.

``plan_micro_batches`` knows items and their costs; ``plan_tree_micro_batches`` cuts a ragged batch, in which a prompt
that several sequences of one part share is computed once. ``plan_tree_shares`` deals one out to several workers.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from quartet.batch.ragged import RaggedBatch
from quartet.config.errors import UserError

_FINENESSES = (1, 2, 4, 8, 16)
"""Pieces of groups are at most a fair share over one of these."""
_EVEN = 1.02
"""Shares this close to a fair one are not made more equal."""


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
    parts = _spread([sum(costs[i] for i in block) for block in blocks], budget, multiple_of)
    plan = [sorted(i for b in part for i in blocks[b]) for part in parts]
    return sorted(plan, key=lambda part: part[0] if part else len(costs))


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
        UserError: an atom alone is above ``budget``, or ``budget`` is below 1.
        ValueError: a sequence is in no atom or in several, or an atom is empty.
    """
    if sorted(s for atom in atoms for s in atom) != list(range(len(batch))) or not all(atoms):
        raise ValueError(f"atoms must hold each of the {len(batch)} sequences once, found {[list(a) for a in atoms]}")
    _check_budget(budget, budget_key)
    lengths = batch.segment_lengths
    chains = [[batch.chain(s) for s in atom] for atom in atoms]
    needed = [{k for chain in of_atom for k in chain} for of_atom in chains]
    if share:
        costs = [sum(lengths[k] for k in segments) for segments in needed]
    else:
        costs = [sum(lengths[k] for chain in of_atom for k in chain) for of_atom in chains]
    _check_atoms(batch, atoms, costs, budget, budget_key)
    blocks = [[a] for a in range(len(atoms))]
    if share:
        # In the order of the tree, so that neighbours have most in common.
        groups = [sorted(group, key=chains.__getitem__) for group in _linked([[c[0] for c in of] for of in chains])]
        blocks = [run for group in groups for run in _equal_runs(group, needed, lengths, budget)]
        costs = [sum(lengths[k] for k in set().union(*(needed[a] for a in block))) for block in blocks]
    parts = [sorted(a for b in part for a in blocks[b]) for part in _spread(costs, budget, 1)]
    return [[s for a in part for s in atoms[a]] for part in sorted(parts)]


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
    lengths = batch.segment_lengths
    chains = [[batch.chain(s) for s in atom] for atom in atoms]
    if not share:
        parts, _ = _longest_first([sum(lengths[k] for c in of for k in c) for of in chains], num_shares)
        return [sorted(part) for part in parts]
    needed = [{k for chain in of_atom for k in chain} for of_atom in chains]
    groups = [sorted(group, key=chains.__getitem__) for group in _linked([[c[0] for c in of] for of in chains])]

    def cost(part: Sequence[int]) -> int:
        return sum(lengths[k] for k in set().union(*(needed[a] for a in part)))

    fair, largest = -(-cost(range(len(atoms))) // num_shares), max(cost([a]) for a in range(len(atoms)))
    best: list[list[int]] = []
    least = 0
    for fineness in _FINENESSES:
        cap = max(fair // fineness, largest)
        blocks = [run for group in groups for run in _equal_runs(group, needed, lengths, cap)]
        dealt, _ = _longest_first([cost(block) for block in blocks], num_shares)
        parts = [[a for b in part for a in blocks[b]] for part in dealt]
        dearest = max(map(cost, parts))
        if not best or dearest < least:
            best, least = parts, dearest
        if cap == largest or least <= _EVEN * fair:
            break
    return [sorted(part) for part in best]


def _spread(costs: Sequence[int], budget: int, multiple_of: int) -> list[list[int]]:
    """Blocks that stay whole into few parts of equal cost; at most as many as blocks, rounded up."""
    if not costs:
        return []
    most = _round_up(len(costs), multiple_of)
    # Two blocks of more than half the budget never share a part; without this bound such input takes many
    # attempts.
    needed = max(-(-sum(costs) // budget), sum(2 * cost > budget for cost in costs), 1)
    num_parts = min(_round_up(needed, multiple_of), most)
    while True:
        parts, dearest = _longest_first(costs, num_parts)
        if dearest <= budget:
            return parts
        # About 3 % more: an attempt costs as much as the plan, and few are needed this way.
        num_parts = min(num_parts + _round_up(max(num_parts // 32, 1), multiple_of), most)


def _linked(roots: Sequence[Sequence[int]]) -> list[list[int]]:
    """Atoms that have a root in common, directly or through others; each list ascends."""
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


def _equal_runs(
    group: Sequence[int], needed: Sequence[Collection[int]], lengths: Sequence[int], budget: int
) -> list[list[int]]:
    """The fewest runs of ``group`` under ``budget``, and of these the ones whose dearest costs least."""
    runs = _filled(group, needed, lengths, budget)
    if len(runs) == 1:
        return runs
    low, high = max(sum(lengths[k] for k in needed[a]) for a in group), budget
    while low < high:
        middle = (low + high) // 2
        found = _filled(group, needed, lengths, middle)
        if len(found) <= len(runs):
            runs, high = found, middle
        else:
            low = middle + 1
    return runs


def _filled(
    group: Sequence[int], needed: Sequence[Collection[int]], lengths: Sequence[int], cap: int
) -> list[list[int]]:
    """Runs filled one after the other up to ``cap`` distinct tokens."""
    runs: list[list[int]] = []
    held: set[int] = set()
    cost = 0
    for a in group:
        more = sum(lengths[k] for k in needed[a] if k not in held)
        if not runs or cost + more > cap:
            runs.append([])
            held, cost = set(), 0
            more = sum(lengths[k] for k in needed[a])
        runs[-1].append(a)
        held.update(needed[a])
        cost += more
    return runs


def _check_budget(budget: int, key: str) -> None:
    if budget < 1:
        raise UserError(f"{key} leaves no room for a token", found=f"{key}={budget}", remedy=f"set {key} above 0")


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


def _check(costs: Sequence[int], budget: int, multiple_of: int, groups: Sequence[int] | None) -> None:
    if multiple_of < 1:
        raise ValueError(f"multiple_of must be at least 1, found {multiple_of}")
    if groups is not None and len(groups) != len(costs):
        raise ValueError(f"{len(groups)} groups for {len(costs)} items")
    _check_budget(budget, "token_budget")
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
