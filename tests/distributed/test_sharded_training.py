"""Training on a mesh of real processes (gloo) is training in one process, whatever is shared out and recomputed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rank_forks
import sharded_ranks as ranks
from quartet.train import token_budget

MESHES = [(1, 2), (2, 1), (2, 2), (4, 1)]
"""Shard, replicate."""
VARIANTS = [
    {"tied": True},
    {"recompute": True},
    {"share": False, "recompute": True, "tied": True},
    {"lora": True},
    {"lora": True, "recompute": "selective", "share": False},
    {"fixed_order": True},
]


def few_cases() -> list[ranks.Case]:
    """Every objective, variant and mesh, each with every other of a mesh at least once in two meshes."""
    names = list(ranks.objectives())
    return [
        ranks.Case(name, shard, replicate, **VARIANTS[(i + m) % len(VARIANTS)])
        for m, (shard, replicate) in enumerate(MESHES)
        for i, name in enumerate(names)
        if (i + m) % 2 == 0 or shard == 2
    ]


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest) -> list[dict[ranks.Case, dict[str, Any]]]:
    cases = [case for case in few_cases() if case.world == request.param]
    return rank_forks.run_ranks(request.param, ranks.all_trained, cases)


def test_outputs_gradients_and_updates_are_those_of_one_process(
    results: list[dict[ranks.Case, dict[str, Any]]], tolerances: dict[torch.dtype, tuple[float, float]]
) -> None:
    torch.set_num_threads(1)
    for case, found in results[0].items():
        expected = ranks.trained(case.alone)
        ranks.check(case, found, expected, *tolerances[torch.float64])
        for other in (of_rank[case] for of_rank in results[1:]):
            assert other["metrics"] == found["metrics"], case
            assert all(torch.equal(other["weights"][n], values) for n, values in found["weights"].items()), case


def test_the_same_mesh_gives_the_same_bits_twice() -> None:
    cases = [
        ranks.Case("grpo", shard, 4 // shard, fixed_order=fixed, dtype=torch.float32)
        for shard, fixed in ((2, True), (1, True), (4, False))
    ]
    twice = [rank_forks.run_ranks(4, ranks.all_trained_twice, cases) for _ in range(2)]
    for c, case in enumerate(cases):
        first, *others = [weights for launch in twice for of_rank in launch for weights in of_rank[c]]
        for weights in others:
            assert all(torch.equal(weights[name], values) for name, values in first.items()), case


def test_heads_that_learn_along_are_those_of_one_process() -> None:
    """Each rank has states of its own passes alone; all ranks have the same heads, to the bit."""
    cases = [
        (ranks.Case("grpo", 2, 1, tied=True), True),
        (ranks.Case("grpo", 1, 2, lora=True), True),
        (ranks.Case("ppo-actor", 2, 1), False),
    ]
    both = rank_forks.run_ranks(2, ranks.all_heads_beside, cases)
    for (case, shared), one, other in zip(cases, *both, strict=True):
        expected = ranks.heads_beside(case.alone, shared)
        assert one["sent"] == expected["sent"]
        for figures, of_one in zip(one["metrics"], expected["metrics"], strict=True):
            assert figures == pytest.approx(of_one, rel=1e-6, abs=1e-9)
        for name, values in expected["weights"].items():
            assert torch.equal(one["weights"][name], other["weights"][name]), case
            torch.testing.assert_close(one["weights"][name], values, rtol=1e-6, atol=1e-9)


def test_bf16_is_autocast_over_fp32_weights(
    tolerances: dict[torch.dtype, tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit forward. Gradients are summed in fp32 and differ by what that rounds, against one process that makes
    the passes of both ranks: other packs round otherwise in bf16, in one process too.
    """
    torch.set_num_threads(1)
    case = ranks.Case("sft", 2, 1, dtype=torch.float32, precision="bf16")
    found = rank_forks.run_ranks(2, ranks.all_trained, [case])[0][case]
    monkeypatch.setattr(token_budget, "plan_micro_batches", ranks.passes_of_two_ranks)
    expected, (_, rtol) = ranks.trained(case.alone), tolerances[torch.float32]
    assert all(torch.equal(found["outputs"][n], values) for n, values in expected["outputs"].items())
    assert found["gradients"].keys() == expected["gradients"].keys()
    largest = max(float(values.abs().max()) for values in expected["gradients"].values())
    for name, gradient in expected["gradients"].items():
        assert found["gradients"][name].dtype == torch.float32
        assert float((found["gradients"][name] - gradient).abs().max()) <= rtol * largest, name


def test_sums_are_taken_in_the_order_of_the_ranks() -> None:
    for found in rank_forks.run_ranks(4, ranks.summed_in_order):
        assert all(torch.equal(actual, expected) for actual, expected in found)
