"""Slots keep what was written through growth and moves; decode attention against the plain formula."""

from __future__ import annotations

import pytest
import torch

from quartet.models.attention import LayerRule, masked_attention, visible
from quartet.rollout.cache import LENGTH_STEP, KeyValues, KVCache
from quartet.rollout.contexts import DecodeAttention, PrefillAttention


def random_run(length: int, layers: int = 2, heads: int = 2, size: int = 8, seed: int = 0) -> KeyValues:
    g = torch.Generator().manual_seed(seed)
    draw = [tuple(torch.randn(heads, length, size, generator=g) for _ in range(layers)) for _ in range(2)]
    return KeyValues(*draw)


def test_growth_and_moves_keep_contents() -> None:
    cache = KVCache()
    cache.reserve(2, 5)
    run = random_run(5)
    cache.write([0, 1], run)
    assert cache.keys[0].shape == (2, 2, LENGTH_STEP, 8)
    cache.reserve(6, LENGTH_STEP + 1)
    cache.move([(1, 4, 5)])
    assert cache.keys[0].shape == (6, 2, 2 * LENGTH_STEP, 8)
    for slot in (0, 1, 4):
        for stored, part in zip((*cache.keys, *cache.values), (*run.keys, *run.values), strict=True):
            assert torch.equal(stored[slot, :, :5], part)
            assert not stored[slot, :, 5:].any()
    cache.reserve(1, 1)
    assert (cache.num_slots, cache.capacity) == (6, 2 * LENGTH_STEP)


def test_bytes_are_counted_and_released() -> None:
    cache = KVCache()
    cache.reserve(3, 32)
    assert cache.num_bytes == 0
    cache.write([0], random_run(4))
    assert cache.num_bytes == 2 * 2 * 3 * 2 * 32 * 8 * 4
    cache.release()
    assert cache.num_bytes == 0
    cache.reserve(1, 32)
    cache.write([0], random_run(4))
    assert cache.num_bytes == 2 * 2 * 1 * 2 * 32 * 8 * 4


def test_a_cleared_slot_is_finite_again() -> None:
    cache = KVCache()
    cache.reserve(2, 32)
    run = random_run(4)
    run.keys[1][:] = float("nan")
    cache.write([1], run)
    cache.clear(1)
    assert all(bool(stored.isfinite().all()) for stored in (*cache.keys, *cache.values))


RULES = [
    LayerRule(0.3),
    LayerRule(0.3, window=4),
    LayerRule(0.3, softcap=2.0),
    LayerRule(0.3, window=4, softcap=2.0),
    LayerRule(0.3, window=500),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("size_v", [8, 5])
def test_decoding_equals_attention_over_the_whole_sequence(
    rule: LayerRule, size_v: int, tolerances: dict[torch.dtype, tuple[float, float]]
) -> None:
    """Rows of different lengths, grouped heads; each against its own sequence, one query at the end."""
    heads, heads_kv, size = 6, 2, 8
    atol, rtol = tolerances[torch.float32]
    lengths = [1, 2, 5, 9, 40, 33]
    g = torch.Generator().manual_seed(1)
    shapes = ((heads, size), (heads_kv, size), (heads_kv, size_v))
    sequences = [[torch.randn(h, n, s, generator=g) for h, s in shapes] for n in lengths]
    cache = KVCache()
    cache.reserve(len(lengths), 64)
    # Whatever a slot held before must not matter.
    cache.write(range(len(lengths)), KeyValues((torch.ones(2, 64, size),), (torch.ones(2, 64, size_v),)))
    for slot, (_, k, v) in enumerate(sequences):
        cache.write([slot], KeyValues((k[:, :-1],), (v[:, :-1],)))
    positions = torch.tensor(lengths) - 1
    context = DecodeAttention(cache, positions, max(lengths))
    newest = [torch.stack([s[i][:, -1] for s in sequences], dim=1).unsqueeze(0) for i in range(3)]
    out = context.attend(0, *newest, rule)
    assert out.shape == (1, heads, len(lengths), size_v)
    for row, (q, k, v) in enumerate(sequences):
        n = lengths[row]
        mask = visible(torch.tensor([n - 1]), torch.arange(n), rule)
        expected = masked_attention(q[None, :, -1:], k[None], v[None], mask, rule)[0, :, 0]
        torch.testing.assert_close(out[0, :, row], expected, atol=atol, rtol=rtol)
        assert torch.equal(cache.keys[0][row, :, :n], k)
        assert torch.equal(cache.values[0][row, :, :n], v)


def test_prefill_keeps_every_layer_in_order() -> None:
    context = PrefillAttention([3, 2])
    given = {}
    for layer in (1, 0):
        q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
        context.attend(layer, q, k, v, LayerRule(0.3))
        given[layer] = (k, v)
    kept = context.key_values()
    assert [torch.equal(kept.keys[i], given[i][0][0]) for i in (0, 1)] == [True, True]
    assert torch.equal(kept.part(3, 5).values[1], given[1][1][0, :, 3:5])
