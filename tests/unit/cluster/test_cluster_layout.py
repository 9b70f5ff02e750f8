"""Layouts: who works on the same part, and who answers."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from quartet.cluster import Layout
from quartet.config.errors import UserError


def test_the_last_axis_varies_fastest() -> None:
    layout = Layout.fit(8, {"context": 2, "tensor": 2})
    assert layout.coordinates(5) == {"data": 1, "context": 0, "tensor": 1}
    assert layout.part_of == (0, 0, 0, 0, 1, 1, 1, 1)
    assert layout.answering == (0, 4)


def test_data_takes_what_is_left() -> None:
    assert Layout.fit(8, {"tensor": 2, "context": 2}) == Layout((("data", 2), ("tensor", 2), ("context", 2)))
    assert Layout.fit(3) == Layout((("data", 3),))


@pytest.mark.parametrize(
    ("world_size", "sizes", "remedy"),
    [
        (8, {"context": 3, "tensor": 2}, "use 6 or 12 processes"),
        (4, {"tensor": 8}, "use 8 processes"),
        (4, {"data": 3}, "use 4 processes"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_numbers(world_size: int, sizes: dict[str, int], remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        Layout.fit(world_size, sizes)
    assert f"{world_size} processes" in caught.value.found
    assert all(f"{name} {size}" in caught.value.found for name, size in sizes.items())
    assert remedy in caught.value.remedy


def test_bad_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        Layout((("data", 0),))
    with pytest.raises(ValueError, match="twice"):
        Layout((("data", 1), ("data", 2)))


@given(st.permutations(["data", "tensor", "context", "expert"]), st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_every_part_has_equally_many_ranks_and_one_answer(names: list[str], sizes: list[int]) -> None:
    layout = Layout(tuple(zip(names, sizes, strict=True)))
    assert layout.world_size == math.prod(sizes)
    within = layout.world_size // layout.parts
    assert all(layout.part_of.count(part) == within for part in range(layout.parts))
    assert [layout.part_of[rank] for rank in layout.answering] == list(range(layout.parts))
    assert len({tuple(layout.coordinates(rank).items()) for rank in range(layout.world_size)}) == layout.world_size
