"""Weights over handles: who is reached how, what arrives, and which error is told when an end fails."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from quartet.cluster.errors import WorkerDeath, WorkerDied
from quartet.config import UserError
from quartet.config.common import LoRAConfig, TrainConfig
from quartet.models.loading import packed_causal_lm
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.engine import NativeEngine, copy_packed_model
from quartet.rollout.protocol import Completion, Request, SamplingParams
from quartet.schedule.role_group import LocalGroup
from quartet.schedule.weight_sync import (
    WeightReceiverMixin,
    WeightSenderMixin,
    open_weight_sync,
    sync_weights,
)
from quartet.train.engine import TrainEngine
from quartet.weights.manifest import WeightsUnusable, WeightSyncError, WeightSyncTimeout
from quartet.weights.sync import SyncEndpoint, WeightOffer, choose_transport

LORA = LoRAConfig(rank=2, alpha=4)


class TrainerHost(WeightSenderMixin):
    def __init__(self, engine: TrainEngine[PackedCausalLM]) -> None:
        self.engine = engine


class EngineHost(WeightReceiverMixin):
    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine


@dataclass(frozen=True)
class Elsewhere:
    """A host on a thread that says it is another process, one that lives."""

    host: Any
    number: int
    machine: str = ""

    async def call(self, method: Any, *args: Any) -> Any:
        result = await asyncio.to_thread(getattr(self.host, method.__name__), *args)
        if isinstance(result, SyncEndpoint):
            return replace(result, pid=(os.getppid(), 1)[self.number], machine=result.machine + self.machine)
        return result


class Pretending(LocalGroup[Any]):
    """A worker on this thread that says it is in another process than the trainer."""

    async def call(self, method: Any, *args: Any) -> Any:  # type: ignore[override]
        result = await super().call(method, *args)
        return replace(result, pid=1) if isinstance(result, SyncEndpoint) else result


def model(precision: Any = "fp32", lora: LoRAConfig | None = None) -> PackedCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=96, initializer_range=0.2,
    )  # fmt: skip
    return packed_causal_lm(LlamaForCausalLM(config).eval(), precision=precision, lora=lora)


def trainer_of(packed: PackedCausalLM, lora: LoRAConfig | None = None) -> TrainEngine[PackedCausalLM]:
    return TrainEngine(packed, TrainConfig(lora=lora), total_steps=1)


@torch.no_grad()
def train(packed: PackedCausalLM, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    named = packed.model.named_parameters() if packed.adapters is None else packed.adapters.trained.items()
    for _, parameter in named:
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def answers(engine: NativeEngine) -> dict[str, Completion]:
    sampling = SamplingParams(max_new_tokens=6, seed=3)
    engine.submit([Request(f"r{i}", f"r{i}", (5, 9, 2 + i), sampling) for i in range(3)])
    done: dict[str, Completion] = {}
    while engine.has_work:
        done |= {completion.request_id: completion for completion in engine.step()}
    return done


@dataclass
class Cast:
    """A trainer, engines with copies of its model, and a handle on each."""

    packed: PackedCausalLM
    engines: list[NativeEngine]
    trainer: LocalGroup[TrainerHost]
    hosts: list[EngineHost]
    handles: list[Any]

    def expected(self, version: int) -> dict[str, Completion]:
        return answers(NativeEngine(self.packed, version=version))


Make = Callable[..., Cast]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Cast] = []

    def cast(num_engines: int = 1, *, here: bool, precision: Any = "fp32", lora: LoRAConfig | None = None) -> Cast:
        packed = model(precision, lora)
        engines = [NativeEngine(copy_packed_model(packed), owns_weights=True) for _ in range(num_engines)]
        hosts = [EngineHost(engine) for engine in engines]
        handles: list[Any] = [LocalGroup(h) if here else Elsewhere(h, i) for i, h in enumerate(hosts)]
        made.append(Cast(packed, engines, LocalGroup(TrainerHost(trainer_of(packed, lora))), hosts, handles))
        return made[-1]

    yield cast
    for one in made:
        one.trainer.worker.weight_sender.disconnect()


# What arrives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("transport", ["auto", "shared_memory", "collective"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_engines_serve_what_the_trainer_has(make: Make, transport: Any, precision: Any, lora: Any) -> None:
    here = transport == "auto"
    cast = make(1 if here else 2, here=here, precision=precision, lora=lora)

    async def run() -> str:
        chosen = await open_weight_sync(cast.trainer, cast.handles, transport, timeout_s=20)
        for version in (3, 4, 5):
            train(cast.packed, version)
            num_bytes = await sync_weights(cast.trainer, cast.handles, version, timeout_s=20)
            for engine in cast.engines:
                assert answers(engine) == cast.expected(version)
        sizes = cast.engines[0].weight_sink().dtypes()
        named = dict(cast.engines[0].packed.model.named_parameters())
        assert num_bytes == sum(named[name].numel() * dtype.itemsize for name, dtype in sizes.items())
        return chosen

    assert asyncio.run(run()) == ("shared" if transport == "auto" else transport)


def test_within_one_process_nothing_waits_for_a_thread(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    cast = make(here=True)
    monkeypatch.setattr("socket.create_server", refused)

    async def run() -> None:
        await open_weight_sync(cast.trainer, cast.handles)
        await sync_weights(cast.trainer, cast.handles, 1)

    asyncio.run(run())
    assert all(answers(engine) == cast.expected(1) for engine in cast.engines)


def test_one_engine_of_this_process_hears_a_trainer_of_another(make: Make) -> None:
    cast = make(1, here=True)
    trainer: Any = Elsewhere(cast.trainer.worker, 0)
    cast.handles[0] = Pretending(cast.hosts[0])

    async def run() -> str:
        chosen = await open_weight_sync(trainer, cast.handles, timeout_s=20)
        train(cast.packed, 1)
        await sync_weights(trainer, cast.handles, 1, timeout_s=20)
        return chosen

    assert asyncio.run(run()) == "shared_memory"
    assert answers(cast.engines[0]) == cast.expected(1)


# How the ends are reached ---------------------------------------------------------------------------------

TRAINER = SyncEndpoint("m", 1, "10.0.0.1", "cpu")


@pytest.mark.parametrize(
    ("trainer", "engines", "expected"),
    [
        (TRAINER, [TRAINER, TRAINER], "shared"),
        (TRAINER, [replace(TRAINER, pid=2), replace(TRAINER, pid=3)], "shared_memory"),
        (TRAINER, [replace(TRAINER, pid=2), replace(TRAINER, pid=1, machine="n")], "collective"),
        (replace(TRAINER, device="G1"), [replace(TRAINER, pid=2, device="G1")], "shared_memory"),
        (replace(TRAINER, device="G1"), [replace(TRAINER, pid=2, device="G2")], "collective"),
        (replace(TRAINER, device="G1"), [replace(TRAINER, machine="n", device="G1")], "collective"),
    ],
)
def test_the_nearest_way_that_leads_to_all(trainer: SyncEndpoint, engines: list[SyncEndpoint], expected: str) -> None:
    assert choose_transport(trainer, engines) == expected


@pytest.mark.parametrize(
    ("transport", "engines", "found"),
    [
        ("auto", [LocalGroup, 1], "several ends in one process"),
        ("collective", [1, 1], "several ends in one process"),
    ],
)
def test_a_transport_that_leads_nowhere_is_refused(make: Make, transport: Any, engines: list[Any], found: str) -> None:
    cast = make(len(engines), here=True)
    for i, where in enumerate(engines):
        host = cast.handles[i].worker
        if where is not LocalGroup:
            cast.handles[i] = Elsewhere(host, where)
    with pytest.raises(UserError) as caught:
        asyncio.run(open_weight_sync(cast.trainer, cast.handles, transport, timeout_s=5))
    assert found in caught.value.found


# What goes wrong ------------------------------------------------------------------------------------------


def sync(cast: Cast, version: int, timeout_s: float = 20.0, transport: Any = "auto") -> None:
    async def run() -> None:
        await open_weight_sync(cast.trainer, cast.handles, transport, timeout_s=timeout_s)
        await sync_weights(cast.trainer, cast.handles, version, timeout_s=timeout_s)

    asyncio.run(run())


def test_a_call_that_never_ends_keeps_no_other(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that stands still outside of the protocol: its call has no end of its own."""
    monkeypatch.setattr("quartet.schedule.weight_sync.GRACE_S", 0.2)
    cast = make(2, here=False)

    @dataclass(frozen=True)
    class Stuck:
        inner: Any

        async def call(self, method: Any, *args: Any) -> Any:
            if method.__name__ == "receive_weights":
                await asyncio.sleep(3600)
            return await self.inner.call(method, *args)

    cast.handles[0] = Stuck(cast.handles[0])
    start = time.monotonic()
    with pytest.raises(WeightSyncTimeout) as caught:
        sync(cast, 1, timeout_s=1.0)
    assert caught.value.rank == 0
    assert time.monotonic() - start < 12


