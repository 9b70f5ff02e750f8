"""What every weight transport must do. A new one joins by an entry in ``tests/weight_ends.py``."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quartet.schedule import weight_sync
from quartet.schedule.weight_sync import open_weight_sync, sync_weights
from quartet.weights import sync
from quartet.weights.manifest import (
    WeightMismatch,
    WeightsRefused,
    WeightsUnusable,
    WeightSyncError,
    WeightSyncTimeout,
)
from quartet.weights.sink import NamedSource, SinkStatus, TensorSink

sys.path.append(str(Path(__file__).parents[1]))  # where processes of the tests find it, too
ends: Any = importlib.import_module("weight_ends")

KINDS: tuple[str, ...] = ends.KINDS


def weights(seed: int = 0) -> dict[str, Tensor]:
    """Every kind of tensor there is: odd sizes, several dtypes, a number, nothing at all, one larger than a bucket."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(5, 7, generator=generator),
        "a.bias": torch.randn(33, generator=generator).bfloat16(),
        "scale": torch.randn((), generator=generator),
        "nothing": torch.empty(0, 4),
        "large.weight": torch.randn(400, 700, generator=generator),
        "strided": torch.randn(6, 4, generator=generator).t(),
        "steps": torch.randint(0, 99, (3,), generator=generator),
        "flags": torch.rand(9, generator=generator) < 0.5,
        "half": torch.randn(3, 3, 3, generator=generator).half(),
        "double": torch.randn(2, generator=generator, dtype=torch.float64),
    }


def source_of(named: dict[str, Tensor]) -> NamedSource:
    return NamedSource(lambda: named.items())


class Ends:
    """A sender and its receivers over one transport."""

    def __init__(self, kind: str, sinks: Sequence[TensorSink], timeout_s: float) -> None:
        self.kind: Any = kind
        self.sinks = list(sinks)
        self.timeout_s = timeout_s
        self.sender = ends.Worker(ends.Sending({}))
        self.receivers = [self._worker(rank) for rank in range(len(sinks))]
        self._is_open = False

    def _worker(self, rank: int) -> Any:
        return ends.Worker(ends.Receiving(self.sinks[rank]), None if self.kind == "shared" else ends.ELSEWHERE[rank])

    def sync(self, source: NamedSource | None, version: int) -> None:
        """None: of the weights that the trainer has."""
        asyncio.run(self._sync(source, version))

    async def _sync(self, source: NamedSource | None, version: int) -> None:
        if not self._is_open:
            chosen = await open_weight_sync(self.sender, self.receivers, self.kind, timeout_s=self.timeout_s)
            assert chosen == self.kind
            self._is_open = True
        if source is not None:
            self.sender.host.weight_sender.source = source
        await sync_weights(self.sender, self.receivers, version, timeout_s=self.timeout_s)

    def failure(self, source: Any, version: int) -> BaseException:
        """What the sync raises."""
        with pytest.raises(BaseException) as caught:
            self.sync(source, version)
        return caught.value

    def replace(self, rank: int, sink: TensorSink) -> None:
        """Another receiver in the place of one; all ends are connected anew."""
        self.sinks[rank] = sink
        self.receivers[rank] = self._worker(rank)
        self._is_open = False

    def close(self) -> None:
        self.sender.host.weight_sender.disconnect()
        for worker in (self.sender, *self.receivers):
            worker.thread.shutdown()


Open = Callable[..., Ends]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


several = pytest.mark.parametrize("kind", ends.BETWEEN_PROCESSES, indirect=True)
"""Transports that lead to several engines."""


