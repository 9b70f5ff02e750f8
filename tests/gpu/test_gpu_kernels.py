"""The Triton kernels of a decode step on the device they are for, against the plain formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quartet.models.attention import LayerRule
from quartet.rollout.cuda_paged import PagedCache, PagedDecode, gathered_decode
from quartet.rollout.cuda_sampler import Kind, SamplingColumns, block_statistics, sample_rows, uniforms
from quartet.rollout.protocol import SamplingParams

pytestmark = pytest.mark.gpu


def stored(
    positions: list[int], num_kv: int, size: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Pages, tables and positions of rows that hold so many tokens; NaN in all other places."""
    generator = torch.Generator().manual_seed(sum(positions))
    width = max(positions) // page_size + 1
    order = torch.randperm(len(positions) * width, generator=generator) + 1
    tables = order.view(len(positions), width).int()
    pages = [torch.randn(len(order) + 1, num_kv, page_size, size, generator=generator) for _ in "kv"]
    for row, position in enumerate(positions):
        behind = torch.arange(width * page_size) > position
        for x in pages:
            own = x[tables[row].long()].transpose(0, 1).flatten(1, 2)
            own[:, behind] = torch.nan
            x[tables[row].long()] = own.unflatten(1, (width, page_size)).transpose(0, 1)
    k_pages, v_pages = (x.to(device, dtype) for x in pages)
    return k_pages, v_pages, tables.to(device), torch.tensor(positions, device=device)


@pytest.mark.parametrize(
    "rule", [LayerRule(0.125), LayerRule(0.125, window=100), LayerRule(0.125, window=700, softcap=2.0)], ids=str
)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("group", "size"), [(1, 64), (7, 64), (6, 128), (2, 256), (4, 80), (4, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_paged_decode_is_the_formula(
    dtype: torch.dtype,
    group: int,
    size: int,
    page_size: int,
    rule: LayerRule,
    cuda: torch.device,
    close: Callable[..., None],
) -> None:
    from quartet.rollout.cuda_kernel import paged_decode

    pages = stored([0, 15, 16, 255, 256, 257, 1023, 1500], 2, size, page_size, dtype, cuda)
    q = torch.randn(8, 2 * group, size, generator=torch.Generator().manual_seed(1)).to(cuda, dtype)
    found = paged_decode(q, *pages, rule)
    k_pages, v_pages, *where = pages
    expected = gathered_decode(q.double(), k_pages.double(), v_pages.double(), *where, rule)
    close(found, expected)


def test_a_row_has_the_same_bits_in_any_company(cuda: torch.device) -> None:
    from quartet.rollout.cuda_kernel import paged_decode

    k_pages, v_pages, tables, positions = stored([900, 3, 511, 40], 2, 64, 16, torch.bfloat16, cuda)
    q = torch.randn(4, 14, 64, generator=torch.Generator().manual_seed(1)).to(cuda, torch.bfloat16)
    together = paged_decode(q, k_pages, v_pages, tables, positions, LayerRule(0.125))
    for row in range(4):
        one = slice(row, row + 1)
        alone = paged_decode(q[one], k_pages, v_pages, tables[one], positions[one], LayerRule(0.125))
        assert torch.equal(alone, together[one])


def test_decode_stores_before_it_reads(device: torch.device, close: Callable[..., None]) -> None:
    cache = PagedCache(4, page_size=16)
    tables = torch.tensor([[1], [2]], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(1, n, 2, 64, generator=torch.Generator().manual_seed(n)).to(device) for n in (4, 2, 2))
    out = PagedDecode(cache, tables, torch.zeros(2, dtype=torch.int64, device=device)).attend(
        0, q, k, v, LayerRule(1.0)
    )
    # One visible key: the output is its value.
    close(out, v.repeat_interleave(2, 1))


@pytest.mark.parametrize("vocab_size", [5, 128, 1000, 151_936])
def test_statistics_are_the_formula(vocab_size: int, device: torch.device, close: Callable[..., None]) -> None:
    logits = torch.randn(16, vocab_size, generator=torch.Generator().manual_seed(0)) * 5
    logits[1, : vocab_size // 2] = -torch.inf
    temperature = torch.linspace(0.3, 2.0, 16).unsqueeze(1)
    found = block_statistics(logits.to(device), temperature.to(device))
    for ours, theirs in zip(found, block_statistics(logits, temperature), strict=True):
        close(ours, theirs)


def test_random_numbers_have_the_same_bits(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    seeds, positions = (torch.randint(-(2**63), 2**63 - 1, (4096,), generator=generator) for _ in range(2))
    assert torch.equal(uniforms(seeds.to(device), positions.to(device)).cpu(), uniforms(seeds, positions))


@pytest.mark.parametrize("kind", list(Kind))
def test_tokens_are_those_of_the_cpu(kind: Kind, device: torch.device, close: Callable[..., None]) -> None:
    """Weights differ in their last bits, so a number that falls on a border may pick the neighbour: none does here."""
    params = [
        SamplingParams(temperature=0.0, seed=i) if kind is Kind.GREEDY or (kind is Kind.MIXED and i % 4 == 0)
        else SamplingParams(temperature=0.5 + i / 64, seed=i) if kind is Kind.FREE or i % 4 == 1
        else SamplingParams(top_k=5 + i, top_p=0.9, min_p=0.01, seed=i)
        for i in range(64)
    ]  # fmt: skip
    logits = torch.randn(64, 32_000, generator=torch.Generator().manual_seed(3)) * 2
    columns, positions = SamplingColumns.build(params, 32_000), torch.arange(64)
    expected = sample_rows(logits, columns, positions, kind)
    on_device = SamplingColumns(*(x.to(device) for x in columns.tensors()))
    tokens, logprobs = sample_rows(logits.to(device), on_device, positions.to(device), kind)
    assert torch.equal(tokens.cpu(), expected[0])
    close(logprobs, expected[1])


def test_unusable_rows_are_marked(device: torch.device) -> None:
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)).to(device)
    logits[0, 5], logits[1, 2999], logits[2] = torch.nan, torch.inf, -torch.inf
    columns = SamplingColumns.build([SamplingParams(seed=i) for i in range(4)], 3000)
    columns = SamplingColumns(*(x.to(device) for x in columns.tensors()))
    for kind in (Kind.FREE, Kind.MIXED):
        _, logprobs = sample_rows(logits, columns, torch.arange(4, device=device), kind)
        assert logprobs.isfinite().tolist() == [False, False, False, True]
