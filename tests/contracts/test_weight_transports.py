"""What every weight transport must do. A new one joins by an entry in ``tests/weight_ends.py``."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quartet.weights import (
    FusedProjection,
    Manifest,
    NamedSource,
    Receiver,
    Sender,
    SharedSender,
    Status,
    TensorSink,
    WeightMismatch,
    WeightSender,
    WeightsRefused,
    WeightsUnusable,
    WeightSyncError,
    WeightSyncTimeout,
)

ENDS = Path(__file__).parents[1] / "weight_ends.py"
_spec = importlib.util.spec_from_file_location("weight_ends", ENDS)
assert _spec is not None and _spec.loader is not None
ends: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ends)

KINDS: tuple[str, ...] = ends.KINDS


def weights(seed: int = 0) -> dict[str, Tensor]:
    """Every kind of tensor there is: odd sizes, several dtypes, a number, nothing at all, one larger than a bucket."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(5, 7, generator=generator),
        "a.bias": torch.randn(33, generator=generator).bfloat16(),
        "scale": torch.randn((), generator=generator),
        "nothing": torch.empty(0, 4),
        "large.weight": torch.randn(40, 50, generator=generator),
        "strided": torch.randn(6, 4, generator=generator).t(),
        "steps": torch.randint(0, 99, (3,), generator=generator),
        "flags": torch.rand(9, generator=generator) < 0.5,
        "half": torch.randn(3, 3, 3, generator=generator).half(),
        "double": torch.randn(2, generator=generator, dtype=torch.float64),
    }


def source_of(named: dict[str, Tensor]) -> NamedSource:
    return NamedSource(lambda: named.items())


@dataclass
class Ends:
    """A transport with its sinks; receivers run in threads."""

    sender: WeightSender
    sinks: Sequence[TensorSink]
    receivers: list[Receiver] = field(default_factory=list)

    def sync(self, source: Any, version: int) -> tuple[Manifest | BaseException, list[Manifest | BaseException]]:
        """What the sender gives or raises, and what each receiver does."""
        heard: list[Any] = [None] * len(self.receivers)

        def receive(rank: int) -> None:
            try:
                heard[rank] = self.receivers[rank].receive(self.sinks[rank])
            except BaseException as error:
                heard[rank] = error

        threads = [threading.Thread(target=receive, args=(rank,)) for rank in range(len(self.receivers))]
        for thread in threads:
            thread.start()
        said: Manifest | BaseException
        try:
            said = self.sender.send(source, version)
        except BaseException as error:
            said = error
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a receiver does not come to an end"
        return said, heard

    def synced(self, source: Any, version: int) -> Manifest:
        said, heard = self.sync(source, version)
        for result in (said, *heard):
            if isinstance(result, BaseException):
                raise result
        assert isinstance(said, Manifest) and all(manifest == said for manifest in heard)
        return said


Open = Callable[..., Ends]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_ends(kind: str, tmp_path: Path) -> Iterator[Open]:
    with contextlib.ExitStack() as stack:

        def opened(*sinks: TensorSink, timeout_s: float = 10.0, receiver_timeout_s: float | None = None) -> Ends:
            if kind == "shared":
                shared = SharedSender(sinks)
                stack.callback(shared.close)
                return Ends(shared, sinks)
            sender = Sender(ends.outlet(kind, tmp_path), num_receivers=len(sinks), timeout_s=timeout_s)
            stack.callback(sender.close)
            connecting = threading.Thread(target=sender.connect)
            connecting.start()
            limit = receiver_timeout_s or timeout_s
            receivers = [
                Receiver(ends.inlet(kind), str(sender.address), rank=rank, timeout_s=limit)
                for rank in reversed(range(len(sinks)))
            ][::-1]
            connecting.join()
            for receiver in receivers:
                stack.callback(receiver.close)
            return Ends(sender, sinks, receivers)

        yield opened


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


# What arrives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["in_place", "staged", "adopts"])
def test_weights_arrive_bit_for_bit_again_and_again(open_ends: Open, how: str) -> None:
    held = ends.empty_like(weights())
    committed: list[int] = []
    sink = TensorSink(held.items(), staged=how == "staged", adopts=how == "adopts", on_commit=committed.append)
    transport = open_ends(sink)
    assert sink.status is Status.EMPTY
    for version in (1, 2, 3):
        manifest = transport.synced(source_of(weights(version)), version)
        assert_equal(held, weights(version))
        assert (sink.version, sink.status, manifest.version) == (version, Status.READY, version)
        sink.require(version)
        sink.check_served(manifest)
    assert committed == [1, 2, 3]


