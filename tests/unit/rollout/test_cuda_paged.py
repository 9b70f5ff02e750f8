"""Pages in tensors: what prefill writes, decode finds; attention over pages against attention over plain sequences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quartet.models.attention import LayerRule, masked_attention
from quartet.rollout.cuda_paged import PagedCache, PagedDecode, PagedPrefill, gathered_decode
from quartet.rollout.cuda_pages import PagePool

CPU = torch.device("cpu")
NUM_KV, SIZE = 2, 8


def heads(num_tokens: int, seed: int, num_heads: int = NUM_KV) -> Tensor:
    return torch.randn(1, num_heads, num_tokens, SIZE, generator=torch.Generator().manual_seed(seed))


RULES = [LayerRule(0.3), LayerRule(0.3, window=3), LayerRule(0.3, softcap=1.5), LayerRule(0.3, window=5, softcap=1.5)]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_decode_finds_what_prefill_and_decode_wrote(
    rule: LayerRule, tolerances: dict[torch.dtype, tuple[float, float]]
) -> None:
    """Three sequences of 7, 1 and 4 tokens, then three more tokens each, all against the plain formula."""
    pool = PagePool(12, page_size=4)
    cache = PagedCache(12, page_size=4)
    lengths = (7, 1, 4)
    runs = [pool.open(length, length + 3) for length in lengths]
    tables = torch.zeros(3, 3, dtype=torch.int32)
    for row, run in enumerate(runs):
        tables[row, : len(run.pages)] = torch.tensor(run.pages)
    k, v = (list(heads(sum(lengths), seed).split(lengths, 2)) for seed in (1, 2))
    prefill = PagedPrefill(cache, runs, CPU)
    prefill.attend(0, heads(sum(lengths), 3, 4), torch.cat(k, 2), torch.cat(v, 2), rule)
    # Whatever pages hold behind their last token must not matter.
    for row, length in enumerate(lengths):
        for pages in cache.layer(0, k[0], v[0]):
            pages[tables[row, length // 4], :, length % 4 :] = torch.nan
    positions = torch.tensor(lengths)
    atol, rtol = tolerances[torch.float32]
    for step in range(3):
        q, new_k, new_v = (heads(3, 10 * step + i, n) for i, n in ((4, 4), (5, 2), (6, 2)))
        out = PagedDecode(cache, tables, positions + step).attend(0, q, new_k, new_v, rule)
        for row in range(3):
            k[row], v[row] = (
                torch.cat([old[row], new[:, :, row : row + 1]], 2) for old, new in ((k, new_k), (v, new_v))
            )
            num_keys = k[row].shape[2]
            seen = torch.arange(num_keys) >= num_keys - (rule.window or num_keys)
            expected = masked_attention(q[:, :, row : row + 1], k[row], v[row], seen[None], rule)
            torch.testing.assert_close(out[:, :, row], expected[:, :, 0], atol=atol, rtol=rtol)


def test_idle_rows_are_computed_and_harm_nobody() -> None:
    cache = PagedCache(3, page_size=2)
    tables = torch.tensor([[1, 2], [0, 0], [0, 0]], dtype=torch.int32)
    k, v, q = heads(3, 1), heads(3, 2), heads(3, 3, 4)
    out = PagedDecode(cache, tables, torch.tensor([0, 0, 0])).attend(0, q, k, v, LayerRule(1.0))
    assert bool(out.isfinite().all())
    alone = PagedCache(3, page_size=2)
    expected = PagedDecode(alone, tables[:1], torch.tensor([0])).attend(
        0, q[:, :, :1], k[:, :, :1], v[:, :, :1], LayerRule(1.0)
    )
    assert torch.equal(out[:, :, :1], expected)


def test_growing_and_copying_keep_what_is_stored() -> None:
    cache = PagedCache(3, page_size=2)
    k_pages = cache.layer(0, heads(1, 1), heads(1, 2))[0]
    k_pages.copy_(torch.randn(k_pages.shape, generator=torch.Generator().manual_seed(0)))
    kept = k_pages.clone()
    cache.grow(5)
    grown, _ = cache.layer(0, heads(1, 1), heads(1, 2))
    assert torch.equal(grown[:3], kept)
    cache.copy([(1, 3), (2, 4)])
    assert torch.equal(grown[3:], kept[1:])
    assert cache.num_bytes == 2 * 5 * NUM_KV * 2 * SIZE * 4


def test_values_may_be_smaller_than_keys() -> None:
    tables, positions = torch.tensor([[1]], dtype=torch.int32), torch.tensor([1])
    k_pages, v_pages = torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 4)
    out = gathered_decode(torch.zeros(1, 3, 8), k_pages, v_pages, tables, positions, LayerRule(1.0))
    torch.testing.assert_close(out, v_pages[1].mean(1).expand(3, 4)[None])
