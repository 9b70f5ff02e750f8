"""A pack that is cut over context ranks gives what one process computes; what travels besides heads is ``[M]``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import context_ranks as ranks
import rank_forks
from context_ranks import PassCase
from quartet.models.packing import pack

CASES = [
    PassCase(2),
    PassCase(4, tree="depth 3"),
    PassCase(4, kv_heads=1, recompute=True),
    PassCase(2, "mistral", "depth 3", recompute="selective"),
    PassCase(4, "gemma2", "depth 3", recompute=True),
    PassCase(4, tree="two tokens"),
    PassCase(4, "gemma2", "depth 3", scalar=True, recompute="selective"),
    PassCase(2, "gemma2", dtype=torch.float32),
    PassCase(4, "gemma2", "depth 3", dtype=torch.float32, precision="bf16", recompute=True),
]


@pytest.fixture(scope="module")
def found() -> list[list[dict]]:
    return rank_forks.run_ranks(4, ranks.all_passes, CASES)


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(str, CASES))
def test_a_pass_is_that_of_one_process(number, found, tolerances) -> None:
    torch.set_num_threads(1)
    case = CASES[number]
    expected = ranks.run_pass(replace(case, context=1))
    atol, rtol = tolerances[torch.bfloat16 if case.precision == "bf16" else case.dtype]
    largest = max(float(g.abs().max()) for g in expected["gradients"].values())
    for of_rank in found:
        of_case = of_rank[number]
        for kind in ("outputs", "with_gradient"):
            assert of_case[kind].keys() == expected[kind].keys()
            for name, values in expected[kind].items():
                torch.testing.assert_close(of_case[kind][name], values, atol=atol, rtol=rtol)
                assert torch.equal(of_case[kind][name], found[0][number][kind][name]), name
        for name, gradient in expected["gradients"].items():
            torch.testing.assert_close(of_case["gradients"][name], gradient, atol=atol * largest, rtol=rtol)


def test_only_heads_and_single_numbers_travel(found) -> None:
    """Bytes of all ranks' passes without gradient, by kind: of the head nothing but results ``[M]``."""
    for case, of_ranks in zip(CASES, zip(*found, strict=True), strict=True):
        batch, others = ranks.make_batch(case.tree), case.context - 1
        if case.scalar or not case.share or case.precision == "bf16":
            continue
        num_rows, size = max(batch.num_tokens, case.context), case.dtype.itemsize
        heads = 2 * ranks.SIZES["num_attention_heads"] + 2 * max(case.kv_heads, case.context)
        head_size = ranks.FAMILIES[case.family][1].get("head_dim", 4)
        layers = ranks.SIZES["num_hidden_layers"]
        copies = 4 // case.context
        num_selected = len(pack(batch).predicted(batch.token["loss_mask"])[0])
        sent = {
            kind: sum(of_rank["sent"].get(kind, 0) for of_rank in of_ranks) for kind in ("all-to-all", "all-gather")
        }
        assert sent["all-gather"] == copies * 2 * others * num_selected * size, case
        assert sent["all-to-all"] == copies * layers * heads * num_rows * head_size * size * others // case.context, (
            case
        )
        assert not any("reduce-scatter" in of_rank["sent"] for of_rank in of_ranks), case


def test_ranks_compute_all_rows_once(found) -> None:
    for case, of_ranks in zip(CASES, zip(*found, strict=True), strict=True):
        alone = ranks.run_pass(replace(case, context=1))["computed"]
        filled = 2 * max(alone // 2, case.context)
        assert sum(of_rank["computed"] for of_rank in of_ranks) == filled * 4 // case.context, case


def test_a_long_sequence_takes_a_rank_its_share_of_memory() -> None:
    """``benchmarks/context_memory.py`` has 32 k tokens: the share there is smaller still."""
    (alone,) = rank_forks.run_ranks(1, ranks.peak_bytes, 1, 4096)
    assert max(rank_forks.run_ranks(4, ranks.peak_bytes, 4, 4096)) <= 0.35 * alone
