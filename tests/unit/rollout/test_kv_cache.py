"""Slots keep what was written through growth, moves and shrinking."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quartet.rollout.prefix_cache import LENGTH_STEP, KVCache, next_slot_shape, round_up

Run = tuple[dict[int, Tensor], dict[int, Tensor]]


def random_run(length: int, layers: int = 2, heads: int = 2, size: int = 8, seed: int = 0) -> Run:
    g = torch.Generator().manual_seed(seed)
    keys, values = ({i: torch.randn(heads, length, size, generator=g) for i in range(layers)} for _ in range(2))
    return keys, values


def stored(cache: KVCache) -> list[Tensor]:
    return [*cache.keys.values(), *cache.values.values()]


def test_growth_moves_and_shrinking_keep_contents() -> None:
    cache = KVCache()
    cache.resize(2, LENGTH_STEP)
    run = random_run(5)
    cache.write([0, 1], *run)
    assert cache.keys[0].shape == (2, 2, LENGTH_STEP, 8)
    cache.resize(6, 2 * LENGTH_STEP)
    cache.move(1, 4, 5)
    for slot in (0, 1, 4):
        for tensor, part in zip(stored(cache), (*run[0].values(), *run[1].values()), strict=True):
            assert torch.equal(tensor[slot, :, :5], part)
            assert not tensor[slot, :, 5:].any()
    cache.resize(1, 5)
    assert torch.equal(cache.keys[1][0], run[0][1])
    assert cache.num_tokens == 5


@given(
    now=st.tuples(st.integers(0, 20), st.integers(0, 10)),
    num_rows=st.integers(1, 20),
    longest=st.integers(1, 300),
    more=st.integers(0, 300),
    spare=st.integers(0, 3000),
)
def test_shapes_hold_what_runs_within_the_limit(
    now: tuple[int, int], num_rows: int, longest: int, more: int, spare: int
) -> None:
    longest, most = round_up(longest), round_up(longest + more)
    limit = num_rows * most + spare
    slots, capacity = next_slot_shape(
        (now[0], now[1] * LENGTH_STEP), num_rows=num_rows, longest=longest, most=most, max_rows=20, limit=limit
    )
    assert slots >= num_rows
    assert capacity >= longest
    assert slots * capacity <= limit