def test_two_engines_get_the_same(open_ends: Open) -> None:
    held = [ends.empty_like(weights()) for _ in range(2)]
    transport = open_ends(*(TensorSink(h.items()) for h in held))
    for version in (1, 2):
        transport.synced(source_of(weights(version)), version)
        for h in held:
            assert_equal(h, weights(version))


def test_digests_do_not_depend_on_the_transport(open_ends: Open) -> None:
    transport = open_ends(TensorSink(ends.empty_like(weights()).items()))
    manifest = transport.synced(source_of(weights()), 1)
    alone = SharedSender([TensorSink(ends.empty_like(weights()).items())]).send(source_of(weights()), 7)
    assert (manifest.digests, manifest.digest) == (alone.digests, alone.digest)
    assert manifest.version == 1 and Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest


def test_strided_destinations_are_filled_where_they_are(open_ends: Open) -> None:
    """As an engine does that keeps its weights transposed."""
    new = {"w": torch.randn(40, 30), "b": torch.randn(8)}
    backing = torch.zeros(30, 40)
    held = {"w": backing.t(), "b": torch.zeros(16)[::2]}
    open_ends(TensorSink(held.items())).synced(source_of(new), 1)
    assert_equal(held, new)
    assert torch.equal(backing, new["w"].t())


def test_tied_weights_go_under_one_name(open_ends: Open) -> None:
    embed = nn.Parameter(torch.zeros(6, 4))
    new = torch.randn(6, 4)
    sink = TensorSink([("embed.weight", embed), ("lm_head.weight", embed)])
    transport = open_ends(sink)
    transport.synced(source_of({"lm_head.weight": new}), 1)
    assert torch.equal(embed, new)
    transport.synced(source_of({"embed.weight": 2 * new, "lm_head.weight": 2 * new}), 2)
    assert torch.equal(embed, 2 * new)


def test_the_source_sends_the_engines_dtype(open_ends: Open) -> None:
    held = {"w": torch.zeros(3, 5, dtype=torch.bfloat16), "n": torch.zeros(2, dtype=torch.int64)}
    new = {"w": torch.randn(3, 5), "n": torch.tensor([4, 5])}
    transport = open_ends(TensorSink(held.items()))
    transport.synced(NamedSource(lambda: new.items(), dtype=torch.bfloat16), 1)
    assert_equal(held, {"w": new["w"].bfloat16(), "n": new["n"]})


# A change of layout on the way ---------------------------------------------------------------------------


def split(fused: dict[str, Tensor]) -> dict[str, Tensor]:
    """The slow, obvious way."""
    parts = {}
    for name, tensor in fused.items():
        if "qkv_proj" in name:
            rows = {"q_proj": slice(0, 16), "k_proj": slice(16, 24), "v_proj": slice(24, 32)}
            parts |= {name.replace("qkv_proj", part): tensor[where].clone() for part, where in rows.items()}
        elif "gate_up_proj" in name:
            rows = {"gate_proj": slice(0, 22), "up_proj": slice(22, 44)}
            parts |= {name.replace("gate_up_proj", part): tensor[where].clone() for part, where in rows.items()}
        else:
            parts[name] = tensor.clone()
    return parts


@pytest.mark.parametrize("at", ["source", "sink", "both"])
def test_fused_projections_are_split_and_merged(open_ends: Open, at: str) -> None:
    whole = ends.fused_weights(3)
    fused_sink = at in ("sink", "both")
    held = ends.empty_like(whole if fused_sink else split(whole))
    sink = TensorSink(held.items(), fused=ends.FUSED if fused_sink else ())
    given = whole if at in ("source", "both") else split(whole)
    source = NamedSource(lambda: given.items(), fused=ends.FUSED if at in ("source", "both") else ())
    manifest = open_ends(sink).synced(source, 1)
    assert_equal(held, whole if fused_sink else split(whole))
    alone = SharedSender([TensorSink(ends.empty_like(split(whole)).items())]).send(source_of(split(whole)), 1)
    assert manifest.digest == alone.digest