def test_a_dead_worker_is_the_cause(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cast = make(2, here=False)
    death = WorkerDied(WorkerDeath("rollout", 1, 4, "h", "on", "killed"))

    @dataclass(frozen=True)
    class Dying:
        inner: Any

        async def call(self, method: Any, *args: Any) -> Any:
            if method.__name__ == "receive_weights":
                raise death
            return await self.inner.call(method, *args)

    cast.handles[1] = Dying(cast.handles[1])
    with pytest.raises(WeightSyncError, match="engine of rank 1") as caught:
        sync(cast, 1, timeout_s=2.0)
    assert caught.value.rank == 1
    assert caught.value.__cause__ is death


@pytest.mark.parametrize("here", [True, False], ids=["here", "elsewhere"])
def test_a_trainer_that_fails_is_told_with_its_own_error(
    make: Make, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cast = make(1, here=here)
    weights, calls = cast.trainer.worker.engine.weights, []

    def failing() -> Iterator[tuple[str, Tensor]]:
        calls.append(None)
        for number, pair in enumerate(weights()):
            if len(calls) == (3 if here else 2) and number == 3:  # passes before are for names and shapes
                raise OSError("the trainer's disk is full")
            yield pair

    monkeypatch.setattr(cast.trainer.worker.engine, "weights", failing)
    who = "the engine of rank 0" if here else "the trainer"  # within one process the engine reads the trainer's own
    with pytest.raises(WeightSyncError, match=f"{who} failed") as caught:
        sync(cast, 1)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(WeightsUnusable):
        cast.engines[0].step()
    monkeypatch.undo()
    sync(cast, 1)
    assert answers(cast.engines[0]) == cast.expected(1)


def test_an_offer_that_is_not_followed_up_takes_nothing(make: Make) -> None:
    """The driver dies in the middle, or leaves messages behind."""
    cast = make(here=False)
    sync(cast, 1, transport="shared_memory")

    async def late(offered: list[WeightOffer]) -> WeightSyncError:
        offered.append(await cast.trainer.call(WeightSenderMixin.offer_weights, 2))
        found = await asyncio.wait_for(cast.handles[0].call(WeightReceiverMixin.receive_weights, offered[0], 0), 10)
        assert isinstance(found, WeightSyncError)
        return found

    cast.trainer.worker.weight_sender._timeout_s = 0.4
    kept = answers(cast.engines[0])
    offered: list[WeightOffer] = []
    assert isinstance(asyncio.run(late(offered)), WeightSyncTimeout)
    assert answers(cast.engines[0]) == kept
    train(cast.packed, 3)
    sync(cast, 3, transport="shared_memory")
    stale = cast.hosts[0].receive_weights(offered[0], 0)
    assert isinstance(stale, WeightSyncError)
    assert answers(cast.engines[0]) == cast.expected(3)
