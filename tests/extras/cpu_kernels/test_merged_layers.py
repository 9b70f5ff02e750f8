"""Decoder layers as few operations: what they are found in, that they agree, and that nothing of them stays behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from quartet.extras.cpu_kernels import merged_layers
from quartet.extras.cpu_kernels.merged_layers import MergedLayer, MergedLayers
from quartet.models.attention import PackedAttention
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.compute_dtype_weights import ComputeWeights
from quartet.rollout.protocol import Completion, Request

Build = Callable[..., Any]
COMMON = ("llama", "qwen2", "qwen3", "mistral")
OTHERS = {"gemma2": 0, "gemma3": 0, "gpt_neox": 0, "olmo2": 0, "phi3": 0, "qwen3_moe": 1}
"""How many layers are merged all the same: a mixture of experts has a dense one."""
TOKENS = torch.arange(3, 43)


def hidden(packed: PackedCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return packed.hidden(TOKENS, torch.arange(40), PackedAttention([9, 31]))


def decoder_layers(packed: PackedCausalLM) -> list[nn.Module]:
    return [m for m in packed.body.modules() if isinstance(m, GradientCheckpointingLayer)]


def num_merged(weights: ComputeWeights) -> int:
    return sum(isinstance(one, MergedLayer) for one in weights._copies or ())


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("name", COMMON)
def test_common_layers_are_merged_and_agree(
    name: str, blocked: bool, build_architecture: Build, tolerances: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if blocked:
        monkeypatch.setattr(merged_layers, "MIN_PACKED", 1)
    packed = PackedCausalLM(build_architecture(name))
    expected = hidden(packed)
    weights = ComputeWeights(packed)
    with weights.active():
        found = hidden(packed)
    assert num_merged(weights) == len(decoder_layers(packed)) > 0
    atol, rtol = tolerances[torch.float32]
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)
    assert torch.equal(hidden(packed), expected), "outside of steps the model is itself"


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_stay_as_they_are(name: str, build_architecture: Build, tolerances: Any) -> None:
    packed = PackedCausalLM(build_architecture(name))
    expected = hidden(packed)
    weights = ComputeWeights(packed)
    with weights.active():
        found = hidden(packed)
    assert num_merged(weights) == OTHERS[name]
    atol, rtol = tolerances[torch.float32]
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)


def _scaled_residual(layer: nn.Module) -> None:
    """The names of the common kind, another computation."""
    own = type(layer).forward
    changed = type("Scaled", (type(layer),), {"forward": lambda self, *a, **k: 0.5 * own(self, *a, **k)})
    layer.__class__ = changed


def _other_activation(layer: Any) -> None:
    layer.mlp.act_fn = nn.GELU()


def _half_rotated(layer: Any) -> None:
    attention = layer.self_attn
    own = type(attention).forward

    def forward(self: Any, hidden_states: Any, position_embeddings: Any, *args: Any, **kwargs: Any) -> Any:
        cos, sin = position_embeddings
        return own(self, hidden_states, (cos, -sin), *args, **kwargs)

    attention.__class__ = type("Turned", (type(attention),), {"forward": forward})


@pytest.mark.parametrize("change", [_scaled_residual, _other_activation, _half_rotated])
def test_a_layer_that_computes_otherwise_is_not_merged(change: Any, build_architecture: Build) -> None:
    packed = PackedCausalLM(build_architecture("llama"))
    layers = decoder_layers(packed)
    for layer in layers:
        assert MergedLayers().merge(layer, 16, {}) is not None
        # The instance's quicker forward of the fused rotary embedding goes with the class.
        change(layer)
        vars(layer.self_attn).pop("forward", None)
    assert all(MergedLayers().merge(layer, 16, {}) is None for layer in layers)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_they_follow_every_weight_and_bias(name: str, build_architecture: Build, tolerances: Any) -> None:
    packed = PackedCausalLM(build_architecture(name))
    weights = ComputeWeights(packed)
    with weights.active():
        hidden(packed)
    atol, rtol = tolerances[torch.float32]
    layer = decoder_layers(packed)[0]
    for parameter in layer.parameters():
        with torch.no_grad():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        expected = hidden(packed)
        with weights.active():
            torch.testing.assert_close(hidden(packed), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_only_fast_fp32_is_merged(precision: Any, numerics: Any, build_architecture: Build) -> None:
    if precision == "bf16" and numerics == "exact":
        pytest.skip("refused by the recipe")
    packed = PackedCausalLM(build_architecture("llama"), precision, numerics=numerics)
    weights = ComputeWeights(packed)
    with weights.active():
        pass
    assert (num_merged(weights) > 0) == (precision == "fp32" and numerics == "fast")


@pytest.mark.parametrize("blocked", [False, True])
def test_a_request_gets_the_same_bits_in_any_batch(
    blocked: bool,
    tiny: Any,
    make_request: Callable[..., Request],
    run_all: Callable[..., dict[str, Completion]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if blocked:
        monkeypatch.setattr(merged_layers, "MIN_PACKED", 1)
    requests = [make_request(f"r{i}", length=5 + 3 * i, seed=i, max_new_tokens=6 + i) for i in range(9)]
    engine = tiny.engine()
    together = run_all(engine, requests)
    assert num_merged(engine._weights) > 0
    for request in requests:
        assert run_all(tiny.engine(), [request])[request.request_id] == together[request.request_id]