def test_a_fused_projection_that_does_not_divide_is_refused(open_ends: Open) -> None:
    rule = FusedProjection("qkv_proj", ("q_proj", "k_proj", "v_proj"), (3, 1, 1))
    held = {"qkv_proj.weight": torch.zeros(10, 2)}
    transport = open_ends(TensorSink(held.items(), fused=(rule,)))
    said, _ = transport.sync(NamedSource(lambda: {"qkv_proj.weight": torch.ones(9, 2)}.items(), fused=(rule,)), 1)
    assert isinstance(said, WeightSyncError) and said.tensor == "qkv_proj.weight" and "9 rows" in said.found


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """Four ranks with weights sharded on two axes send them once over each transport, to a sink in this process."""
    folder = tmp_path_factory.mktemp("sharded")
    command = [sys.executable, str(ENDS), "trainer"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "4", str(folder / "store"), *KINDS], stdout=subprocess.PIPE, text=True, env=None
        )
        for rank in range(4)
    ]
    results: dict[str, dict[str, Any]] = {}
    try:
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            said = json.loads(line)
            if "address" in said:
                held = ends.empty_like(ends.fused_weights())
                sink = TensorSink(held.items(), fused=ends.FUSED)
                receiver = Receiver(ends.inlet(said["kind"]), said["address"], timeout_s=30)
                said["digest"] = receiver.receive(sink).digest
                said |= {"held": held, "status": str(sink.status)}
                receiver.close()
            results[said["kind"]] = said
        said_last = [rank.wait(60) for rank in ranks]
        assert said_last == [0, 0, 0, 0]
        yield results
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            if rank.stdout is not None:
                rank.stdout.close()


def test_weights_sharded_on_two_axes_are_served_unsharded(kind: str, sharded: dict[str, dict[str, Any]]) -> None:
    whole = ends.fused_weights()
    alone = SharedSender([TensorSink(ends.empty_like(split(whole)).items())]).send(source_of(split(whole)), 1)
    assert sharded[kind]["digest"] == alone.digest
    assert sharded[kind]["status"] == "ready"
    if kind != "shared":  # whose sink is in the trainer's process
        assert_equal(sharded[kind]["held"], whole)


