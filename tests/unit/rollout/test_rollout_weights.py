"""An engine's own weights: copied from the actor's, brought through its sink, given back, and never used when old."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quartet.config.common import LoRAConfig
from quartet.models.loading import packed_causal_lm
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.engine import NativeEngine, copy_packed_model
from quartet.rollout.protocol import Completion, Request
from quartet.weights.manifest import WeightsUnusable
from quartet.weights.sink import NamedSource, sync_in_process

Build = Callable[..., Any]
Make = Callable[..., Request]
RunAll = Callable[..., dict[str, Completion]]
LORA = LoRAConfig(rank=4, alpha=8)


def trained(packed: PackedCausalLM) -> dict[str, nn.Parameter]:
    return dict(packed.model.named_parameters()) if packed.adapters is None else packed.adapters.trained


@torch.no_grad()
def train(packed: PackedCausalLM, seed: int) -> None:
    """As an optimizer does: in place."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in trained(packed).values():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def source_of(trainer: PackedCausalLM) -> Iterator[tuple[str, Tensor]]:
    return ((name, parameter.detach()) for name, parameter in trained(trainer).items())


def requests_of(make_request: Make) -> list[Request]:
    return [make_request(f"r{i}", length=5 + i, seed=i, max_new_tokens=5) for i in range(5)]


def actor(tiny: Any, precision: Any = "fp32", lora: LoRAConfig | None = None) -> PackedCausalLM:
    tiny.packed.release()
    return packed_causal_lm(tiny.packed.model, precision=precision, lora=lora)


# An engine of its own computes as one that shares ---------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "precision", "lora"),
    [
        ("llama", "fp32", None),
        ("llama", "bf16", LORA),
        ("qwen2", "fp32", LORA),
        ("qwen2", "bf16", None),
        ("gemma2", "fp32", None),
        ("gemma2", "fp32", LORA),
        ("gemma2", "bf16", None),
        ("qwen2", "bf16", LORA),
    ],
)
def test_an_own_engine_gives_the_bits_of_one_that_shares(
    family: str, precision: Any, lora: Any, build_tiny: Build, make_request: Make, run_all: RunAll
) -> None:
    trainer = actor(build_tiny(family), precision, lora)
    own = copy_packed_model(trainer)
    shared = NativeEngine(trainer, max_running=4)
    apart = NativeEngine(own, owns_weights=True, max_running=4)
    sent = requests_of(make_request)
    with pytest.raises(WeightsUnusable, match="no weights yet"):
        apart.step()
    before: dict[str, Completion] | None = None
    for version in (1, 2, 3):
        train(trainer, version)
        shared.update_weights(None, version)
        apart.update_weights(source_of(trainer), version)
        expected = run_all(shared, sent)
        assert run_all(apart, sent) == expected
        assert before is None or before["r0"].logprobs != expected["r0"].logprobs
        assert {v for c in expected.values() for v in c.versions} == {version}
        before = expected
    apart.release_cache()
    assert run_all(apart, sent) == before


def test_requests_under_way_go_on_with_the_new_weights(tiny: Any, make_request: Make, run_all: RunAll) -> None:
    trainer = actor(tiny)
    shared, apart = NativeEngine(trainer), NativeEngine(copy_packed_model(trainer), owns_weights=True, version=0)
    for engine in (shared, apart):
        engine.submit(requests_of(make_request))
        for _ in range(3):
            engine.step()
    train(trainer, 1)
    shared.update_weights(None, 1)
    apart.update_weights(source_of(trainer), 1)
    expected = run_all(shared)
    assert run_all(apart) == expected
    assert all(set(c.versions) == {0, 1} for c in expected.values())


# What must not be served ----------------------------------------------------------------------------------


def test_nothing_is_computed_after_a_sync_that_failed_halfway(tiny: Any, make_request: Make, run_all: RunAll) -> None:
    trainer = actor(tiny)
    engine = NativeEngine(copy_packed_model(trainer), owns_weights=True, version=0)
    engine.submit(requests_of(make_request))
    engine.step()
    train(trainer, 1)

    def breaks_off() -> Iterator[tuple[str, Tensor]]:
        for number, pair in enumerate(source_of(trainer)):
            if number == 4 and reading:
                raise OSError("the trainer's disk is full")
            yield pair

    source, reading = NamedSource(breaks_off), []
    specs = source.specs()
    reading.append(True)
    source.specs = lambda: specs  # type: ignore[method-assign]
    with pytest.raises(OSError, match="disk is full"):
        sync_in_process(source, engine.weight_sink(), 1)
    with pytest.raises(WeightsUnusable, match="disk is full"):
        engine.step()
    assert engine.stats().policy_version == 0
    engine.update_weights(source_of(trainer), 1)
    assert len(run_all(engine)) == 5
    assert engine.stats().policy_version == 1


# Copies and memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_an_own_copy_shares_nothing(
    tiny: Any, lora: Any, make_request: Make, run_all: RunAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = actor(tiny, lora=lora)
    trainer.logit_scale = 0.5

    def probed(*_: object) -> None:
        raise AssertionError("probed again")

    monkeypatch.setattr("quartet.models.loading.probe", probed)
    copied = copy_packed_model(trainer)
    assert (copied.precision, copied.numerics, copied.logit_scale) == ("fp32", "fast", 0.5)
    assert copied.shares_prefixes == trainer.shares_prefixes
    places = {p.data_ptr() for p in trainer.model.parameters()}
    assert not places & {p.data_ptr() for p in copied.model.parameters()}
    assert not {id(m) for m in trainer.model.modules()} & {id(m) for m in copied.model.modules()}
    expected = run_all(NativeEngine(copied), requests_of(make_request))
    train(trainer, 1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(0.01)
    assert run_all(NativeEngine(copied), requests_of(make_request)) == expected
    assert any(p.requires_grad for p in trainer.model.parameters())
    with torch.no_grad():
        for parameter in copied.model.parameters():
            parameter.fill_(7.0)
    assert all(float(p.detach().max()) < 1 for p in trainer.model.parameters())
