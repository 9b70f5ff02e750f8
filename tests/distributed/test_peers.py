"""Ranks that compute one part of a batch together: what they have alike is compared before an update."""

from __future__ import annotations

import pytest
import torch

import sharded_ranks as ranks
from quartet.train.objectives import SFTObjective
from quartet.train.parallel.mesh import DataParallelGroup, Mesh
from rank_forks import run_ranks


def _come_apart() -> str:
    """What an update says where a norm, which all tensor ranks have whole, is another one on rank 1."""
    mesh = Mesh.of(DataParallelGroup.of_world(), tensor=2)
    engine = ranks.make_engine(ranks.Case("sft"), mesh)
    if mesh.data.rank == 1:
        with torch.no_grad():
            engine.packed.body.norm.weight.to_local()[0] += 1e-9
    with pytest.raises(RuntimeError) as update:
        engine.train_step(ranks.make_batch(), SFTObjective())
    return str(update.value)


def test_weights_that_tensor_ranks_have_alike_are_compared() -> None:
    for told in run_ranks(2, _come_apart, limit_s=60):
        assert "began an update differently: weights that tensor ranks have alike, 0 of rank 0" in told
