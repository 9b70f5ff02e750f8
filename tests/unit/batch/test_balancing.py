"""Numbers divided into parts: by hand, against plain Karmarkar-Karp, against the best of all divisions, under caps."""

from hypothesis import given
from hypothesis import strategies as st

from quartet.batch.partition import (
    balanced_partition,
    balanced_partition_under_cap,
    best_fit_decreasing,
    greedy_partition,
    karmarkar_karp,
)

COSTS = st.lists(st.one_of(st.integers(1, 100), st.integers(1, 5)), max_size=60)


def totals(costs, parts):
    return [sum(costs[i] for i in part) for part in parts]


def plain_karmarkar_karp(costs, num_parts):
    """As it is usually written: every division has all parts, and its cheapest part is taken off the others."""
    divisions = [[(cost, [i]), *[(0, [])] * (num_parts - 1)] for i, cost in enumerate(costs)]
    while len(divisions) > 1:
        by_spread = sorted(
            range(len(divisions)),
            key=lambda d: (
                -(max(divisions[d])[0] - min(divisions[d])[0]),
                min(i for _, items in divisions[d] for i in items),
            ),
        )
        one, other = (sorted(divisions[d], key=lambda p: (p[0], min(p[1], default=-1))) for d in by_spread[:2])
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        cheapest = min(cost for cost, _ in joined)
        divisions = [divisions[d] for d in by_spread[2:]] + [[(cost - cheapest, items) for cost, items in joined]]
    return [items for _, items in divisions[0]] if divisions else [[] for _ in range(num_parts)]


@given(COSTS, st.integers(1, 9))
def test_every_item_is_in_one_part_and_none_is_empty_without_need(costs, num_parts):
    for divide in (greedy_partition, karmarkar_karp, balanced_partition):
        parts = divide(costs, num_parts)
        assert len(parts) == num_parts and sorted(i for part in parts for i in part) == list(range(len(costs)))
        assert sum(map(bool, parts)) == min(num_parts, len(costs))
        assert divide(tuple(costs), num_parts) == parts


@given(COSTS, st.integers(1, 9))
def test_no_dearer_than_longest_first_and_karmarkar_karp(costs, num_parts):
    plain = plain_karmarkar_karp(costs, num_parts)
    dearest = max(totals(costs, balanced_partition(costs, num_parts)))
    assert dearest <= max(totals(costs, plain))
    assert dearest <= max(totals(costs, greedy_partition(costs, num_parts)))
    assert sorted(map(sorted, karmarkar_karp(costs, num_parts))) == sorted(map(sorted, plain))


def test_a_swap_makes_the_dearest_part_cheaper():
    costs = [3, 3, 2, 2, 2]
    for divide in (greedy_partition, karmarkar_karp):
        assert max(totals(costs, divide(costs, 2))) == 7
    assert totals(costs, balanced_partition(costs, 2)) == [6, 6]
    # Not where the cap keeps the two dear ones apart.
    parts = balanced_partition_under_cap(costs, 2, [5, 4, 1, 1, 1], 8)
    assert parts is not None and sorted(totals(costs, parts)) == [5, 7]


ITEMS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 400)), min_size=1, max_size=40)


@given(ITEMS, st.integers(1, 12), st.integers(40, 120))
def test_no_part_is_above_the_cap(items, num_parts, cap):
    sizes, costs = [size for size, _ in items], [cost for _, cost in items]
    parts = balanced_partition_under_cap(costs, num_parts, sizes, cap)
    allowed = [
        division
        for division in (
            greedy_partition(sizes, num_parts),
            greedy_partition(costs, num_parts),
            plain_karmarkar_karp(costs, num_parts),
        )
        if max(totals(sizes, division)) <= cap
    ]
    if parts is None:
        assert not allowed and len(best_fit_decreasing(sizes, cap)) > num_parts
        return
    assert len(parts) == num_parts and sorted(i for part in parts for i in part) == list(range(len(items)))
    assert max(totals(sizes, parts)) <= cap
    assert sum(map(bool, parts)) == min(num_parts, len(items))
    for division in allowed:
        assert max(totals(costs, parts)) <= max(totals(costs, division))
