"""Blocks are found by their tokens, counted, kept while used and evicted when idle."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from quartet.rollout.prefix_cache import CacheBlock, PrefixCache


def filled(*token_ids: int, parent: CacheBlock | None = None, reusable: bool = True) -> CacheBlock:
    block = CacheBlock(token_ids, parent, reusable=reusable)
    block.store(0, 0, torch.ones(2, len(token_ids), 4), torch.ones(2, len(token_ids), 4))
    block.done = len(token_ids)
    block.finish(torch.zeros(8))
    return block


def nobody() -> set[CacheBlock]:
    return set()


def test_incomplete_prompts_and_own_tokens_go_with_their_last_user() -> None:
    cache = PrefixCache()
    begun = CacheBlock((1, 2, 3))
    prompt = filled(7, 8)
    own = filled(9, parent=prompt, reusable=False)
    cache.hold(begun)
    cache.hold(begun)
    cache.hold(own)
    assert cache.num_tokens == 3 + 2 + 1
    cache.drop(begun)
    assert cache.find((1, 2, 3)) is begun
    cache.drop(begun)
    assert cache.find((1, 2, 3)) is None
    cache.drop(own)
    assert (cache.find((9,)), cache.find((7, 8))) == (None, prompt)
    assert (cache.num_tokens, cache.idle_tokens, len(cache)) == (2, 2, 1)


def test_the_least_recently_used_goes_first_and_the_wanted_last() -> None:
    cache = PrefixCache()
    blocks = [filled(i, i) for i in range(4)]
    for block in blocks:
        cache.hold(block)
        cache.drop(block)
    cache.hold(blocks[0])
    cache.drop(blocks[0])
    # In order of use: 1, 2, 3, 0.
    assert cache.evict(2, lambda: {blocks[1]})
    assert [cache.find((i, i)) is not None for i in range(4)] == [True, True, False, True]
    assert cache.evict(5, lambda: {blocks[1]})
    assert len(cache) == 0


def test_a_discarded_block_serves_only_those_that_use_it() -> None:
    cache = PrefixCache()
    used, idle = filled(1, 1), filled(2, 2)
    for block in (used, idle):
        cache.hold(block)
    cache.drop(idle)
    cache.discard(used)
    cache.discard(idle)
    assert (cache.find((1, 1)), cache.find((2, 2))) == (None, None)
    again = filled(1, 1)
    cache.hold(again)
    assert (cache.num_tokens, cache.find((1, 1))) == (4, again)
    cache.drop(used)
    assert (cache.num_tokens, used.num_bytes) == (2, 0)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["hold", "drop", "evict", "discard", "trim"])), max_size=60)
)
def test_tokens_are_counted_right_whatever_happens(events: list[tuple[int, str]]) -> None:
    cache = PrefixCache()
    held: list[CacheBlock] = []
    for number, event in events:
        token_ids = (number,) * (number + 1)
        if event == "hold":
            block = cache.find(token_ids) or filled(*token_ids)
            cache.hold(block)
            held.append(block)
        elif event == "drop" and held:
            cache.drop(held.pop(number % len(held)))
        elif event == "evict":
            cache.evict(number, nobody)
        elif event == "trim":
            cache.trim(number, nobody)
        elif event == "discard" and cache.find(token_ids):
            cache.discard(cache.find(token_ids) or filled())
        used = set(held)
        idle = {b for n in range(6) if (b := cache.find((n,) * (n + 1))) is not None} - used
        assert cache.num_tokens == sum(map(len, used | idle))
        assert cache.idle_tokens == sum(map(len, idle))
        assert all(block.num_bytes for block in used | idle)
