"""Weight syncs between real processes: what arrives, and what is left when one of them is killed or stands still."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from quartet.schedule import weight_sync
from quartet.schedule.weight_sync import open_weight_sync, sync_weights
from quartet.weights import sync
from quartet.weights.digest import tensor_digest
from quartet.weights.manifest import WeightSyncError, WeightSyncTimeout
from quartet.weights.sink import NamedSource, SinkStatus, TensorSink

sys.path.append(str(Path(__file__).parents[1]))  # where processes of the tests find it, too
ends: Any = importlib.import_module("weight_ends")

BETWEEN = pytest.mark.parametrize("kind", ends.BETWEEN_PROCESSES)


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "BUCKET_BYTES", ends.SMALL_BUCKETS)


@pytest.fixture(scope="module")
def running() -> Iterator[list[Any]]:
    found = [ends.Process(ends.Engine) for _ in range(2)]
    try:
        yield found
    finally:
        for engine in found:
            engine.end()


@pytest.fixture
def engines(running: list[Any]) -> list[Any]:
    """Two engines that all tests use; one that a test killed is started again."""
    for rank, engine in enumerate(running):
        if not engine.lives:
            engine.end()
            running[rank] = ends.Process(ends.Engine)
    return running


class Sync:
    """A sender in this process and engines in others, over one transport."""

    def __init__(self, kind: str, engines: list[Any], timeout_s: float) -> None:
        self.engines = engines
        self.timeout_s = timeout_s
        self.trainer = ends.Worker(ends.Sending({}))
        asyncio.run(open_weight_sync(self.trainer, engines, kind, timeout_s=timeout_s))  # type: ignore[arg-type]

    def run(self, source: NamedSource, version: int) -> None:
        self.trainer.host.weight_sender.source = source
        asyncio.run(sync_weights(self.trainer, self.engines, version, timeout_s=self.timeout_s))


@contextlib.contextmanager
def connected(kind: str, engines: list[Any], *, timeout_s: float = 20.0) -> Iterator[Sync]:
    sync = Sync(kind, engines, timeout_s)
    try:
        yield sync
    finally:
        sync.trainer.host.weight_sender.disconnect()


def source_of(seed: int) -> NamedSource:
    weights = ends.layer_weights(seed)
    return NamedSource(lambda: weights.items())


def digests(seed: int) -> list[str]:
    return [tensor_digest(tensor) for tensor in ends.layer_weights(seed).values()]


class Interrupted(NamedSource):
    """Does something right before the third tensor."""

    def __init__(self, seed: int, before_third: Callable[[], Any]) -> None:
        weights = ends.layer_weights(seed)
        super().__init__(lambda: weights.items())
        self._before_third = before_third

    def tensors(self) -> Iterator[Tensor]:
        for n, tensor in enumerate(super().tensors()):
            if n == 2:
                self._before_third()
            yield tensor


THIRD = list(ends.layer_weights())[2]


def shared_memory_names() -> set[str]:
    return set(os.listdir("/dev/shm"))


@BETWEEN
def test_an_engine_killed_in_the_middle_is_named_and_replaced(kind: str, engines: list[Any]) -> None:
    before = shared_memory_names()
    for engine in engines:
        engine.ask("hold")
    with connected(kind, engines) as sync:
        sync.run(source_of(1), 1)
        begin = time.monotonic()

        def kill() -> None:
            os.kill(engines[1].pid, signal.SIGKILL)
            time.sleep(0.3)  # as long as a tensor takes that is not as small as these

        with pytest.raises(WeightSyncError, match="engine of rank 1") as caught:
            sync.run(Interrupted(2, kill), 2)
        assert time.monotonic() - begin < 8, "noticed by the process that ended, not by the time limit"
        assert caught.value.rank == 1
        assert kind == "collective" or caught.value.tensor in ends.layer_weights()
        state = engines[0].ask("state")
        if state["status"] == "ready":
            assert state == {"version": 1, "status": "ready", "digests": digests(1)}
        else:
            assert state["status"] == "unusable"
    engines[1].end()
    engines[1] = ends.Process(ends.Engine)
    engines[1].ask("hold")
    with connected(kind, engines) as sync:
        sync.run(source_of(3), 3)
        assert [engine.ask("state")["digests"] for engine in engines] == [digests(3)] * 2
    assert shared_memory_names() == before


@BETWEEN
def test_an_engine_that_stands_still_is_named_after_the_time_limit(
    kind: str, engines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_sync, "GRACE_S", 0.5)
    for engine in engines:
        engine.ask("hold")
    with connected(kind, engines, timeout_s=1.5) as sync:
        sync.run(source_of(1), 1)
        pid = engines[1].pid
        # A thread waits for the answer that does not come; it must not keep the driver's loop from ending.
        go_on = threading.Timer(6.0, os.kill, (pid, signal.SIGCONT))
        go_on.start()
        with pytest.raises(WeightSyncTimeout, match=r"rank 1 .*did nothing for 1.5 s") as caught:
            sync.run(Interrupted(2, lambda: os.kill(pid, signal.SIGSTOP)), 2)
        go_on.cancel()  # it must not wake an engine that the next test stops
        os.kill(pid, signal.SIGCONT)
        assert caught.value.rank == 1 and caught.value.tensor in ends.layer_weights()
        for engine in engines:
            engine.idle()
            state = engine.ask("state")
            assert state["status"] != "ready" or state["digests"] == digests(1)


@BETWEEN
def test_a_trainer_that_stands_still_is_named_with_the_tensor(kind: str, engines: list[Any]) -> None:
    for engine in engines:
        engine.ask("hold")
    with connected(kind, engines, timeout_s=0.6) as sync:
        sync.run(source_of(1), 1)
        with pytest.raises(WeightSyncTimeout, match=r"the sender of weights .*did nothing for 0.9 s") as caught:
            sync.run(Interrupted(2, lambda: time.sleep(2)), 2)
        assert caught.value.tensor == THIRD
        for engine in engines:
            state = engine.ask("state")
            assert state["status"] != "ready" or state["digests"] == digests(1)
        sync.run(source_of(2), 2)
        assert [engine.ask("state")["digests"] for engine in engines] == [digests(2)] * 2


@BETWEEN
def test_a_trainer_that_is_killed_is_noticed_and_leaves_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's rank 0 of one that shards over two ranks; rank 1 is killed with it."""
    before = shared_memory_names()
    ranks = [ends.Process(ends.Trainer, rank, 2, str(tmp_path / "store")) for rank in range(2)]

    class Killing(TensorSink):
        """Kills the trainer when the first tensor arrives."""

        def write(self, name: str, start: int, values: Tensor) -> None:
            for rank in ranks:
                os.kill(rank.pid, signal.SIGKILL)
            super().write(name, start, values)

    sink = Killing(ends.empty_like(ends.layer_weights()).items())
    receiver, trainer = ends.Worker(ends.Receiving(sink)), ends.Ranks(ranks)

    async def run() -> None:
        await open_weight_sync(trainer, [receiver], kind, timeout_s=30)  # type: ignore[arg-type]
        await sync_weights(trainer, [receiver], 1, timeout_s=30)

    try:
        begin = time.monotonic()
        with pytest.raises(WeightSyncError, match="the trainer failed") as caught:
            asyncio.run(run())
        assert time.monotonic() - begin < 20 and caught.value.tensor is not None
        assert sink.status is SinkStatus.UNUSABLE
    finally:
        for rank in ranks:
            rank.end()
    assert shared_memory_names() == before


def test_an_engine_that_is_dead_before_a_sync_is_named_at_once(engines: list[Any]) -> None:
    for engine in engines:
        engine.ask("hold")
    with connected("shared_memory", engines) as sync:
        sync.run(source_of(1), 1)
        os.kill(engines[1].pid, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(WeightSyncError) as caught:
            sync.run(source_of(2), 2)
        assert time.monotonic() - begin < 8 and caught.value.rank == 1
        assert engines[0].ask("state") == {"version": 1, "status": "ready", "digests": digests(1)}
