"""What ranks of ``test_sharded_failures.py`` run: updates in which something is odd or fails on one rank."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from quartet.config import UserError
from quartet.models.packed_model import PackedCausalLM, PackedScalarModel, decoder_layers
from quartet.train.engine import LossTerm, TrainEngine
from quartet.train.forward import Needs, forward_only
from quartet.train.objectives import SFTObjective
from quartet.train.parallel.fsdp import shard_model, sharded
from quartet.train.parallel.mesh import DataParallelGroup, Mesh
from quartet.train.parallel.pass_group import PassGroup
from sharded_ranks import Case, full, make_batch, make_engine, make_model, policy

ODD = 1
"""The rank that differs."""


def engine_on(mesh: Mesh | None, **config: Any) -> TrainEngine[Any]:
    return make_engine(Case("sft"), mesh, **config)


def weights(engine: TrainEngine[Any]) -> dict[str, Any]:
    return {name: full(values) for name, values in engine.weights()}


def is_unchanged(engine: TrainEngine[Any], before: dict[str, Any]) -> bool:
    return all(torch.equal(values, before[name]) for name, values in weights(engine).items())


def outcome(work: Callable[[], Any]) -> str:
    """Type and text of what it raises."""
    try:
        work()
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Failing(SFTObjective):
    """Fails where it is told to, on the odd rank, for as long as ``is_armed``."""

    def __new__(cls, *_: Any) -> Failing:
        return super().__new__(cls)

    def __init__(self, place: str, error: BaseException) -> None:
        super().__init__()
        for name, value in {"place": place, "error": error, "is_armed": True}.items():
            object.__setattr__(self, name, value)

    def disarm(self) -> None:
        object.__setattr__(self, "is_armed", False)

    def _fail(self, place: str) -> None:
        if self.is_armed and self.place == place and DataParallelGroup.of_world().rank == ODD:
            if isinstance(self.error, torch.OutOfMemoryError):
                self.disarm()
            raise self.error

    def atoms(self, batch):
        self._fail("atoms")
        return super().atoms(batch)

    def denominators(self, batch):
        self._fail("denominators")
        return super().denominators(batch)

    def loss(self, outputs, batch, denominators, sums):
        self._fail("loss")
        return super().loss(outputs, batch, denominators, sums)


def _no_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


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
                model.lm_head.weight.to_local()[0, 0] += 1e-9
        engine.num_updates = int(what == "updates" and is_odd)
        data = batch.select(range(1, 10)) if what == "batch" and is_odd else batch
        also = [LossTerm(batch, SFTObjective("loss/ptx"))] if what == "terms" and is_odd else []
        before = weights(engine)
        found[what] = (
            outcome(lambda e=engine, d=data, a=also: e.train_step(d, SFTObjective(), a)),
            is_unchanged(engine, before),
        )
    return found


def failures(mesh: Mesh) -> dict[str, tuple[str, Any]]:
    """What each rank raised, and the metrics of the next update."""
    found = {}
    for place, error in {
        "atoms": ValueError("no atoms\nand more lines"),
        "denominators": ValueError("no denominators"),
        "loss": ValueError("no loss"),
        "licence": SystemExit("no licence"),
        "norm": MemoryError("no norm"),
        "step": MemoryError("no step"),
    }.items():
        engine, objective = engine_on(mesh, token_budget=45), Failing("atoms" if place == "licence" else place, error)
        step, norm = engine.optimizer.step, nn.utils.get_total_norm
        if mesh.data.rank == ODD and place == "step":
            engine.optimizer.step = lambda e=error: (_ for _ in ()).throw(e)
        if mesh.data.rank == ODD and place == "norm":
            nn.utils.get_total_norm = lambda _, e=error: (_ for _ in ()).throw(e)
        raised = outcome(lambda e=engine, o=objective: e.train_step(make_batch(), o))
        engine.optimizer.step, nn.utils.get_total_norm = step, norm
        objective.disarm()
        found[place] = raised, engine.train_step(make_batch(), objective) if place != "step" else None
    return found


def out_of_memory(mesh: Mesh) -> Any:
    """Between collectives; where there are none within a pass, in its middle."""
    engine, batch = engine_on(mesh, token_budget=43), make_batch().select(range(1, 10))
    objective = Failing("loss", _no_memory()) if mesh.shard > 1 else SFTObjective()
    hidden = engine.packed.hidden
    if mesh.shard == 1 and mesh.data.rank == ODD:

        def once(*args: Any) -> Any:
            engine.packed.hidden = hidden
            raise _no_memory()

        engine.packed.hidden = once
    metrics, budget = (
        engine.train_step(batch, objective),
        engine.budget.tokens,
    )
    smaller = engine_on(mesh, token_budget=budget)
    expected = smaller.train_step(batch, SFTObjective())
    return engine.num_oom, budget, metrics == expected, is_unchanged(engine, weights(smaller))


def never_enough_memory(mesh: Mesh) -> str:
    engine = engine_on(mesh)
    objective = Failing("loss", MemoryError("no room"))
    try:
        engine.train_step(make_batch(), objective)
    except UserError as error:
        return f"{error.problem} | {error.found}"
    return "nothing"


def come_apart(mesh: Mesh) -> str:
    engine = engine_on(mesh)
    engine.train_step(make_batch(), SFTObjective())
    root = sharded(engine.packed)
    assert root is not None
    summed = root.sum_gradients

    def altered(present: Any) -> None:
        summed(present)
        for parameter in root.model.parameters():
            parameter.grad.to_local().mul_(1.5)

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
    return torch.equal(full(model.extra.weight), before)


def forward_passes(mesh: Mesh) -> Any:
    """Largest differences from one process: ranks with other numbers of micro-batches, and one with none."""
    batch, differences, rank = make_batch(), {}, mesh.data.rank
    own = [batch.select([0, 5, 6, 7, 8]), batch.select([])][rank % 2]
    for kind, needs in {
        "causal": Needs(logprobs=True, entropies=True),
        "scalar": Needs(values=True, scores=True),
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


def fails_before_an_update(mesh: Mesh) -> Any:
    """A forward-only pass, for which a sequence of the odd rank is too long, is part of what goes before an update."""
    engine, batch = engine_on(mesh), make_batch()
    engine.forward_budget.tokens = 4 if mesh.data.rank == ODD else 50

    def update() -> None:
        with engine.reporting_failures():
            engine.forward(batch, Needs(logprobs=True))
        engine.train_step(batch, SFTObjective())

    begun = time.monotonic()
    raised, seconds = outcome(update), time.monotonic() - begun
    return raised, seconds, engine.train_step(batch, SFTObjective())


# Within a pass -------------------------------------------------------------------------------------------


@contextmanager
def out_of_memory_at(packed: Any, place: str, skipped: int) -> Iterator[list[bool]]:
    """Memory runs out once on the odd rank; yields whether its tensors were freed before it went on.

    Args:
        place: ``forward i``, ``recompute i`` of layer i; ``exchange``: before one with peers; ``end``: of a pass,
            before the peers hear that it went well.
        skipped: so many calls of the place go well before.
    """
    root, left, held = sharded(packed), [skipped], [lambda: None]
    freed: list[bool] = []
    what, _, number = place.partition(" ")
    mlp, is_odd = decoder_layers(packed.body)[int(number or 0)].mlp, DataParallelGroup.of_world().rank == ODD
    forward, break_off = mlp.forward, root._break_off

    def fail(tensor: Any) -> None:
        left[0] -= 1
        if left[0] == -1:
            held[0] = tensor
            raise _no_memory()

    def computed(hidden: Any) -> Any:
        is_backward = torch._C._current_graph_task_id() >= 0
        if what == ("recompute" if is_backward else "forward"):
            fail(weakref.ref(hidden))
        return forward(hidden)

    def broken_off() -> None:
        freed.append(held[0]() is None)
        break_off()

    name = "_swap" if what == "exchange" else "end"
    method = getattr(PassGroup, name)

    def before(self: PassGroup, *args: Any) -> None:
        # What a pass fails of happens before its rank says to any group that it went well.
        if not self._is_idle and (what == "exchange" or self is root._groups[0]):
            fail(lambda: None)
        method(self, *args)

    if is_odd and what in ("exchange", "end"):
        setattr(PassGroup, name, before)
    elif is_odd:
        mlp.forward = computed
    root._break_off = broken_off
    try:
        yield freed
    finally:
        mlp.forward = forward
        del root._break_off
        setattr(PassGroup, name, method)


PLACES: dict[str, tuple[str, int]] = {
    "the first layer": ("forward 0", 0),
    "a layer that is computed again": ("recompute 1", 1),
    "an exchange in a backward": ("exchange", 20),
    "the end of the last pass": ("end", 1),
}
"""Where, and how many calls go well before: of two passes, each with twelve exchanges or more in either direction."""


def memory_within_passes(sizes: dict[str, int]) -> dict[str, Any]:
    """An update for every place at which memory runs out, and the same ones under the small budget from the start:
    budget, metrics, attempts, seconds, whether tensors were freed; and the weights after all."""
    mesh, batch, found = Mesh.of(DataParallelGroup.of_world(), **sizes), make_batch().select(range(1, 10)), {}
    also = [LossTerm(batch, SFTObjective("loss/ptx"), 0.3)]
    engine = engine_on(mesh, activation_checkpointing=True)
    smaller = engine_on(mesh, token_budget=19, activation_checkpointing=True)
    root, attempts = sharded(engine.packed), []
    make_passes = root.make_passes
    root.make_passes = lambda passes, *a, **k: (attempts.append(len(passes)), make_passes(passes, *a, **k))
    for name, (place, skipped) in PLACES.items():
        attempts.clear()
        engine.budget.tokens = 43
        with out_of_memory_at(engine.packed, place, skipped) as freed:
            begun = time.monotonic()
            metrics = engine.train_step(batch, SFTObjective(), also)
            seconds = time.monotonic() - begun
        expected = smaller.train_step(batch, SFTObjective(), also)
        found[name] = engine.budget.tokens, (metrics, expected), len(attempts), seconds, freed
    return {"steps": found, "weights": (weights(engine), weights(smaller)), "num_oom": engine.num_oom}


CASES: list[Callable[[Mesh], Any]] = [
    nothing_to_do, not_finite, begun_differently, failures, out_of_memory, never_enough_memory, come_apart, unused,
    forward_passes, fails_before_an_update,
]  # fmt: skip


def all_cases(shard: int) -> dict[str, Any]:
    mesh = Mesh.of(DataParallelGroup.of_world(), shard=shard)
    return {"is_cut": mesh.shard > 1, **{case.__name__: case(mesh) for case in CASES}}


def fails_in_one_copy() -> Any:
    return fails_before_an_update(Mesh.of(DataParallelGroup.of_world(), shard=2))


# In processes of their own -------------------------------------------------------------------------------


def hangs() -> tuple[str, float]:
    """The odd rank stands still within a pass: what the others raise, and after how many seconds."""
    mesh = Mesh.of(DataParallelGroup.of_world(), shard=3, time_limit=timedelta(seconds=3))
    engine, store = engine_on(mesh), dist.distributed_c10d._get_default_store()
    engine.train_step(make_batch(), SFTObjective())

    def stand_still(*_: Any) -> None:
        with suppress(RuntimeError):  # the store ends with rank 0
            while not store.check([f"raised {rank}" for rank in (0, 2)]):
                time.sleep(0.1)
        os._exit(7)

    if mesh.data.rank == ODD:
        engine.packed.hidden = stand_still
    begun = time.monotonic()
    raised, seconds = outcome(lambda: engine.train_step(make_batch(), SFTObjective())), time.monotonic() - begun
    _wait_for_the_last(mesh)
    return raised, seconds


def _wait_for_the_last(mesh: Mesh) -> None:
    """The store ends with rank 0; it is there until the last rank has raised, too."""
    store, last = dist.distributed_c10d._get_default_store(), mesh.data.size - 1
    store.set(f"raised {mesh.data.rank}", "")
    if mesh.data.rank == 0:
        store.wait([f"raised {last}"], timedelta(seconds=20))


def lost(sizes: dict[str, int]) -> tuple[str, float]:
    """The odd rank ends within a pass: what the others raise, and after how many seconds."""
    mesh = Mesh.of(DataParallelGroup.of_world(), **sizes, time_limit=timedelta(seconds=3))
    engine = engine_on(mesh)
    engine.train_step(make_batch(), SFTObjective())

    if mesh.data.rank == ODD:
        engine.packed.hidden = lambda *_: os._exit(7)
    begun = time.monotonic()
    raised, seconds = outcome(lambda: engine.train_step(make_batch(), SFTObjective())), time.monotonic() - begun
    _wait_for_the_last(mesh)
    return raised, seconds
