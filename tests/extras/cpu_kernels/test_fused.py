"""Normalisation and rotary embedding in fewer passes: the same numbers, and nothing else changed."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from quartet.extras.cpu_kernels import fused
from quartet.models.attention import PackedAttention
from quartet.models.packed_model import PackedCausalLM, restore_forwards

Build = Callable[..., PreTrainedModel]
Close = Callable[..., None]

# (normalisations, attention modules) of the test models; Cohere has layer norms and turns neighbours, not halves.
RECOGNISED = {
    "llama": (5, 2),
    "qwen2": (5, 2),
    "gemma2": (9, 2),
    "qwen3": (9, 2),
    "mistral": (5, 2),
    "gemma3": (13, 2),
    "gpt_neox": (0, 2),
    "phi3": (5, 2),
    "olmo2": (9, 2),
    "qwen3_moe": (9, 2),
    "granite": (5, 2),
    "cohere": (0, 0),
}


@pytest.fixture(params=["one chunk", "many chunks"])
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small inputs are cut as large ones are."""
    if request.param == "many chunks":
        monkeypatch.setattr(fused, "_CACHED_NUMEL", 96)


@pytest.fixture
def twins(build_architecture: Build) -> Callable[..., tuple[PreTrainedModel, PreTrainedModel]]:
    """``twins(name, **options)``: a model with its forwards replaced, and an untouched one."""

    def make(name: str, **options: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
        plain = build_architecture(name, **options)
        patched = copy.deepcopy(plain)
        fused.install_fused(patched)
        return patched, plain

    return make


def tokens(num: int = 2, length: int = 13) -> Tensor:
    return torch.randint(0, 60, (num, length), generator=torch.Generator().manual_seed(7))


def loss_and_gradients(model: PreTrainedModel, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of a loss that weighs every logit differently."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = model(input_ids=tokens(), use_cache=False).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(8))
    (logits.float() * weights.to(logits.device)).mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(patched: PreTrainedModel, plain: PreTrainedModel, check: Close, autocast: bool = False) -> None:
    found, expected = loss_and_gradients(patched, autocast), loss_and_gradients(plain, autocast)
    assert found[0].dtype == expected[0].dtype
    check(found[0], expected[0], torch.bfloat16 if autocast else None)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in found[1].items():
        check(gradient, expected[1][name], torch.bfloat16 if autocast else None)


@pytest.mark.parametrize("name", list(RECOGNISED))
def test_recognised_modules(name: str, build_architecture: Build) -> None:
    model = build_architecture(name)
    patches = fused.install_fused(model)
    norms = [m for m in patches if "weight" in m._parameters]
    assert (len(norms), len(patches) - len(norms)) == RECOGNISED[name]


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("name", list(RECOGNISED))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_logits_and_gradients_of_every_architecture(
    name: str, dtype: torch.dtype, twins: Callable[..., Any], close: Close
) -> None:
    patched, plain = twins(name, dtype=dtype)
    compare(patched, plain, close)


def plain_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * scale


@pytest.mark.usefixtures("chunked")
def test_gradients_of_the_norm_in_fp64() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(21, 24, dtype=torch.float64, generator=generator).requires_grad_()
    scale = torch.randn(24, dtype=torch.float64, generator=generator).requires_grad_()
    incoming = torch.randn(21, 24, dtype=torch.float64, generator=generator)
    out = fused._RMSNorm.apply(x, scale, torch.tensor(1e-3, dtype=torch.float64))[0]
    expected = plain_norm(x, scale, 1e-3)
    found_gradients = torch.autograd.grad(out, (x, scale), incoming)
    gradients = torch.autograd.grad(expected, (x, scale), incoming)
    for a, b in zip((out, *found_gradients), (expected, *gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("chunked")
def test_gradients_of_the_rotary_embedding_in_fp64() -> None:
    """Angles of the two halves differ, as no model has them."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 17, 4, 8, dtype=torch.float64, generator=generator).transpose(1, 2).requires_grad_()
    k = torch.randn(2, 2, 17, 8, dtype=torch.float64, generator=generator).requires_grad_()
    cos, sin = torch.randn(2, 2, 17, 8, dtype=torch.float64, generator=generator)
    rotary = fused._Rotary(modeling_llama.apply_rotary_pos_emb)
    found, expected = rotary(q, k, cos, sin), modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    incoming = [torch.randn(x.shape, dtype=torch.float64, generator=generator) for x in expected]
    pairs = zip(
        (*found, *torch.autograd.grad(found, (q, k), incoming)),
        (*expected, *torch.autograd.grad(expected, (q, k), incoming)),
        strict=True,
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert found[0].stride() == expected[0].stride()


def test_activation_checkpointing_gives_the_same_gradients(build_architecture: Build) -> None:
    """To the bit: the same operations run twice."""
    model = build_architecture("qwen3")
    ids, positions = tokens().flatten(), torch.arange(13).repeat(2)
    gradients = []
    for checkpointing in (False, True):
        own = copy.deepcopy(model)
        fused.install_fused(own)
        packed = PackedCausalLM(own, activation_checkpointing=checkpointing)
        packed.hidden(ids, positions, PackedAttention([13, 13])).square().sum().backward()
        gradients.append({name: p.grad for name, p in own.named_parameters() if p.grad is not None})
    assert gradients[0]
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


def test_removed_without_a_trace(build_architecture: Build) -> None:
    model = build_architecture("gemma3")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with torch.no_grad():
        expected = model(input_ids=tokens()).logits
        patches = fused.install_fused(model)
        assert patches
        assert not torch.equal(model(input_ids=tokens()).logits, expected), "nothing was replaced"
        restore_forwards(patches)
        assert torch.equal(model(input_ids=tokens()).logits, expected)
    assert not patches
    assert {name: vars(module).keys() for name, module in model.named_modules()} == {
        name: values.keys() for name, values in before.items()
    }
    assert modeling_llama.LlamaAttention.forward.__globals__["apply_rotary_pos_emb"] is (
        modeling_llama.apply_rotary_pos_emb
    )


@pytest.mark.parametrize("norm_class", [Qwen2RMSNorm, Gemma2RMSNorm])
@pytest.mark.parametrize("width", [8, 24, 100, 512])
@torch.no_grad()
def test_rows_of_the_norm_do_not_see_each_other(norm_class: Callable[..., nn.Module], width: int) -> None:
    """To the bit, alone, among some, in many chunks, and with gradients."""
    norm = norm_class(width)
    norm.weight.normal_(generator=torch.Generator().manual_seed(0))
    fused.install_fused(norm)
    x = torch.randn(3 * fused._CACHED_NUMEL // width + 5, width, generator=torch.Generator().manual_seed(1))
    together = norm(x)
    for num in (*range(1, 35), 64, 100):
        for first in (0, 7, len(x) - num):
            assert torch.equal(norm(x[first : first + num]), together[first : first + num])
    with torch.enable_grad():
        assert torch.equal(norm(x[:50].clone().requires_grad_()), together[:50])


@torch.no_grad()
def test_tokens_of_the_rotary_embedding_do_not_see_each_other() -> None:
    rotary = fused._Rotary(modeling_llama.apply_rotary_pos_emb)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, 700, 4, 64, generator=generator).transpose(1, 2)
    k = torch.randn(1, 700, 2, 64, generator=generator).transpose(1, 2)
    cos, sin = torch.randn(2, 1, 700, 64, generator=generator)
    together = rotary(q, k, cos, sin)
    for num in (*range(1, 20), 64, 300):
        for first in (0, 7, 700 - num):
            part = slice(first, first + num)
            alone = rotary(q[:, :, part], k[:, :, part], cos[:, part], sin[:, part])
            assert all(torch.equal(a, b[:, :, part]) for a, b in zip(alone, together, strict=True))


def test_new_angles_are_noticed() -> None:
    """Another tensor, the same tensor with new values, and another at the place of a dead one."""
    rotary = fused._Rotary(modeling_llama.apply_rotary_pos_emb)
    generator = torch.Generator().manual_seed(1)
    q, cos = torch.randn(1, 2, 5, 8, generator=generator), torch.randn(1, 5, 8, generator=generator)

    def draw() -> Iterator[Tensor]:
        sin = torch.randn(1, 5, 8, generator=generator)
        yield sin
        yield sin.mul_(2)
        for _ in range(5):
            yield torch.randn(1, 5, 8, generator=generator)
        with torch.inference_mode():
            yield torch.randn(1, 5, 8, generator=generator)

    for sin in draw():
        found, expected = rotary(q, q, cos, sin), modeling_llama.apply_rotary_pos_emb(q, q, cos, sin)
        torch.testing.assert_close(found, expected)


def test_a_recomputation_finds_its_angles_again_after_other_passes() -> None:
    """As with pipeline stages. A selective one may call no operation that the first computation did not."""
    signed, (sin, other) = fused.SignedSin(), torch.randn(2, 1, 5, 8).unbind()
    of_layer, of_other = signed(sin), signed(other)
    assert signed(sin) is of_layer
    assert signed(other) is of_other
    kept = weakref.ref(of_layer)
    del sin, of_layer
    assert kept() is None


class _MeanAbsolute(Qwen2RMSNorm):
    """Looks like an RMS norm and is none."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.weight * hidden_states / (hidden_states.abs().mean(-1, keepdim=True) + self.variance_epsilon)


class _EpsilonOutside(Qwen2RMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return (
            self.weight * hidden_states / (hidden_states.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)
        )


@pytest.mark.parametrize("build", [_MeanAbsolute, _EpsilonOutside, nn.LayerNorm, lambda n: nn.LayerNorm(n, bias=False)])
def test_look_alikes_stay_as_they_are(build: Callable[[int], nn.Module]) -> None:
    module = build(24)
    assert fused.install_fused(nn.Sequential(module)) == []
    assert "forward" not in vars(module)
