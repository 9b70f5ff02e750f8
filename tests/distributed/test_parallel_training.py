"""Training on meshes with pipeline, context and tensor ranks is training in one process, whatever else is asked for."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import pytest
import torch

import rank_forks
import sharded_ranks as ranks

MESHES = [
    mesh
    for mesh in itertools.product((1, 2, 4, 8), repeat=5)
    if math.prod(mesh) <= (8 if mesh[2] > 1 else 4) and math.prod(mesh[2:]) > 1
]
"""Replicate, shard, pipeline, context, tensor: all whose sizes are powers of two of up to four ranks, with stages of up
to eight.
"""
CUT = [(1, 2, 1, 2, 1), (2, 1, 1, 1, 2), (1, 1, 1, 2, 2)]
STAGES = [(2, 1, 2, 1, 1), (1, 1, 2, 1, 2), (1, 2, 2, 2, 1)]
RECOMPUTE = [False, True, "selective"]
TREES: list[dict[str, Any]] = [{}, {"deep": True}, {"share": False}]
EXTRAS: list[dict[str, Any]] = [{}, {"tied": True}, {"lora": True}]


def case(objective: str, mesh: tuple[int, ...], **options: Any) -> ranks.Case:
    replicate, shard, pipeline, context, tensor = mesh
    layers = 2 if pipeline < 3 else pipeline + 1
    return ranks.Case(objective, shard, replicate, pipeline, context, tensor, **{"num_layers": layers, **options})


def pairs(meshes: list[tuple[int, ...]]) -> list[ranks.Case]:
    """Each way to cut, recompute, share and change a model beside each of the others: an orthogonal array."""
    names = ["ppo-actor", *ranks.objectives()]
    return [
        case(names[3 * i + j], meshes[i], recompute=RECOMPUTE[j], **TREES[(i + j) % 3], **EXTRAS[(i + 2 * j) % 3])
        for i, j in itertools.product(range(3), repeat=2)
    ]


def all_cases() -> list[ranks.Case]:
    """On the many meshes one loss: of one micro-batch for each data rank, of several where they pass through stages."""
    many = [case("ppo-actor", m, token_budget=50 if m[2] > 1 else 200, adds=False) for m in MESHES]
    return [*many, *pairs(CUT), *pairs(STAGES)]


@cache
def alone(of_one: ranks.Case) -> dict[str, Any]:
    return ranks.trained(of_one)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_mesh_trains_as_one_process(world: int, tolerances: dict[torch.dtype, tuple[float, float]]) -> None:
    torch.set_num_threads(1)
    cases = [of_mesh for of_mesh in all_cases() if of_mesh.world == world]
    first, *others = rank_forks.run_ranks(world, ranks.all_trained, cases, limit_s=900)
    for of_mesh, found in first.items():
        largest = ranks.check(of_mesh, found, alone(of_mesh.alone), *tolerances[torch.float64])
        assert largest["gradients"] <= 1e-12, (of_mesh, largest)
        for other in (of_rank[of_mesh] for of_rank in others):
            assert other["metrics"] == found["metrics"], of_mesh
            assert all(torch.equal(other["weights"][n], values) for n, values in found["weights"].items()), of_mesh
