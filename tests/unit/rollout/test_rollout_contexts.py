"""Decoding and filling against the plain formula over whole sequences."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from quartet.models.attention import AttentionParams, masked_attention, visibility_mask
from quartet.rollout.prefix_cache import CacheBlock, KVCache
from quartet.rollout.protocol import Request, SamplingParams
from quartet.rollout.rows import DecodeRows
from quartet.rollout.scheduler import EngineRequest, PrefillChunk, RequestGroup
from quartet.rollout.step_attention import (
    AttentionBackend,
    DecodeAttention,
    PrefillAttention,
    merge_attention_states,
    partial_attention,
)

HEADS, HEADS_KV, SIZE = 6, 2, 8
RULES = [
    AttentionParams(0.3),
    AttentionParams(0.3, window=4),
    AttentionParams(0.3, window=30),
    AttentionParams(0.3, softcap=2.0),
    AttentionParams(0.3, window=4, softcap=2.0),
    AttentionParams(0.3, window=500),
]
Tolerances = dict[torch.dtype, tuple[float, float]]


class Sequences:
    """Random queries, keys and values ``[heads, L, size]`` of some sequences, and what attention over each gives."""

    def __init__(self, lengths: Sequence[int], size_v: int = SIZE) -> None:
        g = torch.Generator().manual_seed(1)
        shapes = ((HEADS, SIZE), (HEADS_KV, SIZE), (HEADS_KV, size_v))
        self.lengths = list(lengths)
        self.qkv = [[torch.randn(h, n, s, generator=g) for h, s in shapes] for n in lengths]

    def share(self, members: Sequence[int], length: int) -> CacheBlock:
        """Gives ``members`` the first one's first tokens; a complete block of them."""
        first = self.qkv[members[0]]
        for member in members[1:]:
            for x, source in zip(self.qkv[member], first, strict=True):
                x[:, :length] = source[:, :length]
        block = CacheBlock(tuple(range(length)), shared=True)
        block.store(0, 0, first[1][:, :length], first[2][:, :length])
        block.done = length
        return block

    def expected(self, i: int, rule: AttentionParams) -> Tensor:
        """``[H, L, Dv]``"""
        q, k, v = self.qkv[i]
        positions = torch.arange(q.shape[1])
        return masked_attention(q[None], k[None], v[None], visibility_mask(positions, positions, rule), rule)[0]

    def tokens(self, spans: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """``[1, heads, T, size]`` of ``(sequence, start, end)``, one after the other."""
        return [torch.cat([self.qkv[i][part][:, a:b] for i, a, b in spans], 1).unsqueeze(0) for part in range(3)]

    def newest(self) -> list[Tensor]:
        return self.tokens([(i, n - 1, n) for i, n in enumerate(self.lengths)])


def loaded(sequences: Sequences, prefixes: Sequence[CacheBlock | None]) -> tuple[KVCache, DecodeRows]:
    """Slots that hold all but the newest token, behind the shared blocks."""
    cache = KVCache()
    cache.resize(len(sequences.lengths), 64)
    # Whatever a slot held before must not matter.
    ones = [{0: torch.ones_like(x[:, :1]).expand(-1, 64, -1)} for x in sequences.qkv[0][1:]]
    cache.write(range(len(sequences.lengths)), *ones)
    responses = []
    for slot, (length, prefix) in enumerate(zip(sequences.lengths, prefixes, strict=True)):
        start = 0 if prefix is None else len(prefix)
        _, k, v = (x[:, start : length - 1] for x in sequences.qkv[slot])
        cache.write([slot], {0: k}, {0: v})
        prompt = tuple(range(length - 1))
        response = EngineRequest(
            Request(f"r{slot}", "g", prompt, SamplingParams()), 8, RequestGroup(prompt), slot, row=slot
        )
        response.prefix = prefix
        response.append(5, -0.1, 0)
        responses.append(response)
    rows = DecodeRows(len(responses), 1, 10, torch.device("cpu"))
    rows.load(responses, range(len(responses)), (cache.num_slots, cache.capacity))
    return cache, rows


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("everybody", [True, False])
def test_decoding_behind_shared_blocks(rule: AttentionParams, everybody: bool, tolerances: Tolerances) -> None:
    """Two blocks read by rows that do not stand together; a window may cut into a block or leave none of it."""
    sequences = Sequences([22, 33, 24, 35, 41, 36, 28] if everybody else [22, 33, 24, 35, 41, 36, 28, 3, 50])
    first, second = sequences.share([0, 2, 6], 21), sequences.share([1, 3, 4, 5], 32)
    prefixes = [first, second, first, second, second, second, first, None, None][: len(sequences.lengths)]
    cache, rows = loaded(sequences, prefixes)
    out = DecodeAttention(cache, rows).attend(0, *sequences.newest(), rule)
    atol, rtol = tolerances[torch.float32]
    for row in range(len(sequences.lengths)):
        torch.testing.assert_close(out[0, :, row], sequences.expected(row, rule)[:, -1], atol=atol, rtol=rtol)


def test_the_bits_behind_a_shared_block_do_not_depend_on_how_many_read_it() -> None:
    """On one thread: 1, 2, … rows of one block next to a row of another."""
    rule = AttentionParams(0.3)
    seen = set()
    for members in (1, 2, 5, 6, 11, 12):
        sequences = Sequences([70] + [71] * (members - 1) + [90])
        prefix, other = sequences.share(range(members), 64), sequences.share([members], 50)
        cache, rows = loaded(sequences, [prefix] * members + [other])
        out = DecodeAttention(cache, rows).attend(0, *sequences.newest(), rule)
        seen.add(tuple(out[0, :, 0].flatten().tolist()))
    assert len(seen) == 1


def test_kept_views_follow_the_rows() -> None:
    """One context over many steps: longer rows, other rows, larger slots."""
    contexts = AttentionBackend()
    sequences = Sequences([30, 20])
    cache, rows = loaded(sequences, [None, None])
    for step in range(5):
        context = contexts.decode(cache, rows)
        newest = sequences.newest()
        out = context.attend(0, *newest, RULES[0])
        fresh = DecodeAttention(cache, rows).attend(0, *newest, RULES[0])
        assert torch.equal(out, fresh), step
        rows.advance(torch.tensor([7, 7]))
        if step == 2:
            cache.resize(2, 96)
            rows.mask = torch.nn.functional.pad(rows.mask, (0, 32), value=float("-inf"))
            rows.version += 1


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_filling_in_pieces_equals_filling_whole(rule: AttentionParams, tolerances: Tolerances) -> None:
    """Two prompts of which one comes in three pieces, then a response's tokens behind it."""
    sequences = Sequences([30, 44, 44])
    prompt = sequences.share([1, 2], 36)
    first, second = CacheBlock(tuple(range(30))), CacheBlock(tuple(range(36)))
    own = CacheBlock(tuple(range(8)), parent=second)
    steps = [
        [(0, PrefillChunk(first, 0, 30)), (1, PrefillChunk(second, 0, 10))],
        [(1, PrefillChunk(second, 10, 25))],
        [(1, PrefillChunk(second, 25, 36)), (2, PrefillChunk(own, 0, 8))],
    ]
    out: dict[CacheBlock, list[Tensor]] = {first: [], second: [], own: []}
    for prefills in steps:
        spans = [(i, prefill.block.start + prefill.start, prefill.block.start + prefill.end) for i, prefill in prefills]
        result = PrefillAttention([prefill for _, prefill in prefills]).attend(0, *sequences.tokens(spans), rule)
        sizes = [prefill.end - prefill.start for _, prefill in prefills]
        for (_, prefill), part in zip(prefills, result.split(sizes, 2), strict=True):
            out[prefill.block].append(part[0])
    atol, rtol = tolerances[torch.float32]
    for block, i, start, end in ((first, 0, 0, 30), (second, 1, 0, 36), (own, 2, 36, 44)):
        expected = sequences.expected(i, rule)[:, start:end]
        torch.testing.assert_close(torch.cat(out[block], 1), expected, atol=atol, rtol=rtol)
        assert torch.equal(block.keys[0], sequences.qkv[i][1][:, start:end])
        assert torch.equal(block.values[0], sequences.qkv[i][2][:, start:end])
    assert torch.equal(second.keys[0], prompt.keys[0])


def test_parts_that_see_nothing_contribute_nothing(tolerances: Tolerances) -> None:
    q, k, v = torch.randn(1, 2, 3, SIZE), torch.randn(1, 2, 9, SIZE), torch.randn(1, 2, 9, SIZE)
    mask = torch.zeros(3, 9)
    mask[1] = float("-inf")
    rule = AttentionParams(0.3, softcap=2.0)
    out, lse = partial_attention(q, k, v, mask, rule)
    assert bool(out.isfinite().all())
    assert lse[0, :, 1].tolist() == [float("-inf")] * 2
    other, other_lse = partial_attention(q, k, v, None, rule)
    assert torch.equal(merge_attention_states(other, other_lse, out, lse)[:, :, 1], other[:, :, 1])
    # Two halves give the whole.
    halves = [partial_attention(q, k[:, :, s], v[:, :, s], None, rule) for s in (slice(4), slice(4, 9))]
    atol, rtol = tolerances[torch.float32]
    torch.testing.assert_close(merge_attention_states(*halves[0], *halves[1]), other, atol=atol, rtol=rtol)
