"""Tensor-parallel layers of every family give what one process computes: outputs and all gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import rank_forks
import tensor_ranks as ranks
from tensor_ranks import TensorCase

BIASED = (("attention_bias", True), ("mlp_bias", True))
CASES = {
    2: [
        TensorCase("llama", tree="depth 3", recompute=True, changed=(("pad_token_id", 20), *BIASED)),
        TensorCase("llama", scalar=True, recompute="selective", lora=True, changed=BIASED),
        TensorCase("qwen2", tree="depth 3", lora=True),  # tied, with windows and biases
        TensorCase("qwen3", recompute="selective", share=False),
        TensorCase("gemma2", recompute=True),  # soft caps, windows
        TensorCase("gemma3", tree="depth 3", recompute="selective", lora=True),
        TensorCase("phi3", lora=True, recompute=True),
        TensorCase("olmo2", tree="depth 3", recompute=True),
        TensorCase("granite", tree="depth 3", recompute="selective"),
        TensorCase("gemma2", dtype=torch.float32, precision="bf16", recompute=True),
    ],
    4: [
        TensorCase("llama", tensor=4, tree="depth 3", recompute=True),  # two key/value heads for four ranks
        TensorCase("llama", tensor=4, lora=True, changed=(("num_key_value_heads", 1), *BIASED)),
        TensorCase("olmo2", tensor=4, tree="depth 3"),
        TensorCase("gemma3", context=2, tree="depth 3", recompute=True),
        TensorCase("phi3", context=2, lora=True, tree="depth 3", scalar=True),
        TensorCase("qwen2", context=2, dtype=torch.float32, precision="bf16", lora=True),
    ],
}
NAMED = [(world, number) for world, cases in CASES.items() for number in range(len(cases))]


@pytest.fixture(scope="module")
def found() -> dict[int, list[list[dict]]]:
    return {world: rank_forks.run_ranks(world, ranks.all_passes, cases) for world, cases in CASES.items()}


@pytest.mark.parametrize(("world", "number"), NAMED, ids=[f"{w}-{n}-{CASES[w][n].family}" for w, n in NAMED])
def test_a_pass_is_that_of_one_process(world, number, found, tolerances) -> None:
    torch.set_num_threads(1)
    case = CASES[world][number]
    expected = ranks.run_pass(replace(case, tensor=0))
    atol, rtol = tolerances[torch.bfloat16 if case.precision == "bf16" else case.dtype]
    largest = max(float(g.abs().max()) for g in expected["gradients"].values())
    for of_rank in found[world]:
        of_case = of_rank[number]
        for kind in ("outputs", "with_gradient"):
            assert of_case[kind].keys() == expected[kind].keys()
            for name, values in expected[kind].items():
                torch.testing.assert_close(of_case[kind][name], values, atol=atol, rtol=rtol)
                assert torch.equal(of_case[kind][name], found[world][0][number][kind][name]), name
        assert of_case["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            torch.testing.assert_close(of_case["gradients"][name], gradient, atol=atol * largest, rtol=rtol, msg=name)
