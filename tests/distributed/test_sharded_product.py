"""The whole product of meshes, objectives and variants against one process; prints the table of docs/sharding.md."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import rank_forks
import sharded_ranks as ranks

pytestmark = pytest.mark.slow

MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)]
"""Shard, replicate."""
VARIANTS = [
    {"recompute": recompute, "share": share, **extra}
    for recompute, share, extra in itertools.product(
        (False, True, "selective"), (False, True), ({}, {"tied": True}, {"lora": True})
    )
]


@pytest.fixture(scope="module")
def alone() -> dict[ranks.Case, dict[str, Any]]:
    """What one process computes, by case."""
    torch.set_num_threads(1)
    cases = [ranks.Case(name, **variant) for name in ranks.objectives() for variant in VARIANTS]
    return {case: ranks.trained(case) for case in cases}


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"shard{mesh[0]}-replicate{mesh[1]}")
def test_every_variant_on_every_mesh(
    mesh: tuple[int, int],
    alone: dict[ranks.Case, dict[str, Any]],
    tolerances: dict[torch.dtype, tuple[float, float]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    atol, rtol = tolerances[torch.float64]
    cases = [ranks.Case(name, *mesh, **variant) for name in ranks.objectives() for variant in VARIANTS]
    results = rank_forks.run_ranks(mesh[0] * mesh[1], ranks.all_trained, cases, limit_s=3000)
    largest: dict[str, dict[str, float]] = {}
    for case in cases:
        found, expected = results[0][case], alone[case.alone]
        of_objective = largest.setdefault(case.objective, {})
        for part in ("outputs", "gradients", "weights"):
            assert found[part].keys() == expected[part].keys(), case
            difference = max(float((found[part][n] - values).abs().max()) for n, values in expected[part].items())
            of_objective[part] = max(of_objective.get(part, 0.0), difference)
            for name, values in expected[part].items():
                torch.testing.assert_close(found[part][name], values, atol=atol, rtol=rtol, msg=f"{case} {name}")
        for metrics, of_one in zip(found["metrics"], expected["metrics"], strict=True):
            assert metrics == pytest.approx(of_one, rel=rtol, abs=atol), case
    with capsys.disabled():
        for objective, parts in largest.items():
            figures = " | ".join(f"{difference:.0e}" for difference in parts.values())
            print(f"\n| {mesh[0]} | {mesh[1]} | {objective} | {len(VARIANTS)} | {figures} |", end="")
