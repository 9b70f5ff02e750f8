"""Training on meshes with context and tensor ranks is training in one process: meshes, objectives and variants."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import pytest
import torch

import rank_forks
import sharded_ranks as ranks

MESHES = [mesh for mesh in itertools.product((1, 2, 4), repeat=4) if math.prod(mesh) <= 4 and mesh[2] * mesh[3] > 1]
"""Replicate, shard, context, tensor: all of up to four ranks whose sizes are powers of two."""
CUT = [(1, 2, 2, 1), (2, 1, 1, 2), (1, 1, 2, 2)]
RECOMPUTE = [False, True, "selective"]
TREES: list[dict[str, Any]] = [{}, {"deep": True}, {"share": False}]
EXTRAS: list[dict[str, Any]] = [{}, {"tied": True}, {"lora": True}]


def case(objective: str, mesh: tuple[int, ...], **options: Any) -> ranks.Case:
    replicate, shard, context, tensor = mesh
    return ranks.Case(objective, shard, replicate, context, tensor, **{"num_layers": 2, **options})


def pairs() -> list[ranks.Case]:
    """Each way to cut, recompute, share and change a model beside each of the others: an orthogonal array."""
    names = ["ppo-actor", *ranks.objectives()]
    return [
        case(names[3 * i + j], CUT[i], recompute=RECOMPUTE[j], **TREES[(i + j) % 3], **EXTRAS[(i + 2 * j) % 3])
        for i, j in itertools.product(range(3), repeat=2)
    ]


def all_cases() -> list[ranks.Case]:
    """One micro-batch of one loss for each data rank on the many meshes."""
    return [*(case("ppo-actor", mesh, token_budget=200, adds=False) for mesh in MESHES), *pairs()]


@cache
def alone(of_one: ranks.Case) -> dict[str, Any]:
    return ranks.trained(of_one)


@pytest.mark.parametrize("world", [2, 4])
def test_every_mesh_trains_as_one_process(world: int, tolerances: dict[torch.dtype, tuple[float, float]]) -> None:
    torch.set_num_threads(1)
    cases = [of_mesh for of_mesh in all_cases() if of_mesh.world == world]
    first, *others = rank_forks.run_ranks(world, ranks.all_trained, cases, limit_s=900)
    for of_mesh, found in first.items():
        ranks.check(of_mesh, found, alone(of_mesh.alone), *tolerances[torch.float64])
        for other in (of_rank[of_mesh] for of_rank in others):
            assert other["metrics"] == found["metrics"], of_mesh
            assert all(torch.equal(other["weights"][n], values) for n, values in found["weights"].items()), of_mesh
