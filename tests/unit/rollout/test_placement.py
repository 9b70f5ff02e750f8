"""Rows without gaps, in bands by falling length; stretches that read little."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from quartet.rollout.prefix_cache import round_up
from quartet.rollout.rows import CALL_TOKENS, row_ranges
from quartet.rollout.scheduler import BAND, compact_rows


@dataclass(eq=False)
class Item:
    length: int


def length(item: Item) -> int:
    return item.length


def lengths(rows: list[Item | None]) -> list[int]:
    return [item.length for item in rows if item is not None]


@given(
    present=st.lists(st.one_of(st.none(), st.integers(0, 400)), max_size=80),
    coming=st.lists(st.integers(0, 400), max_size=40),
)
def test_no_row_is_lost_and_copies_come_in_a_safe_order(present: list[int | None], coming: list[int]) -> None:
    """A model of the slots: each copy reads a slot that still holds its request."""
    rows = [None if n is None else Item(n) for n in present]
    arrivals = [Item(n) for n in coming]
    slots = {row: item for row, item in enumerate(rows) if item is not None}
    where = {item: row for row, item in slots.items()}
    everybody = {*slots.values(), *arrivals}
    changes = compact_rows(rows, arrivals, length)
    for item, row in changes:
        if item in where:
            assert slots[where[item]] is item
        slots[row] = item
    assert set(rows) == everybody
    assert len(rows) == len(everybody)
    assert all(slots[row] is item for row, item in enumerate(rows))
    touched = [row for _, row in changes]
    assert len(touched) == len(set(touched))


@given(st.lists(st.lists(st.integers(1, 300), max_size=6), min_size=1, max_size=40))
def test_bands_stay_nearly_sorted_under_churn(waves: list[list[int]]) -> None:
    """After each change the requests of a filled gap belong in its band."""
    rows: list[Item | None] = []
    for wave in waves:
        for row in range(0, len(rows), 3):
            rows[row] = None
        changes = compact_rows(rows, [Item(n) for n in wave], length)
        ranked = sorted(lengths(rows), reverse=True)
        for item, row in changes:
            band = ranked[row // BAND * BAND : (row // BAND + 1) * BAND]
            assert band[-1] <= item.length <= band[0]


def cost(cuts: list[int], sizes: list[int]) -> int:
    ends = [*cuts, len(sizes)]
    starts = [0, *cuts]
    return sum(
        CALL_TOKENS + (end - start) * round_up(max(sizes[start:end])) for start, end in zip(starts, ends, strict=True)
    )


@given(st.lists(st.integers(1, 600), min_size=1, max_size=5 * BAND))
def test_stretches_are_the_cheapest_of_all(sizes: list[int]) -> None:
    found = row_ranges(sizes, round_up)
    assert [s.start for s in found] == [0, *[s.end for s in found[:-1]]]
    assert found[-1].end == len(sizes)
    assert all(s.longest == max(sizes[s.start : s.end]) for s in found)
    places = range(BAND, len(sizes), BAND)
    every_cut = [[p for i, p in enumerate(places) if bits >> i & 1] for bits in range(1 << len(places))]
    assert cost([s.start for s in found[1:]], sizes) == min(cost(cuts, sizes) for cuts in every_cut)