# What does not fit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda w: w.pop("a.weight"), "nothing for 'a.weight'"),
        (lambda w: w.update(other=torch.zeros(1)), "unknown names, first 'other'"),
        (lambda w: w.update({"a.weight": torch.zeros(7, 5)}), "'a.weight' F32 [7, 5], needed F32 [5, 7]"),
        (lambda w: w.update({"a.bias": torch.zeros(33)}), "'a.bias' F32 [33], needed BF16 [33]"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_byte(
    open_ends: Open, change: Callable[[dict[str, Tensor]], Any], found: str
) -> None:
    held = ends.empty_like(weights())
    sink = TensorSink(held.items())
    transport = open_ends(sink)
    transport.synced(source_of(weights(1)), 1)
    wrong = weights(2)
    change(wrong)
    said, heard = transport.sync(source_of(wrong), 2)
    assert isinstance(said, WeightsRefused) and found in said.found
    assert all(isinstance(error, WeightsRefused) for error in heard)
    assert_equal(held, weights(1))
    sink.require(1)
    transport.synced(source_of(weights(2)), 2)
    assert_equal(held, weights(2))


class Counting(NamedSource):
    gathered = 0

    def tensors(self) -> Iterator[Tensor]:
        for tensor in super().tensors():
            self.gathered += 1
            yield tensor


def test_a_refused_sync_takes_part_in_every_gather(open_ends: Open) -> None:
    """The trainer's other ranks know nothing of the refusal and wait in their collectives."""
    transport = open_ends(TensorSink([("w", torch.zeros(1))]))
    source = Counting(lambda: weights().items())
    said, _ = transport.sync(source, 1)
    assert isinstance(said, WeightsRefused)
    assert source.gathered == len(weights())


def test_an_older_version_is_refused(open_ends: Open) -> None:
    sink = TensorSink(ends.empty_like(weights()).items())
    transport = open_ends(sink)
    transport.synced(source_of(weights()), 5)
    said, _ = transport.sync(source_of(weights()), 4)
    assert isinstance(said, WeightsRefused) and "version 4 after 5" in said.found
    sink.require(5)
    transport.synced(source_of(weights()), 5)


# What goes wrong -----------------------------------------------------------------------------------------


class Corrupting(TensorSink):
    """Something changes one bit of one tensor between its arrival and the check."""

    victim: str | None = None

    def arrived(self, name: str) -> None:
        if name == self.victim:
            self._change(name)
        super().arrived(name)

    def verify(self, manifest: Manifest) -> None:
        if self.victim is not None and self.victim not in self._found:
            self._change(self.victim)
        super().verify(manifest)

    def _change(self, name: str) -> None:
        self._targets[name].view(torch.uint8).view(-1)[3] ^= 0x80


def test_other_contents_are_an_error_that_names_the_tensor_and_both_digests(open_ends: Open) -> None:
    sink = Corrupting(ends.empty_like(weights()).items())
    transport = open_ends(sink)
    transport.synced(source_of(weights(1)), 1)
    sink.victim = "large.weight"
    said, heard = transport.sync(source_of(weights(2)), 2)
    assert isinstance(said, WeightMismatch) and said.tensor == "large.weight"
    assert said.sent != said.arrived and said.sent in str(said) and said.arrived in str(said)
    assert all(isinstance(error, WeightMismatch) for error in heard)
    with pytest.raises(WeightsUnusable, match="broke off halfway"):
        sink.require()
    sink.victim = None
    transport.synced(source_of(weights(2)), 2)
    sink.require(2)


def test_no_engine_serves_a_version_that_another_one_did_not_get(open_ends: Open) -> None:
    held = ends.empty_like(weights())
    good, bad = TensorSink(held.items(), staged=True), Corrupting(ends.empty_like(weights()).items())
    transport = open_ends(good, bad)
    transport.synced(source_of(weights(1)), 1)
    bad.victim = "a.weight"
    said, _ = transport.sync(source_of(weights(2)), 2)
    assert isinstance(said, WeightMismatch)
    good.require(1)
    assert_equal(held, weights(1))
    assert bad.status is Status.UNUSABLE


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


@pytest.mark.parametrize("error", [RuntimeError("the trainer broke"), KeyboardInterrupt("ctrl-c")], ids=repr)
@pytest.mark.parametrize("staged", [False, True], ids=["in_place", "staged"])
def test_a_sync_that_breaks_off_leaves_no_mixture(open_ends: Open, error: BaseException, staged: bool) -> None:
    held = ends.empty_like(weights())
    sink = TensorSink(held.items(), staged=staged)
    transport = open_ends(sink)
    transport.synced(source_of(weights(1)), 1)
    said, heard = transport.sync(Failing(weights(2), error, at=8), 2)
    assert said is error
    assert all(isinstance(result, WeightSyncError) and str(error) in str(result) for result in heard)
    mixed = any(not torch.equal(held[name], tensor) for name, tensor in weights(1).items())
    assert not (staged and mixed)
    if sink.status is Status.READY:
        assert sink.version == 1 and not mixed
    else:
        assert sink.status is Status.UNUSABLE and not staged
    transport.synced(source_of(weights(2)), 2)
    assert_equal(held, weights(2))
    sink.require(2)


class Hanging(NamedSource):
    def __init__(self, named: dict[str, Tensor], at: int) -> None:
        super().__init__(lambda: named.items())
        self._at = at
        self.go_on = threading.Event()

    def tensors(self) -> Iterator[Tensor]:
        for n, tensor in enumerate(super().tensors()):
            if n == self._at:
                self.go_on.wait(30)
            yield tensor


@pytest.mark.parametrize("kind", ends.BETWEEN_PROCESSES, indirect=True)
def test_a_sender_that_hangs_is_named_with_the_tensor(open_ends: Open) -> None:
    sink = TensorSink(ends.empty_like(weights()).items(), staged=True)
    transport = open_ends(sink, receiver_timeout_s=0.5)
    transport.synced(source_of(weights(1)), 1)
    source = Hanging(weights(2), at=6)
    failed: list[BaseException] = []

    def receive() -> None:
        try:
            transport.receivers[0].receive(sink)
        except WeightSyncError as error:
            failed.append(error)
        source.go_on.set()

    thread = threading.Thread(target=receive)
    thread.start()
    with pytest.raises(WeightSyncError, match=r"did nothing for 0\.5 s"):
        transport.sender.send(source, 2)
    thread.join()
    assert isinstance(failed[0], WeightSyncTimeout) and failed[0].rank == 0
    assert failed[0].tensor is not None and f"{failed[0].tensor!r}" in str(failed[0])
    sink.require(1)
    transport.synced(source_of(weights(2)), 2)


class Slow(TensorSink):
    """Does not come to an end when asked to take the tensor ``victim``, or to verify."""

    stop: threading.Event | None = None

    def _pause(self) -> None:
        if self.stop is not None:
            self.stop.wait(30)

    def write(self, name: str, start: int, values: Tensor) -> None:
        if name == "large.weight":
            self._pause()
        super().write(name, start, values)


@pytest.mark.parametrize("patience_s", [10.0, 1.0])
@pytest.mark.parametrize("kind", ends.BETWEEN_PROCESSES, indirect=True)
def test_a_receiver_that_hangs_is_named(open_ends: Open, kind: str, patience_s: float) -> None:
    """Also where another one gets tired of waiting before the sender does."""
    quick, slow = (TensorSink(ends.empty_like(weights()).items()), Slow(ends.empty_like(weights()).items()))
    transport = open_ends(quick, slow, timeout_s=1.0, receiver_timeout_s=patience_s)
    transport.synced(source_of(weights(1)), 1)
    slow.stop = threading.Event()
    results: list[Any] = [None, None]

    def receive(rank: int) -> None:
        try:
            results[rank] = transport.receivers[rank].receive(transport.sinks[rank])
        except WeightSyncError as error:
            results[rank] = error

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    with pytest.raises(WeightSyncTimeout) as caught:
        transport.sender.send(source_of(weights(2)), 2)
    slow.stop.set()
    for thread in threads:
        thread.join(30)
    assert caught.value.rank == 1 and "rank 1" in str(caught.value)
    if kind in ("cuda_ipc", "collective"):  # whose receivers take the data piece by piece
        assert caught.value.tensor == "large.weight"
    assert all(isinstance(result, WeightSyncError) for result in results)
    assert quick.status is not Status.READY and slow.status is Status.UNUSABLE
    with pytest.raises(WeightSyncError, match=r"no connection to rank 1"):
        transport.sender.send(source_of(weights(2)), 2)


@pytest.mark.parametrize("kind", ends.BETWEEN_PROCESSES, indirect=True)
def test_a_receiver_that_was_lost_is_replaced(open_ends: Open, kind: str) -> None:
    held = ends.empty_like(weights())
    stays, leaves = TensorSink(held.items()), TensorSink(ends.empty_like(weights()).items())
    transport = open_ends(stays, leaves)
    transport.synced(source_of(weights(1)), 1)
    transport.receivers[1].close()
    assert isinstance(transport.sender, Sender)
    with pytest.raises(WeightSyncError, match=r"no connection to rank 1"):
        transport.sender.send(source_of(weights(2)), 2)
    connecting = threading.Thread(target=transport.sender.connect)
    connecting.start()
    transport.receivers[1] = Receiver(ends.inlet(kind), transport.sender.address, rank=1, timeout_s=10)
    connecting.join()
    transport.synced(source_of(weights(2)), 2)
    assert_equal(held, weights(2))
    transport.receivers[1].close()


@pytest.mark.parametrize("kind", ["shared_memory"], indirect=True)
def test_who_was_given_up_on_keeps_its_weights_whole(open_ends: Open, kind: str) -> None:
    """An engine that lives on behind a lost connection still reads the memory that it adopted."""
    lost = ends.empty_like(weights())
    transport = open_ends(TensorSink(lost.items(), adopts=True))
    transport.synced(source_of(weights(1)), 1)
    transport.receivers[0]._link.channel.close()
    assert isinstance(transport.sender, Sender)
    connecting = threading.Thread(target=transport.sender.connect)
    connecting.start()
    held = ends.empty_like(weights())
    receiver = Receiver(ends.inlet(kind), transport.sender.address, timeout_s=10)
    connecting.join()
    Ends(transport.sender, [TensorSink(held.items(), adopts=True)], [receiver]).synced(source_of(weights(2)), 2)
    assert_equal(held, weights(2))
    assert_equal(lost, weights(1))
    receiver.close()