@pytest.fixture
def open_ends(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    monkeypatch.setattr(sync, "BUCKET_BYTES", ends.SMALL_BUCKETS)
    with contextlib.ExitStack() as stack:

        def opened(*sinks: TensorSink, timeout_s: float = 10.0) -> Ends:
            made = Ends(kind, sinks, timeout_s)
            stack.callback(made.close)
            return made

        yield opened


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


# What arrives --------------------------------------------------------------------------------------------


def test_weights_arrive_bit_for_bit_again_and_again(open_ends: Open) -> None:
    held = ends.empty_like(weights())
    committed: list[int] = []
    sink = TensorSink(held.items(), on_commit=committed.append)
    transport = open_ends(sink)
    assert sink.status is SinkStatus.EMPTY
    for version in (1, 2, 3):
        transport.sync(source_of(weights(version)), version)
        assert_equal(held, weights(version))
        assert (sink.version, sink.status) == (version, SinkStatus.READY)
        sink.require(version)
    assert committed == [1, 2, 3]


def test_strided_destinations_are_filled_where_they_are(open_ends: Open) -> None:
    """As an engine does that keeps its weights transposed."""
    new = {"w": torch.randn(40, 30), "b": torch.randn(8)}
    backing = torch.zeros(30, 40)
    held = {"w": backing.t(), "b": torch.zeros(16)[::2]}
    open_ends(TensorSink(held.items())).sync(source_of(new), 1)
    assert_equal(held, new)
    assert torch.equal(backing, new["w"].t())


def test_the_trainer_sends_the_engines_dtype(open_ends: Open) -> None:
    held = {"w": torch.zeros(3, 5, dtype=torch.bfloat16), "n": torch.zeros(2, dtype=torch.int64)}
    new = {"w": torch.randn(3, 5), "n": torch.tensor([4, 5])}
    transport = open_ends(TensorSink(held.items()))
    transport.sender = ends.Worker(ends.Sending(new))
    transport.sync(None, 1)
    assert_equal(held, {"w": new["w"].bfloat16(), "n": new["n"]})


# Weights that ranks hold between them --------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """Of a trainer, in processes of their own."""
    store = str(tmp_path_factory.mktemp("sharded") / "store")
    found = [ends.Process(ends.Trainer, rank, 4, store) for rank in range(4)]
    yield found
    for rank in found:
        rank.end()


@several
def test_weights_cut_by_tensor_ranks_and_by_fsdp_are_served_whole(kind: str, ranks: list[Any]) -> None:
    """All four ranks get every call; rank 0 sends."""
    whole = ends.layer_weights()
    held = ends.empty_like(whole)
    receiver = ends.Worker(ends.Receiving(TensorSink(held.items())))
    trainer: Any = ends.Ranks(ranks)

    async def run() -> None:
        await open_weight_sync(trainer, [receiver], kind, timeout_s=30)  # type: ignore[arg-type]
        await sync_weights(trainer, [receiver], 1, timeout_s=30)

    asyncio.run(run())
    assert_equal(held, whole)
    receiver.thread.shutdown()


# What does not fit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda w: w.pop("a.weight"), "nothing for 'a.weight'"),
        (lambda w: w.update({"a.weight": torch.zeros(7, 5)}), "'a.weight' F32 [7, 5], needed F32 [5, 7]"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_byte(
    open_ends: Open, change: Callable[[dict[str, Tensor]], Any], found: str
) -> None:
    held = ends.empty_like(weights())
    sink = TensorSink(held.items())
    transport = open_ends(sink)
    transport.sync(source_of(weights(1)), 1)
    wrong = weights(2)
    change(wrong)
    said = transport.failure(source_of(wrong), 2)
    assert isinstance(said, WeightsRefused) and found in said.found and said.rank == 0
    assert_equal(held, weights(1))
    sink.require(1)
    transport.sync(source_of(weights(2)), 2)
    assert_equal(held, weights(2))


class Counting(NamedSource):
    gathered = 0

    def tensors(self) -> Iterator[Tensor]:
        for tensor in super().tensors():
            self.gathered += 1
            yield tensor


class Refusing(TensorSink):
    def write(self, name: str, start: int, values: Tensor) -> None:
        raise WeightSyncError("the engine is full", found=name, remedy="none")


@pytest.mark.parametrize("sink", [Refusing(ends.empty_like(weights()).items()), TensorSink([("w", torch.zeros(1))])])
def test_a_sync_that_fails_takes_part_in_every_gather(open_ends: Open, sink: TensorSink) -> None:
    """The trainer's other ranks wait in their collectives for the one that sends."""
    source = Counting(lambda: weights().items())
    said = open_ends(sink, timeout_s=2.0).failure(source, 1)
    assert isinstance(said, WeightsRefused) or "the engine is full" in str(said)
    assert source.gathered == len(weights())


# What goes wrong -----------------------------------------------------------------------------------------


class Corrupting(TensorSink):
    """Something changes one bit of one tensor on its way."""

    victim: str | None = None

    def write(self, name: str, start: int, values: Tensor) -> None:
        if name == self.victim:
            values = values.clone()
            values.view(torch.uint8).view(-1)[3] ^= 0x80
            self.victim = None
        super().write(name, start, values)


def test_other_contents_are_an_error_that_names_the_tensor_and_both_digests(open_ends: Open) -> None:
    sink = Corrupting(ends.empty_like(weights()).items())
    transport = open_ends(sink)
    transport.sync(source_of(weights(1)), 1)
    sink.victim = "large.weight"
    said = transport.failure(source_of(weights(2)), 2)
    assert isinstance(said, WeightMismatch) and said.tensor == "large.weight" and said.rank == 0
    assert said.sent != said.arrived and said.sent in str(said) and said.arrived in str(said)
    with pytest.raises(WeightsUnusable, match="broke off halfway"):
        sink.require()
    transport.sync(source_of(weights(2)), 2)
    sink.require(2)


@several
def test_no_engine_serves_a_version_that_another_one_did_not_get(open_ends: Open) -> None:
    good, bad = (kind(ends.empty_like(weights()).items()) for kind in (TensorSink, Corrupting))
    transport = open_ends(good, bad)
    transport.sync(source_of(weights(1)), 1)
    bad.victim = "a.weight"
    said = transport.failure(source_of(weights(2)), 2)
    assert isinstance(said, WeightMismatch) and said.rank == 1
    assert good.status is bad.status is SinkStatus.UNUSABLE


class Failing(NamedSource):
    """Raises in place of the tensor ``at``, and counts what is asked of it afterwards."""

    def __init__(self, named: dict[str, Tensor], error: BaseException, at: int) -> None:
        super().__init__(lambda: named.items())
        self._error = error
        self._at = at

    def tensors(self) -> Iterator[Tensor]:
        for n, tensor in enumerate(super().tensors()):
            if n == self._at:
                raise self._error
            yield tensor


def test_a_sync_that_breaks_off_leaves_no_mixture(open_ends: Open) -> None:
    error = RuntimeError("the trainer broke")
    held = ends.empty_like(weights())
    sink = TensorSink(held.items())
    transport = open_ends(sink)
    transport.sync(source_of(weights(1)), 1)
    said = transport.failure(Failing(weights(2), error, at=8), 2)
    assert said is error or said.__cause__ is error
    mixed = any(not torch.equal(held[name], tensor) for name, tensor in weights(1).items())
    if sink.status is SinkStatus.READY:
        assert sink.version == 1 and not mixed
    else:
        assert sink.status is SinkStatus.UNUSABLE
    transport.sync(source_of(weights(2)), 2)
    assert_equal(held, weights(2))
    sink.require(2)


def test_an_end_that_does_not_answer_is_named(open_ends: Open, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync, "GRACE_S", 0.2)
    release = threading.Event()

    class Stuck(TensorSink):
        def verify(self, digests: Sequence[str]) -> None:
            release.wait(30)

    quick = [] if kind == "shared" else [TensorSink(ends.empty_like(weights()).items())]
    transport = open_ends(*quick, Stuck(ends.empty_like(weights()).items()), timeout_s=0.5)
    said = transport.failure(source_of(weights(1)), 1)
    release.set()
    assert isinstance(said, WeightSyncTimeout) and said.rank == len(quick)
    assert ("did not answer" if kind == "shared" else "did nothing for 0.5 s") in said.problem
    for sink in quick:
        assert sink.status is SinkStatus.UNUSABLE


@several
def test_a_receiver_that_was_lost_is_replaced(open_ends: Open) -> None:
    held = [ends.empty_like(weights()) for _ in range(3)]
    transport = open_ends(*(TensorSink(h.items()) for h in held[:2]))
    transport.sync(source_of(weights(1)), 1)
    transport.replace(1, TensorSink(held[2].items()))
    transport.sync(source_of(weights(2)), 2)
    assert_equal(held[0], weights(2))
    assert_equal(held[2], weights(2))
    assert_equal(held[1], weights(1))


@several
def test_a_sync_that_another_engine_refuses_takes_nothing_from_one_that_serves(open_ends: Open) -> None:
    held = [ends.empty_like(weights()) for _ in range(2)]
    sleeps = False

    class Sleeper(TensorSink):
        def begin(self, specs: Any, version: int) -> None:
            if sleeps:
                raise WeightsRefused("the engine sleeps", found="no room", remedy="wake it")
            super().begin(specs, version)

    transport = open_ends(TensorSink(held[0].items()), Sleeper(held[1].items()))
    transport.sync(source_of(weights(1)), 1)
    sleeps = True
    said = transport.failure(source_of(weights(2)), 2)
    assert isinstance(said, WeightsRefused) and said.rank == 1
    transport.sinks[0].require(1)
    assert_equal(held[0], weights(1))
    sleeps = False
    transport.sync(source_of(weights(2)), 2)
