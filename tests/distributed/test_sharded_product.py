"""The whole product of meshes, objectives and variants against one process; prints the table of docs/sharding.md.

    pytest tests/distributed/test_sharded_product.py -m slow -k 2-1-2-2      shard, replicate, context, tensor

Meshes of one or two ranks have every variant of every objective, those of four a part, in which each two of them meet,
and larger ones every objective once, in turn with one of the variants.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
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
OBJECTIVES = list(ranks.objectives())
RECOMPUTE = [False, True, "selective"]
EXTRAS: list[dict[str, bool]] = [{}, {"tied": True}, {"lora": True}]
Variant = tuple[int, int, int, int]
"""Which objective, recomputation, way to share prompts, and extra."""
EVERY: list[Variant] = list(itertools.product(range(8), range(3), range(2), range(3)))
IN_PAIRS: list[Variant] = [(i, j, (i + j) % 2, (i + j) % 3) for i in range(8) for j in range(3)]
ONCE: list[Variant] = [(i, i % 3, i % 2, (i + i // 3) % 3) for i in range(8)]
SCALAR = {i for i, (kind, _, _) in enumerate(ranks.objectives().values()) if kind == "scalar"}
"""Objectives of models without a head that could be tied."""


def case(mesh: tuple[int, ...], variant: Variant) -> ranks.Case:
    objective, recompute, share, extra = variant
    return ranks.Case(
        OBJECTIVES[objective],
        *mesh,
        recompute=RECOMPUTE[recompute],
        share=bool(share),
        num_layers=2,
        token_budget=100,
        **EXTRAS[extra],
    )


@cache
def alone(of_one: ranks.Case) -> dict[str, Any]:
    torch.set_num_threads(1)
    return ranks.trained(of_one)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(map(str, mesh)))
def test_every_variant_on_every_mesh(
    mesh: tuple[int, ...],
    tolerances: dict[torch.dtype, tuple[float, float]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = math.prod(mesh)
    wanted = EVERY if world <= 2 else IN_PAIRS if world <= 4 else ONCE
    variants = [v for v in wanted if not (v[0] in SCALAR and "tied" in EXTRAS[v[3]])]
    cases = [case(mesh, variant) for variant in variants]
    found = rank_forks.run_ranks(world, ranks.all_trained, cases, limit_s=1500)[0]
    rows = []
    for one in cases:
        expected = alone(one.alone)
        largest = ranks.check(one, found[one], expected, *tolerances[torch.float64])
        parts = [largest[part] / max(float(t.abs().max()) for t in expected[part].values()) for part in largest]
        rows.append([*parts, distance(found[one]["weights"], expected["weights"])])
    with capsys.disabled():
        figures = [f"{max(column):.0e}" for column in zip(*rows, strict=True)]
        print("\n| " + " | ".join([*map(str, mesh), str(len(cases)), *figures]) + " |", end="")


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference of all weights, over theirs."""
    pairs = [(found[name] - values, values) for name, values in expected.items()]
    difference, whole = (math.hypot(*(float(x.norm()) for x in of_all)) for of_all in zip(*pairs, strict=True))
    return difference / whole


def test_every_two_ways_meet() -> None:
    for a, b in itertools.combinations(range(4), 2):
        assert {(v[a], v[b]) for v in IN_PAIRS} == {(v[a], v[b]) for v in EVERY}
    for a in range(4):
        assert {v[a] for v in ONCE} == {v[a] for v in EVERY}
    assert not any(v[0] in SCALAR and "tied" in EXTRAS[v[3]] for v in ONCE)
