"""The Triton kernels without a GPU: run by Triton's interpreter, and compiled for the H200's architecture.

Both need Triton, which comes with torch for CUDA only. ``TRITON_INTERPRET=1 pytest <this file>`` interprets (Triton 3.6
needs NumPy below 2.4 for it); without the variable the kernels are compiled to machine code that nothing here can run.
"""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from quartet.models.attention import LayerRule  # noqa: E402
from quartet.rollout import cuda_kernel  # noqa: E402
from quartet.rollout.cuda_paged import gathered_decode  # noqa: E402
from quartet.rollout.cuda_sampler import BLOCK  # noqa: E402
from quartet.rollout.cuda_sampler import block_statistics as formula  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


def paged(
    positions: list[int], shape: tuple[int, int, int], page_size: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Scattered pages, NaN where nothing is stored."""
    num_kv, size_k, size_v = shape
    generator = torch.Generator().manual_seed(sum(positions))
    order = torch.randperm(len(positions) * width, generator=generator) + 1
    tables = torch.zeros(len(positions), width, dtype=torch.int32)
    pages = [torch.full((len(order) + 1, num_kv, page_size, size), torch.nan) for size in (size_k, size_v)]
    for row, position in enumerate(positions):
        for token in range(position + 1):
            page = int(order[row * width + token // page_size])
            tables[row, token // page_size] = page
            for x in pages:
                x[page, :, token % page_size] = torch.randn(num_kv, x.shape[3], generator=generator)
    return *(x.to(dtype) for x in pages), tables, torch.tensor(positions)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_heads", "shape", "page_size", "width", "rule"),
    [
        (4, (2, 16, 16), 16, 5, LayerRule(0.25)),
        (14, (2, 64, 64), 16, 33, LayerRule(0.125)),
        (4, (2, 16, 16), 16, 33, LayerRule(0.25, window=7)),
        (4, (4, 24, 8), 32, 20, LayerRule(0.25, window=300, softcap=2.0)),
        (4, (1, 8, 8), 64, 9, LayerRule(0.25, softcap=1.0)),
    ],
)
def test_interpreted_attention_is_the_formula(
    num_heads: int,
    shape: tuple[int, int, int],
    page_size: int,
    width: int,
    rule: LayerRule,
    dtype: torch.dtype,
    tolerances: dict[torch.dtype, tuple[float, float]],
) -> None:
    """Rows at the borders of splits, of tiles and of pages."""
    last = width * page_size - 1
    positions = [min(p, last) for p in (0, 63, 64, 255, 256, last)]
    k_pages, v_pages, tables, where = paged(positions, shape, page_size, width, dtype)
    q = torch.randn(len(positions), num_heads, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    found = cuda_kernel.paged_decode(q, k_pages, v_pages, tables, where, rule)
    expected = gathered_decode(q.float(), k_pages.float(), v_pages.float(), tables, where, rule)
    atol, rtol = tolerances[dtype]
    torch.testing.assert_close(found.float(), expected, atol=atol, rtol=rtol)


@interpreted
def test_interpreted_attention_of_a_row_does_not_depend_on_its_company() -> None:
    k_pages, v_pages, tables, where = paged([300, 3, 511], (2, 16, 16), 16, 32, torch.float32)
    q = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(1))
    together = cuda_kernel.paged_decode(q, k_pages, v_pages, tables, where, LayerRule(0.25))
    for row in range(3):
        one = slice(row, row + 1)
        alone = cuda_kernel.paged_decode(q[one], k_pages, v_pages, tables[one], where[one], LayerRule(0.25))
        assert torch.equal(alone, together[one])


@interpreted
@pytest.mark.parametrize("vocab_size", [5, BLOCK, 1000, 2500])
def test_interpreted_statistics_are_the_formula(
    vocab_size: int, tolerances: dict[torch.dtype, tuple[float, float]]
) -> None:
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(0)) * 5
    logits[1] = -torch.inf
    logits[2, :3] = -torch.inf
    logits[3, 2] = torch.nan
    logits[4, 1] = torch.inf
    temperature = torch.tensor([0.5, 1.0, 2.0, 1.0, 1.0]).unsqueeze(1)
    atol, rtol = tolerances[torch.float32]
    (peaks, sums), (their_peaks, their_sums) = (f(logits, temperature) for f in (cuda_kernel.block_statistics, formula))
    torch.testing.assert_close(sums, their_sums, atol=atol, rtol=rtol, equal_nan=True)
    known = ~sums.isnan()
    torch.testing.assert_close(peaks[known], their_peaks[known], atol=atol, rtol=rtol)


def assemble(
    kernel: ModuleType, pointers: dict[str, str], numbers: dict[str, str], constants: dict[str, object]
) -> str:
    """PTX for sm_90 of a kernel whose arguments are aligned, as torch's allocator and sizes make them."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
    aligned = [name for name in types if name in pointers or numbers.get(name) == "i32"]
    source = ASTSource(
        fn=kernel,
        signature={name: types[name] for name in kernel.arg_names},
        constexprs=constants,
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 3})
    assert found.metadata.shared <= 227 * 1024, "more shared memory than a block of an H200 has"
    assert found.asm["cubin"]
    return str(found.asm["ptx"])


