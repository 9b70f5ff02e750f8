"""Weight syncs between real processes: what arrives, and what is left when one of them is killed or stands still."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from quartet.weights import (
    Hasher,
    NamedSource,
    Receiver,
    Sender,
    Status,
    TensorSink,
    WeightSyncError,
    WeightSyncTimeout,
)

ENDS = Path(__file__).parents[1] / "weight_ends.py"
_spec = importlib.util.spec_from_file_location("weight_ends", ENDS)
assert _spec is not None and _spec.loader is not None
ends: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ends)

IN_PIECES = ("shared_memory", "cuda_ipc", "collective")
"""Transports over which half a sync can be in the receiver's memory."""


class EngineProcess:
    """One ``weight_ends.py engine``."""

    def __init__(self) -> None:
        command = [sys.executable, str(ENDS), "engine"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self.heard()["pid"]

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def tell(self, do: str, **fields: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._process.stdin.flush()

    def heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the engine's process ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        self.tell(do, **fields)
        return self.heard()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture(scope="module")
def running() -> Iterator[list[EngineProcess]]:
    found = [EngineProcess() for _ in range(2)]
    try:
        yield found
    finally:
        for engine in found:
            engine.end()


@pytest.fixture
def engines(running: list[EngineProcess]) -> list[EngineProcess]:
    """Two engines that all tests use; one that a test killed is started again."""
    for rank, engine in enumerate(running):
        if not engine.lives:
            engine.end()
            running[rank] = EngineProcess()
    return running


@contextlib.contextmanager
def connected(
    kind: str, engines: list[EngineProcess], folder: Path, *, timeout_s: float = 20.0, engine_timeout_s: float = 20.0
) -> Iterator[Sender]:
    sender = Sender(ends.outlet(kind, folder), num_receivers=len(engines), timeout_s=timeout_s)
    try:
        join(kind, sender, dict(enumerate(engines)), engine_timeout_s)
        yield sender
    finally:
        sender.close()


def join(kind: str, sender: Sender, engines: dict[int, EngineProcess], timeout_s: float) -> None:
    for rank, engine in engines.items():
        engine.tell("connect", kind=kind, address=str(sender.address), rank=rank, timeout_s=timeout_s)
    sender.connect()
    for engine in engines.values():
        assert engine.heard() == {}


def sync(sender: Sender, engines: list[EngineProcess], source: Any, version: int) -> list[dict[str, Any]]:
    """What the engines say of a sync that goes well."""
    for engine in engines:
        engine.tell("receive")
    manifest = sender.send(source, version)
    heard = [engine.heard() for engine in engines]
    assert heard == [{"digest": manifest.digest, "version": version}] * len(engines)
    return heard


def source_of(seed: int) -> NamedSource:
    weights = ends.fused_weights(seed)
    return NamedSource(lambda: weights.items())


def digests(seed: int) -> list[str]:
    return Hasher().digests(list(ends.fused_weights(seed).values()))


class Interrupted(NamedSource):
    """Does something right before the third tensor."""

    def __init__(self, seed: int, before_third: Callable[[], Any]) -> None:
        weights = ends.fused_weights(seed)
        super().__init__(lambda: weights.items())
        self._before_third = before_third

    def tensors(self) -> Iterator[Tensor]:
        for n, tensor in enumerate(super().tensors()):
            if n == 2:
                self._before_third()
            yield tensor


THIRD = list(ends.fused_weights())[2]


def shared_memory_names() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.parametrize("kind", ends.BETWEEN_PROCESSES)
@pytest.mark.parametrize("how", ["in_place", "staged", "adopts"])
def test_engines_in_other_processes_serve_what_was_sent(
    kind: str, how: str, engines: list[EngineProcess], tmp_path: Path
) -> None:
    before = shared_memory_names()
    for engine in engines:
        engine.ask("hold", staged=how == "staged", adopts=how == "adopts")
    with connected(kind, engines, tmp_path) as sender:
        for version in (1, 2):
            sync(sender, engines, source_of(version), version)
            expected = {"version": version, "status": "ready", "digests": digests(version)}
            assert [engine.ask("state") for engine in engines] == [expected, expected]
    assert shared_memory_names() == before


@pytest.mark.parametrize("kind", IN_PIECES)
@pytest.mark.parametrize("staged", [False, True], ids=["in_place", "staged"])
def test_an_engine_killed_in_the_middle_is_named_and_replaced(
    kind: str, staged: bool, engines: list[EngineProcess], tmp_path: Path
) -> None:
    before = shared_memory_names()
    for engine in engines:
        engine.ask("hold", staged=staged)
    with connected(kind, engines, tmp_path) as sender:
        sync(sender, engines, source_of(1), 1)
        for engine in engines:
            engine.tell("receive")
        begin = time.monotonic()

        def kill() -> None:
            os.kill(engines[1].pid, signal.SIGKILL)
            time.sleep(0.3)  # as long as a tensor takes that is not as small as these

        with pytest.raises(WeightSyncError, match=f"rank 1 .process {engines[1].pid} ") as caught:
            sender.send(Interrupted(2, kill), 2)
        assert time.monotonic() - begin < 5, "noticed by the closed connection, not by the time limit"
        assert caught.value.rank == 1 and caught.value.tensor in list(ends.fused_weights())[2:]
        assert "gave up the weight sync" in engines[0].heard()["text"]
        state = engines[0].ask("state")
        if staged or state["status"] == "ready":
            assert state == {"version": 1, "status": "ready", "digests": digests(1)}
        else:
            assert state["status"] == "unusable"
        engines[1].end()
        engines[1] = EngineProcess()
        engines[1].ask("hold", staged=staged)
        join(kind, sender, {1: engines[1]}, 20.0)
        sync(sender, engines, source_of(3), 3)
        assert [engine.ask("state")["digests"] for engine in engines] == [digests(3)] * 2
    assert shared_memory_names() == before


@pytest.mark.parametrize("kind", IN_PIECES)
def test_an_engine_that_stands_still_is_named_after_the_time_limit(
    kind: str, engines: list[EngineProcess], tmp_path: Path
) -> None:
    for engine in engines:
        engine.ask("hold")
    with connected(kind, engines, tmp_path, timeout_s=1.5) as sender:
        sync(sender, engines, source_of(1), 1)
        for engine in engines:
            engine.tell("receive")
        pid = engines[1].pid
        try:
            with pytest.raises(WeightSyncTimeout, match=f"did nothing for 1.5 s: rank 1 .process {pid} ") as caught:
                sender.send(Interrupted(2, lambda: os.kill(pid, signal.SIGSTOP)), 2)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert caught.value.rank == 1
        for engine in engines:
            assert engine.heard()["error"] == "WeightSyncError"
            state = engine.ask("state")
            assert state["status"] == "unusable" or state["digests"] == digests(1)


@pytest.mark.parametrize("kind", ends.BETWEEN_PROCESSES)
def test_a_trainer_that_stands_still_is_named_with_the_tensor(
    kind: str, engines: list[EngineProcess], tmp_path: Path
) -> None:
    for engine in engines:
        engine.ask("hold", staged=True)
    with connected(kind, engines, tmp_path, engine_timeout_s=0.7) as sender:
        sync(sender, engines, source_of(1), 1)
        for engine in engines:
            engine.tell("receive")
        heard: list[dict[str, Any]] = []
        with pytest.raises(WeightSyncError, match="did nothing for 0"):
            sender.send(Interrupted(2, lambda: heard.extend(engine.heard() for engine in engines)), 2)
        for answer in heard:
            assert answer["error"] == "WeightSyncTimeout" and answer["rank"] == 0
            assert answer["tensor"] == THIRD or (kind == "collective" and answer["tensor"] is not None)
        expected = {"version": 1, "status": "ready", "digests": digests(1)}
        assert [engine.ask("state") for engine in engines] == [expected, expected]
        sync(sender, engines, source_of(2), 2)


@pytest.mark.parametrize("kind", ["shared_memory", "collective"])
def test_a_trainer_that_is_killed_is_noticed_and_leaves_nothing(kind: str, tmp_path: Path) -> None:
    """The trainer's rank 0 of one that shards over two ranks; rank 1 is killed with it."""
    before = shared_memory_names()
    command = [sys.executable, str(ENDS), "trainer"]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", str(tmp_path / "store"), kind], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]

    class Killing(TensorSink):
        """Kills the trainer when the first tensor arrives."""

        def arrived(self, name: str) -> None:
            self.strike()

        def write(self, name: str, start: int, values: Tensor) -> None:
            super().write(name, start, values)
            self.strike()

        def strike(self) -> None:
            for rank in ranks:
                rank.kill()

    try:
        assert ranks[0].stdout is not None
        address = json.loads(ranks[0].stdout.readline())["address"]
        receiver = Receiver(ends.inlet(kind), address, timeout_s=30)
        sink = Killing(ends.empty_like(ends.fused_weights()).items(), fused=ends.FUSED)
        begin = time.monotonic()
        with pytest.raises(WeightSyncError, match="is gone") as caught:
            receiver.receive(sink)
        assert time.monotonic() - begin < 20 and caught.value.tensor is not None
        assert sink.status is Status.UNUSABLE
        receiver.close()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            assert rank.stdout is not None
            rank.stdout.close()
    assert shared_memory_names() == before


def test_a_gather_that_a_rank_misses_ends_with_its_name(tmp_path: Path) -> None:
    command = [sys.executable, str(ENDS), "gather"]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        assert ranks[0].stdout is not None
        said: list[str] = []
        reading = threading.Thread(target=lambda: said.append(ranks[0].stdout.readline()))  # type: ignore[union-attr]
        reading.start()
        reading.join(90)
        answer = json.loads(said[0])
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            assert rank.stdout is not None
            rank.stdout.close()
    names = list(ends.fused_weights())
    assert (answer["error"], answer["rank"], answer["tensor"]) == ("WeightSyncTimeout", 1, names[1])
    assert f"rank 1 is at '{names[0]}'" in answer["found"]
