"""The whole product of meshes, objectives and variants against one process; prints the table of docs/sharding.md."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import rank_forks
import sharded_ranks as ranks

pytestmark = pytest.mark.slow

MESHES = [
    *((*sizes, 1, 1) for sizes in [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)]),
    *[(1, 1, 2, 1), (1, 1, 1, 2), (1, 1, 2, 2), (3, 1, 1, 2), (1, 3, 2, 1), (2, 1, 2, 2), (1, 2, 2, 2), (1, 1, 4, 2)],
]
"""Shard, replicate, context, tensor."""
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


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(map(str, mesh)))
def test_every_variant_on_every_mesh(
    mesh: tuple[int, ...],
    alone: dict[ranks.Case, dict[str, Any]],
    tolerances: dict[torch.dtype, tuple[float, float]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    cases = [ranks.Case(name, *mesh, **variant) for name in ranks.objectives() for variant in VARIANTS]
    found = rank_forks.run_ranks(math.prod(mesh), ranks.all_trained, cases, limit_s=3000)[0]
    largest: dict[str, list[float]] = {}
    for case in cases:
        parts = ranks.check(case, found[case], alone[case.alone], *tolerances[torch.float64])
        figures = [*parts.values(), distance(found[case]["weights"], alone[case.alone]["weights"])]
        largest[case.objective] = [
            max(pair) for pair in zip(figures, largest.get(case.objective, figures), strict=True)
        ]
    with capsys.disabled():
        for objective, differences in largest.items():
            figures = [f"{difference:.0e}" for difference in differences]
            print("\n| " + " | ".join([*map(str, mesh), objective, str(len(VARIANTS)), *figures]) + " |", end="")


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference of all weights, over theirs."""
    pairs = [(found[name] - values, values) for name, values in expected.items()]
    difference, whole = (math.hypot(*(float(x.norm()) for x in of_all)) for of_all in zip(*pairs, strict=True))
    return difference / whole