@compiled
@pytest.mark.parametrize(
    ("dtype", "group", "size", "splits", "window", "capped"),
    [
        ("bf16", 7, 64, 16, 0, False),
        ("bf16", 6, 128, 16, 0, False),
        ("bf16", 2, 256, 4, 4096, True),
        ("bf16", 2, 8, 1, 7, True),
        ("fp32", 6, 128, 16, 0, False),
    ],
)
def test_attention_compiles_for_the_h200(
    dtype: str, group: int, size: int, splits: int, window: int, capped: bool, monkeypatch: pytest.MonkeyPatch,
    tmp_path: object,
) -> None:  # fmt: skip
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    block, stored = max(16, size), f"*{dtype}"
    part = stored if splits == 1 else "*fp32"
    ptx = assemble(
        cuda_kernel._attend_split,
        {"q_ptr": stored, "k_ptr": stored, "v_ptr": stored, "tables_ptr": "*i32", "positions_ptr": "*i64",
         "out_ptr": part, "lse_ptr": part},
        {"q_row_stride": "i32", "q_head_stride": "i32", "table_stride": "i32", "scaling": "fp32", "cap": "fp32"},
        {"WINDOW": window, "CAPPED": capped, "NUM_KV": 2, "GROUP": group, "ROWS": 16, "SIZE_K": size, "BLOCK_K": block,
         "SIZE_V": size, "BLOCK_V": block, "PAGE": 16, "SPAN": cuda_kernel.SPLIT, "STEP": cuda_kernel.TILE,
         "NUM_SPLITS": splits, "PRECISION": "ieee" if dtype == "fp32" else "tf32"},
    )  # fmt: skip
    if dtype == "bf16":
        assert "mma.sync" in ptx, "products run on the tensor cores"
        assert "cp.async" in ptx, "the next tile is fetched while one is computed"
    merge = {"WINDOW": window, "NUM_HEADS": 2 * group, "SIZE_V": size, "BLOCK_V": size, "SPAN": 256}
    assemble(
        cuda_kernel._merge_splits,
        {"parts_ptr": "*fp32", "lse_ptr": "*fp32", "positions_ptr": "*i64", "out_ptr": stored},
        {},
        {**merge, "NUM_SPLITS": splits},
    )


@compiled
def test_statistics_compile_for_the_h200(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptx = assemble(
        cuda_kernel._block_statistics,
        dict.fromkeys(("logits_ptr", "temperature_ptr", "peaks_ptr", "sums_ptr"), "*fp32"),
        {"row_stride": "i32", "vocab_size": "i32", "num_blocks": "i32"},
        {"BLOCK": BLOCK, "COUNT": cuda_kernel._STATISTICS_BLOCKS},
    )
    assert "ld.global.v4" in ptx, "logits are read sixteen bytes at a time"
