"""Prompts that begin alike: every prompt can be read back, and nothing long is stored twice."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from quartet.batch.ragged import MIN_SHARED, Segments

LONG = tuple(range(100, 100 + MIN_SHARED))


def read_back(segments: Segments, end: int) -> tuple[int, ...]:
    starts = [sum(segments.lengths[:k]) for k in range(len(segments.lengths))]
    found: list[int] = []
    while end >= 0:
        found = segments.input_ids[starts[end] : starts[end] + segments.lengths[end]] + found
        end = segments.parents[end]
    return tuple(found)


def test_a_long_common_beginning_is_stored_once_and_a_short_one_is_not() -> None:
    segments = Segments()
    ends = segments.add_prompts([(*LONG, 1), (*LONG, 2, 3), LONG])
    assert (segments.lengths, segments.parents) == ([MIN_SHARED, 1, 2], [-1, 0, 0])
    assert ends[LONG] == 0
    short = Segments()
    short.add_prompts([(*LONG[:-1], 1), (*LONG[:-1], 2)])
    assert (short.lengths, short.parents) == ([MIN_SHARED, MIN_SHARED], [-1, -1])


PROMPTS = st.lists(
    st.lists(st.sampled_from([LONG, (1,), (2,), (3, 4)]), min_size=1, max_size=4).map(lambda parts: sum(parts, ())),
    min_size=1,
    max_size=6,
)


@given(PROMPTS)
def test_every_prompt_can_be_read_back(prompts: list[tuple[int, ...]]) -> None:
    segments = Segments()
    segments.add((9,), -1)
    ends = segments.add_prompts(prompts)
    assert set(ends) == set(prompts)
    for prompt in prompts:
        assert read_back(segments, ends[prompt]) == prompt
    assert all(parent < k for k, parent in enumerate(segments.parents))
    assert min(segments.lengths) >= 1
    assert len(segments.input_ids) <= 1 + sum(map(len, set(prompts)))
    for j, k in combinations(range(len(segments.lengths)), 2):
        if segments.parents[j] == segments.parents[k]:
            one, other = (read_back(segments, end)[-segments.lengths[end] :] for end in (j, k))
            num_common = next(
                (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(min(one, other, key=len))
            )
            assert num_common < MIN_SHARED, "stored twice"
