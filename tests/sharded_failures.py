"""What ranks of ``test_sharded_failures.py`` run: updates in which something is odd or fails on one rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from quartet.models.packed_model import PackedCausalLM, PackedScalarModel
from quartet.train.engine import LossTerm, TrainEngine
from quartet.train.forward import ForwardNeeds, forward_only
from quartet.train.objectives import SFTObjective
from quartet.train.parallel.data import shard_model, sharded
from quartet.train.parallel.mesh import DataParallelGroup, Mesh
from quartet.train.parallel.tensors import local
from sharded_ranks import Case, full, make_batch, make_engine, make_model, policy

ODD = 1
"""The rank that differs."""


def engine_on(mesh: Mesh | None, **config: Any) -> TrainEngine[Any]:
    return make_engine(Case("sft"), mesh, **config)


def weights(engine: TrainEngine[Any]) -> dict[str, Any]:
    return full(engine, engine.trained)


def is_unchanged(engine: TrainEngine[Any], before: dict[str, Any]) -> bool:
    return all(torch.equal(values, before[name]) for name, values in weights(engine).items())


def outcome(work: Callable[[], Any]) -> str:
    """Type and text of what it raises."""
    try:
        work()
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# Cases ---------------------------------------------------------------------------------------------------


def nothing_to_do(mesh: Mesh | None) -> Any:
    """One sequence for all ranks, and a term of one."""
    engine, batch = engine_on(mesh), make_batch()
    also = [LossTerm(batch.select([4]), SFTObjective("loss/ptx"), 0.3)]
    return engine.train_step(batch.select([5]), policy(), also), weights(engine)


def not_finite(mesh: Mesh) -> Any:
    engine, batch = engine_on(mesh), make_batch()
    advantages, before = batch.token["advantages"].clone(), weights(engine)
    advantages[batch.token["loss_mask"].nonzero()[-1]] = float("inf")
    metrics = engine.train_step(batch.with_token(advantages=advantages), policy())
    unchanged = is_unchanged(engine, before)
    again = engine.train_step(batch, policy())
    return metrics["skipped"], unchanged, engine.num_updates, engine.num_skipped, again["skipped"]


def begun_differently(mesh: Mesh) -> dict[str, tuple[str, bool]]:
    found, batch, is_odd = {}, make_batch(), mesh.data.rank == ODD
    for what in ("weights", "part of the weights", "batch", "budget", "updates", "terms"):
        model = make_model("causal")
        with torch.no_grad():
            model.lm_head.weight[0, 0] += 1e-9 * (what == "weights" and is_odd)
        config = make_engine(Case("sft"), None).config.model_copy(
            update={"token_budget": 51 if what == "budget" and is_odd else 50}
        )
        engine = TrainEngine(PackedCausalLM(model), config, total_steps=10, mesh=mesh)
        if what == "part of the weights" and mesh.shard == 1 and is_odd:
            with torch.no_grad():
                local(model.lm_head.weight)[0, 0] += 1e-9
        engine.num_updates = int(what == "updates" and is_odd)
        data = batch.select(range(1, 10)) if what == "batch" and is_odd else batch
        also = [LossTerm(batch, SFTObjective("loss/ptx"))] if what == "terms" and is_odd else []
        before = weights(engine)
        found[what] = (
            outcome(lambda e=engine, d=data, a=also: e.train_step(d, SFTObjective(), a)),
            is_unchanged(engine, before),
        )
    return found


def come_apart(mesh: Mesh) -> str:
    engine = engine_on(mesh)
    engine.train_step(make_batch(), SFTObjective())
    root = sharded(engine.packed)
    assert root is not None
    summed = root.sum_gradients

    def altered() -> None:
        summed()
        for parameter in root.model.parameters():
            local(parameter.grad).mul_(1.5)

    if mesh.data.rank == ODD and mesh.shard == 1:
        root.sum_gradients = altered
    return outcome(lambda: engine.train_step(make_batch(), SFTObjective()))


def unused(mesh: Mesh) -> Any:
    """AdamW leaves alone what had no gradient on any rank, as in one process."""
    model = make_model("causal")
    model.extra = nn.Linear(3, 3).to(torch.float64)
    before = model.extra.weight.detach().clone()
    engine = TrainEngine(PackedCausalLM(model), engine_on(None).config, total_steps=10, mesh=mesh)
    engine.train_step(make_batch(), SFTObjective())
    return torch.equal(engine.packed.gather.whole(model.extra.weight, everywhere=True), before)


def forward_passes(mesh: Mesh) -> Any:
    """Largest differences from one process: ranks with other numbers of micro-batches, and one with none."""
    batch, differences, rank = make_batch(), {}, mesh.data.rank
    own = [batch.select([0, 5, 6, 7, 8]), batch.select([])][rank % 2]
    for kind, needs in {
        "causal": ForwardNeeds(logprobs=True, entropies=True),
        "scalar": ForwardNeeds(values=True, scores=True),
    }.items():
        for precision in ("fp32", "bf16"):
            found = []
            for is_sharded in (True, False):
                packed = (PackedCausalLM if kind == "causal" else PackedScalarModel)(
                    make_model(kind, torch.float32), precision
                )
                packed.freeze()
                if is_sharded:
                    shard_model(packed, mesh)
                columns = forward_only(packed, own, needs, 50)
                found.append({**columns.token, **columns.sequence})
            here, alone = found
            if len(own):
                assert here.keys() == alone.keys()
                differences[kind, precision] = max(float((here[n] - alone[n]).abs().max()) for n in here)
            else:
                differences[kind, precision] = {name: tuple(values.shape) for name, values in here.items()}
    return differences


CASES: list[Callable[[Mesh], Any]] = [
    nothing_to_do, not_finite, begun_differently, come_apart, unused, forward_passes,
]  # fmt: skip


def all_cases(shard: int) -> dict[str, Any]:
    mesh = Mesh.of(DataParallelGroup.of_world(), shard=shard)
    return {"is_cut": mesh.shard > 1, **{case.__name__: case(mesh) for case in CASES}}


# In processes of their own -------------------------------------------------------------------------------


class Fault(SFTObjective):
    """Fails on the odd rank: before the passes (``atoms``), or within the first one."""

    def __new__(cls, *_: Any) -> Fault:
        return super().__new__(cls)

    def __init__(self, kind: str) -> None:
        super().__init__()
        object.__setattr__(self, "kind", kind if DataParallelGroup.of_world().rank == ODD else "")

    def atoms(self, batch):
        if self.kind == "atoms":
            raise ValueError("no atoms")
        return super().atoms(batch)

    def loss(self, outputs, batch, denominators, sums):
        if self.kind == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if self.kind == "exit":
            os._exit(7)
        if self.kind == "hang":
            store = dist.distributed_c10d._get_default_store()
            with suppress(RuntimeError):  # it ends with rank 0
                store.wait([f"raised {rank}" for rank in range(dist.get_world_size()) if rank != ODD])
            os._exit(7)
        return super().loss(outputs, batch, denominators, sums)


def fails(kind: str, sizes: dict[str, int], limit_s: float) -> tuple[str, float, str]:
    """What the others raise, after how many seconds, and what the odd rank says, whose process then ends."""
    mesh = Mesh.of(DataParallelGroup.of_world(), **sizes, time_limit=timedelta(seconds=limit_s))
    engine, store, batch = (
        engine_on(mesh),
        dist.distributed_c10d._get_default_store(),
        make_batch().select(range(1, 10)),
    )
    engine.train_step(batch, SFTObjective())
    begun = time.monotonic()
    raised, seconds = outcome(lambda: engine.train_step(batch, Fault(kind))), time.monotonic() - begun
    if mesh.data.rank == ODD:
        store.set("said", raised)
        os._exit(7)
    said = store.get("said").decode() if store.check(["said"]) else ""
    store.set(f"raised {mesh.data.rank}", "")
    if mesh.data.rank == 0:  # with which the store ends
        store.wait([f"raised {rank}" for rank in range(mesh.data.size) if rank != ODD], timedelta(seconds=20))
    return raised, seconds, said
