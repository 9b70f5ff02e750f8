"""A trainer and its engines in workers of their own: weights arrive over handles, and a killed engine is named."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from quartet.batch.ragged import RaggedBatch
from quartet.cluster import ResourcePool, WorkerDied, WorkerGroup
from quartet.config import UserError
from quartet.config.common import TrainConfig
from quartet.models.loading import packed_causal_lm
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Completion, Request, SamplingParams
from quartet.schedule.role_group import ColocatedWorker, RemoteGroup
from quartet.schedule.weight_sync import WeightReceiverMixin, WeightSenderMixin, open_weight_sync, sync_weights
from quartet.train.engine import TrainEngine
from quartet.train.forward import ForwardNeeds
from quartet.weights.manifest import WeightSyncError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")
TINY = {"cpus": 0.01}
PROMPT = (5, 9, 2)
TIMEOUT_S = 30.0
NAME = "model.layers.0.mlp.up_proj.weight"


def model(seed: int) -> PackedCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=96, initializer_range=0.2,
    )  # fmt: skip
    return packed_causal_lm(LlamaForCausalLM(config).eval())


class TrainerHost(WeightSenderMixin):
    def __init__(self) -> None:
        self.engine = TrainEngine(model(0), TrainConfig(), total_steps=1)

    @torch.no_grad()
    def train(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.engine.packed.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))

    def logprobs(self, heard: Completion) -> list[float]:
        batch = RaggedBatch.from_groups([PROMPT], [[heard.token_ids]], ["canary"])
        mask = batch.sequence_index() >= 0
        columns = self.engine.forward(batch.with_token(loss_mask=mask), ForwardNeeds(logprobs=True))
        found: list[float] = columns.token["logprobs"][mask].tolist()
        return found


class EngineHost(WeightReceiverMixin):
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.engine = NativeEngine(model(1), owns_weights=True)

    def sing(self) -> Completion:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=5)
        self.engine.submit([Request("canary", "canary", PROMPT, sampling)])
        while not (done := self.engine.step()):
            pass
        return done[0]

    def version(self) -> int | None:
        return self.engine.weight_sink().version

    def dies_at(self, name: str) -> None:
        """The process is killed when this tensor comes."""
        sink, write = self.engine.weight_sink(), self.engine.weight_sink().write

        def dies(found: str, start: int, values: Tensor) -> None:
            if found == name:
                os.kill(os.getpid(), signal.SIGKILL)
            write(found, start, values)

        sink.write = dies  # type: ignore[method-assign]


class HostWorker(ColocatedWorker):
    def __init__(self, role: str, kind: type) -> None:
        self.roles = {role: kind()}


class Stage:
    """One trainer worker and two engine workers."""

    def __init__(self) -> None:
        self.trainers = WorkerGroup(ResourcePool([1], **TINY), HostWorker, "actor", TrainerHost, name="trainer")
        self.engines = WorkerGroup(ResourcePool([2], **TINY), HostWorker, "rollout", EngineHost, name="rollout")
        self.trainer = RemoteGroup(self.trainers, "actor", TrainerHost, 0)
        self.version = 0
        self.handles = [RemoteGroup(self.engines, "rollout", EngineHost, rank) for rank in range(2)]

    async def served(self, version: int) -> None:
        """Both engines have the version, and compute what the trainer computes."""
        for handle in self.handles:
            assert await handle.call(EngineHost.version) == version
            heard = await handle.call(EngineHost.sing)
            assert set(heard.versions) == {version}
            expected = await self.trainer.call(TrainerHost.logprobs, heard)
            torch.testing.assert_close(torch.tensor(heard.logprobs), torch.tensor(expected), atol=1e-4, rtol=0.0)


@pytest.fixture(scope="module")
def whole(ray_cluster: Any) -> Stage:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return Stage()


@pytest.fixture
def stage(whole: Stage) -> Stage:
    """With living engines, whatever the test before did to them."""
    if whole.engines.dead():
        whole.engines.restart()
    return whole


@pytest.mark.parametrize("transport", ["auto", "collective"])
def test_versions_and_canary_agree_after_every_sync(stage: Stage, transport: Any) -> None:
    async def run() -> str:
        chosen = await open_weight_sync(stage.trainer, stage.handles, transport, timeout_s=TIMEOUT_S)
        for version in range(stage.version + 1, stage.version + 3):
            await stage.trainer.call(TrainerHost.train, version)
            assert await sync_weights(stage.trainer, stage.handles, version, timeout_s=TIMEOUT_S) > 0
            await stage.served(version)
        stage.version = version
        return chosen

    assert asyncio.run(run()) == ("shared_memory" if transport == "auto" else transport)


def test_an_engine_killed_in_mid_sync_is_named(stage: Stage) -> None:
    async def run() -> None:
        await open_weight_sync(stage.trainer, stage.handles, timeout_s=TIMEOUT_S)
        pid = stage.engines.processes[1].pid
        await stage.handles[1].call(EngineHost.dies_at, NAME)
        start = time.monotonic()
        with pytest.raises(WeightSyncError) as caught:
            await sync_weights(stage.trainer, stage.handles, 20, timeout_s=TIMEOUT_S)
        assert time.monotonic() - start < TIMEOUT_S
        assert caught.value.rank == 1
        assert str(pid) in str(caught.value)
        assert isinstance(caught.value.__cause__, WorkerDied)
        with pytest.raises(UserError, match="cannot compute with these weights"):
            await stage.handles[0].call(EngineHost.sing)

    asyncio.run(run())

    async def again() -> None:
        """What is left works on with a new engine."""
        await open_weight_sync(stage.trainer, stage.handles, timeout_s=TIMEOUT_S)
        await stage.trainer.call(TrainerHost.train, 2)
        await sync_weights(stage.trainer, stage.handles, 20, timeout_s=TIMEOUT_S)
        await stage.served(20)

    stage.engines.restart()
    asyncio.run(again())
