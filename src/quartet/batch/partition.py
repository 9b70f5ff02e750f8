"""Cuts mini-batches into micro-batches under a token budget, for one rank or for several that compute side by side.

``plan_micro_batches`` keeps all of these together: no part computes more tokens than the budget; every rank has equally
many parts; each sequence is in one part, with those it must stay with; a group stays with its prompt where that is
cheaper; parts are as equal in cost as they come (``balanced_partition_under_cap``: multiway number partitioning), and
as few.

**Cost.** Its unit is a token attending to one token. A token costs ``token_cost`` (everything but attention) and one
for each token that it attends to: its ancestors, those before it in its segment, and itself. A segment of n tokens
below d costs ``n (token_cost + d) + n (n + 1) / 2``; a prompt's cost counts once per part.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from quartet.batch.ragged import RaggedBatch
from quartet.config.errors import UserError

Parts = list[list[int]]
_Division = list[tuple[int, int, list[int]]]
"""Its parts that are not empty as (cost, first item, items), ascending. First items differ: lists are never compared.
Nothing is taken off the costs, as it is in the paper: only differences count."""

_NEAR = 10_000
"""A part dearer than a fair one by less than one part in so many is not improved."""
_MOST_PAIRS = 20_000
"""Pairs of items that an improvement looks at; most end after a few hundred."""


def greedy_partition(costs: Sequence[int], num_parts: int) -> Parts:
    """Deals items to exactly so many parts, the dearest first, each to the cheapest part so far."""
    parts: Parts = [[] for _ in range(num_parts)]
    # The count breaks ties, so that items of cost 0 fill empty parts; the index makes the rest deterministic.
    heap = [(0, 0, p) for p in range(num_parts)]
    for i in _largest_first(costs):
        cost, count, p = heap[0]
        parts[p].append(i)
        heapq.heapreplace(heap, (cost + costs[i], count + 1, p))
    return parts


def _largest_first(numbers: Sequence[int]) -> list[int]:
    """Returns indices, largest number first; of equal numbers the first one first."""
    return sorted(range(len(numbers)), key=numbers.__getitem__, reverse=True)


def karmarkar_karp(costs: Sequence[int], num_parts: int, *, equal_counts: bool = False) -> Parts:
    """Deals items to exactly so many parts by the method of Karmarkar and Karp (1982), for any number of parts.

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


def best_fit_decreasing(sizes: Sequence[int], cap: int) -> Parts:
    """Deals items to few parts of at most ``cap``: the largest first, each to the part that has least room left for it.

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


def balanced_partition(costs: Sequence[int], num_parts: int) -> Parts:
    """Deals items to exactly so many parts, the dearest as cheap as was found."""
    parts = balanced_partition_under_cap(costs, num_parts, costs, sum(costs))
    assert parts is not None
    return parts


def balanced_partition_under_cap(costs: Sequence[int], num_parts: int, sizes: Sequence[int], cap: int) -> Parts | None:
    """Deals items to exactly so many parts, the dearest as cheap as was found; None where no way keeps to ``cap``.

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
        lambda: karmarkar_karp(costs, num_parts),
        lambda: greedy_partition(costs, num_parts),
        lambda: karmarkar_karp(costs, num_parts, equal_counts=True),
        lambda: greedy_partition(sizes, num_parts),
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
    """Deals items to exactly so many parts of at most ``cap``, where that is found."""
    parts = karmarkar_karp(sizes, num_parts)
    if max(_totals(sizes, parts)) <= cap:
        return parts
    parts = best_fit_decreasing(sizes, cap)
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


Atoms = Sequence[Sequence[int]]
"""Sequences that must stay together, usually one each; every sequence of a batch once."""

TOKEN_COST = 16_384
"""Where the model's shape is not known. By FLOPs it is six times the width of a usual decoder layer, 12 width² weights
of two FLOPs each against 4 width FLOPs per attended token; models of 0.5 to 7 billion weights have 8,000 to 32,000."""

_FINENESSES = (1, 2, 4, 8, 16)
"""Pieces of groups cost at most a fair share over one of these."""
_EVEN = 1.02
"""Parts this close to a fair one are not made more equal."""
_FINE = 256
"""Runs of a group are made equal to within one part in so many."""


