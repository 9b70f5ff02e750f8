"""Weights in shared memory: equal bits in every engine, update after update; never half of one."""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quartet.config.common import LoRAConfig
from quartet.models.loading import load_causal_lm, packed_causal_lm
from quartet.rollout.engine import NativeEngine, copy_packed_model
from quartet.rollout.process import EngineProcess
from quartet.rollout.protocol import Completion, EngineFailed, FinishReason, Request, SamplingParams
from quartet.rollout.staging import StagedWeights
from quartet.weights.manifest import WeightMismatch, WeightsRefused, WeightsUnusable
from quartet.weights.sink import NamedSource, TensorSink, write_weights

targets: Any = importlib.import_module("engine_targets")
LORA = {"rank": 4, "alpha": 8}


def named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return list(model.named_parameters(remove_duplicate=False))


@torch.no_grad()
def train(tensors: list[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.add_(0.02 * torch.randn(tensor.shape, generator=generator))


def send(pairs: list[tuple[str, Tensor]], sinks: list[TensorSink], version: int) -> None:
    for sink in sinks:
        write_weights(sink, pairs, version)


def requests(number: int) -> list[Request]:
    return [
        Request(f"{number}-{i}", f"{number}", (5, 9, 2), SamplingParams(max_new_tokens=9, seed=i)) for i in range(3)
    ]


def answers(engine: Any, asked: list[Request]) -> dict[str, Completion]:
    engine.submit(asked)
    done: dict[str, Completion] = {}
    while len(done) < len(asked):
        made = engine.step() if isinstance(engine, NativeEngine) else engine.completed(5.0)
        done |= {completion.request_id: completion for completion in made}
    return done


# The memory ------------------------------------------------------------------------------------------------


def test_another_reader_sees_what_was_committed_each_tensor_once(tmp_path: Path) -> None:
    targets.build_model(is_tied=True).save_pretrained(tmp_path)
    staging = StagedWeights(named(load_causal_lm(str(tmp_path), empty=True)))
    source = targets.build_model(3, is_tied=True)
    send(list(source.named_parameters()), [staging.weight_sink()], 5)
    assert staging.version == 5
    handle = pickle.loads(pickle.dumps(staging.handle))
    read = dict(handle)
    assert handle.ties == (("lm_head.weight", "model.embed_tokens.weight"),)
    assert list(read) == [name for name, _ in source.named_parameters()]
    assert all(torch.equal(read[name], parameter) for name, parameter in source.named_parameters())
    staging.close()
    staging.close()


def test_it_holds_the_engines_dtype_and_refuses_another_model() -> None:
    model = targets.build_model()
    staging = StagedWeights(named(model), torch.bfloat16)
    send(named(model), [staging.weight_sink()], 1)
    read = dict(staging.handle)
    assert all(torch.equal(read[name], parameter.bfloat16()) for name, parameter in named(model))
    wrong = [(name, tensor[:1] if name == "lm_head.weight" else tensor) for name, tensor in named(model)]
    with pytest.raises(WeightsRefused, match=r"lm_head\.weight"):
        send(wrong, [staging.weight_sink()], 2)
    assert staging.version == 1


# Engines ---------------------------------------------------------------------------------------------------


class Pair:
    """A trainer, and two engines for its weights: in this process, and in one of its own that begins with others."""

    def __init__(self, kind: str) -> None:
        lora, is_tied = (LORA, False) if kind == "adapters" else (None, kind == "tied")
        config = LoRAConfig(**LORA) if lora is not None else None
        self.trainer = packed_causal_lm(targets.build_model(1, is_tied=is_tied), lora=config)
        # Adapters come without their base, which is the engines' own.
        begins = {"seed": 1 if lora is not None else 3, "is_tied": is_tied, "lora": lora}
        model = self.trainer.model
        self.sent = list(model.named_parameters()) if lora is None else list(self.trainer.adapters.trained.items())
        self.staging = StagedWeights(named(model) if lora is None else self.sent)
        self.here = NativeEngine(copy_packed_model(self.trainer), owns_weights=True, max_running=8)
        self.apart = EngineProcess(targets.spec(kwargs=begins, name=kind), self.staging)


@pytest.fixture(scope="module")
def pairs() -> Iterator[dict[str, Pair]]:
    """Of all kinds: their processes start side by side."""
    before = set(os.listdir("/dev/shm"))
    made = {kind: Pair(kind) for kind in ("untied", "tied", "adapters")}
    yield made
    for pair in made.values():
        pair.apart.close()
        pair.staging.close()
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.parametrize("kind", ["untied", "tied", "adapters"])
def test_updates_give_the_bits_of_the_engine_in_this_process(kind: str, pairs: dict[str, Pair]) -> None:
    """Tokens, log-probabilities and versions."""
    pair = pairs[kind]
    early = requests(99)
    pair.apart.submit(early)
    with pytest.raises(WeightsUnusable, match="no weights yet"):
        pair.apart.completed(0.1)
    pair.apart.cancel([request.request_id for request in early])
    seen = set()
    for version in range(6):
        train([tensor for _, tensor in pair.sent], version)
        send(pair.sent, [pair.here.weight_sink(), pair.apart.weight_sink()], version)
        if version == 0:
            assert {made.finish_reason for made in pair.apart.completed(5.0)} == {FinishReason.CANCELLED}
        expected, found = answers(pair.here, requests(version)), answers(pair.apart, requests(version))
        assert found == expected
        assert all(set(made.versions) == {version} for made in found.values())
        seen.add(found[f"{version}-0"].logprobs)
    assert len(seen) == 6, "the weights did change"
    assert pair.staging.handle.num_bytes < (20_000 if kind == "adapters" else 200_000)


def break_off(sink: TensorSink, source: NamedSource, version: int) -> None:
    """A sync whose digests are wrong."""
    specs = source.specs()
    sink.begin(specs, version)
    for spec, tensor in zip(specs, source.tensors(), strict=True):
        sink.write(spec.name, 0, tensor.view(-1))
    with pytest.raises(WeightMismatch):
        sink.verify(["0" * 16] * len(specs))
    sink.abort("digests differ")


def test_an_engine_without_whole_weights_never_answers() -> None:
    """One fails to take version 2, and again after it was started anew; one is started after a sync broke off."""
    staging = StagedWeights([("weight", torch.ones(4))])
    sink = staging.weight_sink()

    def pairs_of(value: float) -> list[tuple[str, Tensor]]:
        return [("weight", torch.full((4,), value))]

    bad, good = (
        EngineProcess(targets.spec("engine_faults:scripted", kwargs=kwargs, name=name), staging)
        for name, kwargs in (("bad", {"fault": "fails to load", "after": 2}), ("good", {}))
    )
    for engine in (bad, good):
        engine.wait_ready()
    for version in range(3):
        send(pairs_of(version), [sink], version)
    assert all(set(made.versions) == {2} for made in answers(good, requests(0)).values())
    for _ in range(2):
        with pytest.raises(EngineFailed, match="the planted error of an update"):
            bad.submit(requests(0))
    bad.restart()
    with pytest.raises(EngineFailed, match="the planted error of an update"):
        bad.wait_ready()
    bad.close()

    break_off(sink, NamedSource(lambda: pairs_of(3.0)), 3)
    good.restart()
    good.wait_ready()
    good.submit(requests(1))
    with pytest.raises(WeightsUnusable, match="broke off halfway"):
        good.completed(1.0)
    send(pairs_of(4.0), [sink], 4)
    done: list[Completion] = []
    while len(done) < 3:
        done += good.completed(5.0)
    assert all(set(made.versions) == {4} for made in done)
    good.close()


def test_weights_that_come_in_its_sleep_are_taken_before_it_goes_on(pairs: dict[str, Pair]) -> None:
    """It has no room for them then; asked to sleep or wake twice it does so once."""
    pair = pairs["tied"]
    pair.apart.pause()
    asked = requests(0)
    pair.apart.submit(asked)
    for level in (1, 2):
        pair.apart.sleep(level)
    version = (pair.staging.version or 0) + 1
    train([tensor for _, tensor in pair.sent], version)
    send(pair.sent, [pair.here.weight_sink(), pair.apart.weight_sink()], version)
    assert not pair.apart.has_weights()
    for _ in range(2):
        pair.apart.wake()
    pair.apart.resume()
    found: dict[str, Completion] = {}
    while len(found) < len(asked):
        found |= {made.request_id: made for made in pair.apart.completed(5.0)}
    assert found == answers(pair.here, asked)
    assert all(set(made.versions) == {version} for made in found.values())
