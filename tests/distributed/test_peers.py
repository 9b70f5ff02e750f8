"""Ranks that compute one part of a batch together: what they tell each other before an update."""

from __future__ import annotations

import pytest
import torch

import sharded_ranks as ranks
from quartet.batch.ragged import RaggedBatch
from quartet.train.objectives import SFTObjective
from quartet.train.parallel.mesh import DataParallelGroup, Mesh
from rank_forks import run_ranks


def _other(batch: RaggedBatch, what: str) -> RaggedBatch:
    """A batch of the same sizes and ids with one number in another place."""
    if what == "token ids":
        changed = batch.input_ids.clone()
        changed[[0, 1]] = changed[[1, 0]] + 1
        return RaggedBatch(
            changed % ranks.VOCAB, batch.segment_lengths, batch.parents, batch.leaves, batch.ids, batch.token
        )
    return batch.with_token(advantages=batch.token["advantages"].flip(0))


def _disagree() -> dict[str, tuple[str, int]]:
    """By what rank 3 has otherwise: the message of an update, and the updates that were made."""
    mesh, found = Mesh.of(DataParallelGroup.of_world(), shard=2, context=2), {}
    engine = ranks.make_engine(ranks.Case("sft"), mesh)
    for what in ("token ids", "advantages", "budget"):
        whole = ranks.make_batch()
        if mesh.data.rank == 3 and what == "budget":
            engine.budget.tokens = 45
        elif mesh.data.rank == 3:
            whole = _other(whole, what)
        with pytest.raises(RuntimeError) as update:
            engine.train_step(whole, SFTObjective())
        found[what] = str(update.value), engine.num_updates
    return found


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


def test_peers_that_have_different_batches_are_told_before_any_pass() -> None:
    for found in run_ranks(4, _disagree, limit_s=60):
        for what, (update, num_updates) in found.items():
            name = "train.token_budget" if what == "budget" else "batch 0"
            assert f"began an update differently: {name} of rank 0" in update
            assert "of rank 3" in update
            assert num_updates == 0
