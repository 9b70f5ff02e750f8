"""Copies for engine steps: the same numbers, always of the present weights, never seen outside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quartet.config.common import LoRAConfig
from quartet.config.plugins import weight_forms
from quartet.models.attention import PackedAttention
from quartet.models.loading import packed_causal_lm
from quartet.models.memory import drop_derived
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.compute_dtype_weights import ComputeWeights
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Completion, Request

Make = Callable[..., Request]
RunAll = Callable[..., dict[str, Completion]]
TOKENS = torch.arange(3, 43)


def logits(packed: PackedCausalLM) -> torch.Tensor:
    with torch.no_grad():
        hidden = packed.hidden(TOKENS, torch.arange(40), PackedAttention([40]))
        return packed.logits(hidden)


def places(weights: ComputeWeights) -> list[int]:
    """Where the dense copies lie."""
    return [tensor.data_ptr() for one in weights._copies or () for tensor in one.tensors]


@pytest.fixture
def formed() -> None:
    """In fp32 a plug-in alone has copies."""
    if not weight_forms():
        pytest.skip("no plug-in has a weight form")


def test_logits_have_the_same_bits_with_copies(family: Any) -> None:
    """The copies are those that autocast makes."""
    family.packed.release()
    packed = PackedCausalLM(copy.deepcopy(family.twin), "bf16")
    expected = logits(packed)
    weights = ComputeWeights(packed)
    with weights.active():
        assert torch.equal(logits(packed), expected)
    assert weights.num_bytes > 0
    assert torch.equal(logits(packed), expected)


@pytest.mark.usefixtures("formed")
def test_the_model_is_itself_again_after_an_error(tiny: Any) -> None:
    before = {n: p for n, p in tiny.packed.model.named_parameters()}
    weights = ComputeWeights(tiny.packed)
    with pytest.raises(ZeroDivisionError), weights.active():
        assert any(p is not before[n] for n, p in tiny.packed.model.named_parameters())
        _ = 1 / 0
    assert all(p is before[n] for n, p in tiny.packed.model.named_parameters())


@pytest.mark.usefixtures("formed")
@pytest.mark.parametrize("how", ["in place", "behind autograd's back", "released"])
def test_copies_follow_the_weights(tiny: Any, tolerances: Any, how: str) -> None:
    weights = ComputeWeights(tiny.packed)
    with weights.active():
        old = logits(tiny.packed)
    before = places(weights)
    with torch.no_grad():
        for parameter in tiny.packed.model.parameters():
            if how == "in place":
                parameter.mul_(1.1)
            else:
                parameter.data.mul_(1.1)
    if how == "released":
        weights.release()
    elif how != "in place":
        weights.refresh()
    expected = logits(tiny.packed)
    with weights.active():
        found = logits(tiny.packed)
    atol, rtol = tolerances[torch.float32]
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)
    assert not torch.allclose(old, expected, atol=1e-3)
    if how != "released":
        assert places(weights) == before


def test_own_weights_are_not_held_twice(build_tiny: Callable[..., Any], make_request: Make, run_all: RunAll) -> None:
    """An engine with a model of its own changes the form of its weights; a tied head alone is copied."""
    for name, num_copied in (("llama", 0), ("qwen2", 97 * 48 * 2)):
        shared = NativeEngine(PackedCausalLM(copy.deepcopy(build_tiny(name).twin), "bf16"))
        own = NativeEngine(PackedCausalLM(copy.deepcopy(build_tiny(name).twin), "bf16"), owns_weights=True, version=0)
        requests = [make_request(f"r{i}", length=9 + i, seed=i, max_new_tokens=9) for i in range(5)]
        expected = run_all(shared, requests)
        assert run_all(own, requests) == expected
        assert own._weights.num_bytes == num_copied
        # The engine casts what it is given to what it computes with.
        own.update_weights(build_tiny(name).twin.named_parameters(), 0)
        assert run_all(own, requests) == expected
        own.release_cache()
        own.update_weights(build_tiny(name).twin.named_parameters(), 0)
        assert run_all(own, requests) == expected


def test_exact_numerics_compute_with_the_trainers_own_weights(tiny: Any) -> None:
    tiny.packed.numerics = "exact"
    weights = ComputeWeights(tiny.packed)
    with weights.active():
        assert weights.num_bytes == 0


@pytest.mark.usefixtures("formed")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=4, alpha=8)])
def test_what_an_update_makes_stale_is_dropped_before_it(build_tiny: Any, precision: Any, lora: Any) -> None:
    """Copies of what an adapted model never trains stay; all others come back with the weights of then."""
    model = build_tiny("qwen2").packed.release()
    packed = packed_causal_lm(model, precision=precision, lora=lora)
    weights = ComputeWeights(packed)
    with weights.active():
        before, num_bytes = logits(packed), weights.num_bytes
    kept = sum(one.num_bytes for one in weights._copies or () if not one.is_trained)
    assert (kept > 0) == (lora is not None)
    drop_derived(packed.model)
    assert weights.num_bytes == kept < num_bytes
    with weights.active():
        assert torch.equal(logits(packed), before)
        assert weights.num_bytes == num_bytes
    drop_derived(packed.model)
    with torch.no_grad():
        for parameter in packed.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    fresh = ComputeWeights(packed)
    with weights.active():
        found = logits(packed)
    with fresh.active():
        assert torch.equal(logits(packed), found)
    assert not torch.equal(found, before)