def plan_micro_batches(
    batches: Sequence[tuple[RaggedBatch, Atoms]],
    budget: int,
    *,
    num_ranks: int = 1,
    share: bool,
    budget_key: str,
    token_cost: int = TOKEN_COST,
) -> list[list[list[list[int]]]]:
    """Returns ``plan[rank][batch]``: that rank's micro-batches of that batch, each the sequences of one, atoms in
    order.

    Every rank has equally many of a batch; where atoms run out, some are empty. The n-th ones of all ranks are alike
    in cost, the largest come first, and of these the rank that has least so far gets the dearest. The result is a
    function of the arguments alone.

    Args:
        budget: most tokens that a micro-batch computes.
        share: a part computes each segment that its sequences need once. Otherwise every sequence counts with its
            ancestors, and groups do not matter.
        budget_key: the recipe key behind ``budget``, for messages.

    Raises:
        UserError: an atom alone is above ``budget``.
    """
    plan: list[list[list[list[int]]]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for batch, atoms in batches:
        tree = AtomTree(batch, atoms, share=share, token_cost=token_cost)
        _check_atoms(batch, atoms, [block.tokens for block in tree.alone], budget, budget_key)
        for of_rank in plan:
            of_rank.append([])
        parts = sorted(_parts(tree, budget, num_ranks), key=lambda part: (-part.cost, part.atoms))
        # Neighbours are alike in cost. Passes with most tokens go first: if memory does not suffice, it shows there.
        rounds = [parts[i : i + num_ranks] for i in range(0, len(parts), num_ranks)]
        for side_by_side in sorted(rounds, key=lambda found: -max(part.tokens for part in found)):
            idlest_first = sorted(range(num_ranks), key=loads.__getitem__)
            for part, rank in zip(side_by_side, idlest_first, strict=True):
                loads[rank] += part.cost
                plan[rank][-1].append([s for a in part.atoms for s in atoms[a]])
    return plan


class AtomBlock(NamedTuple):
    """Atoms that are computed in one pass, with the tokens and the cost of that pass."""

    atoms: list[int]
    tokens: int
    cost: int


_Run = tuple[int, int, int]
"""Neighbours of a group: the cost and tokens of their pass, the place of the first."""
_Step = tuple[AtomBlock, int, int, list[tuple[int, int, int]]]
"""An atom alone; tokens and cost of its segments that the atom before it has not; and each of these that some atom
before that one has: the last that has it, tokens, cost."""


def _parts(tree: AtomTree, budget: int, num_ranks: int) -> list[AtomBlock]:
    """Makes a multiple of ``num_ranks`` parts under ``budget``, few and as equal in cost as they come.

    Ranks wait for the dearest of the parts side by side, so groups are cut where that evens out more than copies of
    prompts cost: the best of several finenesses is taken. One rank computes one part after the other and cuts groups
    for the budget alone.
    """
    if not tree.alone:
        return []
    whole, largest = tree.block(range(len(tree.alone))), max(block.cost for block in tree.alone)
    fair = whole.cost // _multiple(-(-whole.tokens // budget), num_ranks)
    limits = [whole.cost]
    if num_ranks > 1 and tree.share:
        limits += [int(_EVEN * max(fair // fineness, largest)) for fineness in _FINENESSES]
    best: list[AtomBlock] = []
    blocks: list[AtomBlock] = []
    for limit in limits:
        former, blocks = blocks, tree.blocks(budget, limit)
        if blocks == former:
            continue
        dealt = _few_parts(blocks, budget, num_ranks)
        parts = [tree.block(sorted(a for b in part for a in blocks[b].atoms)) for part in dealt]
        if best and _waited(parts, num_ranks) >= _waited(best, num_ranks):
            break
        best = parts
        if _waited(best, num_ranks) <= _EVEN * max(whole.cost / num_ranks, largest):
            break
    return best


def _waited(parts: Sequence[AtomBlock], num_ranks: int) -> int:
    """Returns what all ranks take, if the parts side by side are alike and all wait for the dearest."""
    return sum(sorted((part.cost for part in parts), reverse=True)[::num_ranks])


def _multiple(number: int, of: int) -> int:
    """Returns the next multiple that is not below ``number``."""
    return -(-number // of) * of


def _few_parts(blocks: Sequence[AtomBlock], budget: int, num_ranks: int) -> list[list[int]]:
    """Deals blocks, which stay whole, to few parts under ``budget``, in a multiple of ``num_ranks``."""
    costs, tokens = [block.cost for block in blocks], [block.tokens for block in blocks]
    # Two blocks of more than half the budget never share a part.
    num_parts = _multiple(max(-(-sum(tokens) // budget), sum(2 * n > budget for n in tokens)), num_ranks)
    parts = balanced_partition_under_cap(costs, num_parts, tokens, budget)
    if parts is None:
        most = _multiple(len(best_fit_decreasing(tokens, budget)), num_ranks)
        while num_parts < most:
            # About 3 % more: few attempts are needed this way. Most inputs need what best fit needs.
            num_parts = min(_multiple(num_parts + max(num_parts // 32, 1), num_ranks), most)
            if max(sum(map(tokens.__getitem__, part)) for part in greedy_partition(tokens, num_parts)) <= budget:
                break
        parts = balanced_partition_under_cap(costs, num_parts, tokens, budget)
        assert parts is not None
    return parts


class AtomTree:
    """Atoms (sequences that stay together) of a batch, the segments that each needs, and what passes over them cost.

    Attributes:
        share: a pass computes each segment once.
        alone: of each atom, a pass over it alone.
    """

    def __init__(self, batch: RaggedBatch, atoms: Atoms, *, share: bool, token_cost: int = TOKEN_COST) -> None:
        self.share = share
        self._tokens = batch.segment_lengths
        self._parents = batch.parents
        self._costs: list[int] = []
        # Of each segment with its ancestors: these themselves, their tokens, their cost.
        chains: list[tuple[int, ...]] = []
        depths: list[int] = []
        sums: list[int] = []
        for k, (length, parent) in enumerate(zip(self._tokens, batch.parents, strict=True)):
            above, depth, cost = ((), 0, 0) if parent < 0 else (chains[parent], depths[parent], sums[parent])
            self._costs.append(length * (token_cost + depth) + length * (length + 1) // 2)
            chains.append((*above, k))
            depths.append(depth + length)
            sums.append(cost + self._costs[k])
        self._needed: list[tuple[int, ...]] = []
        self._known_steps: dict[int, list[_Step]] = {}
        self.alone: list[AtomBlock] = []
        for a, atom in enumerate(atoms):
            leaves = [batch.leaves[s] for s in atom]
            alone = AtomBlock([a], sum([depths[k] for k in leaves]), sum([sums[k] for k in leaves]))
            if len(leaves) == 1:
                needed = chains[leaves[0]]
            else:
                needed = tuple(dict.fromkeys(k for leaf in leaves for k in chains[leaf]))
                alone = self._pass([a], needed) if share else alone
            self._needed.append(needed)
            self.alone.append(alone)

    def block(self, atoms: Sequence[int]) -> AtomBlock:
        """Makes one pass over these atoms."""
        if not self.share:
            alone = [self.alone[a] for a in atoms]
            return AtomBlock(list(atoms), sum(block.tokens for block in alone), sum(block.cost for block in alone))
        return self._pass(list(atoms), {k for a in atoms for k in self._needed[a]})

    def _pass(self, atoms: list[int], segments: Iterable[int]) -> AtomBlock:
        return AtomBlock(
            atoms, sum(map(self._tokens.__getitem__, segments)), sum(map(self._costs.__getitem__, segments))
        )

    def blocks(self, budget: int, limit: int) -> list[AtomBlock]:
        """Returns whole groups, or the runs of at most ``budget`` tokens and ``limit`` cost into which they are cut.

        A group is cut in the order of its tree into the fewest runs, as equal as they come; each run computes a copy of
        its prefix. An atom dearer than the limit is a run. Unshared, every atom is a block.
        """
        if not self.share:
            return self.alone
        return [run for group in self._whole_groups for run in self._equal_runs(group, budget, limit)]

    @cached_property
    def _whole_groups(self) -> list[AtomBlock]:
        """In the order of the tree, so that neighbours have most in common."""
        in_order = [sorted(group, key=self._needed.__getitem__) for group in self.groups()]
        return [self.block(group) if len(group) > 1 else self.alone[group[0]] for group in in_order]

    def _steps(self, atoms: Sequence[int]) -> list[_Step]:
        """Finds what each of these atoms adds to a run of those before it."""
        found: list[_Step] = []
        last: dict[int, int] = {}
        for place, a in enumerate(atoms):
            tokens = cost = 0
            again: list[tuple[int, int, int]] = []
            for k in self._needed[a]:
                before = last.get(k, -1)
                last[k] = place
                if before < place - 1 or not place:
                    tokens, cost = tokens + self._tokens[k], cost + self._costs[k]
                    if before >= 0:
                        again.append((before, self._tokens[k], self._costs[k]))
            found.append((self.alone[a], tokens, cost, again))
        return found

    def groups(self) -> list[list[int]]:
        """Groups the atoms that have a root in common, directly or through others; each list ascends."""
        roots = [[k for k in needed if self._parents[k] < 0] for needed in self._needed]
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

    def _equal_runs(self, whole: AtomBlock, budget: int, limit: int) -> list[AtomBlock]:
        """Returns the fewest runs, and of these about the ones whose dearest costs least."""
        if whole.tokens <= budget and whole.cost <= limit:
            return [whole]
        if (steps := self._known_steps.get(whole.atoms[0])) is None:
            steps = self._known_steps[whole.atoms[0]] = self._steps(whole.atoms)
        runs = _filled(steps, budget, limit)
        largest = max([alone.cost for alone, *_ in steps])
        low, high = max(-(-whole.cost // len(runs)), largest), max(runs)[0]
        while high - low > high // _FINE:
            middle = (low + high) // 2
            found = _filled(steps, budget, middle)
            if len(found) <= len(runs):
                runs, high = found, max(found)[0]
            else:
                low = middle + 1
        ends = [*(first for _, _, first in runs[1:]), len(whole.atoms)]
        return [AtomBlock(whole.atoms[first:end], t, c) for (c, t, first), end in zip(runs, ends, strict=True)]


def _filled(steps: list[_Step], budget: int, limit: int) -> list[_Run]:
    """Returns runs filled one after the other."""
    runs: list[_Run] = []
    first = tokens = cost = 0
    for place, (alone, more_tokens, more_cost, again) in enumerate(steps):
        if again:
            held = [(t, c) for before, t, c in again if before >= first]
            more_tokens, more_cost = more_tokens - sum(t for t, _ in held), more_cost - sum(c for _, c in held)
        tokens, cost = tokens + more_tokens, cost + more_cost
        if place and (tokens > budget or cost > limit):
            runs.append((cost - more_cost, tokens - more_tokens, first))
            first, (_, tokens, cost) = place, alone
    return [*runs, (cost, tokens, first)]


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
