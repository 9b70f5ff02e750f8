"""Products with packed weights: the same numbers, whatever else is in the batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quartet.extras.cpu_kernels import merged_layers
from quartet.extras.cpu_kernels.merged_layers import MergedLayers
from quartet.models.attention import PackedAttention
from quartet.models.loading import packed_causal_lm
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.compute_dtype_weights import ComputeWeights
from quartet.rollout.engine import NativeEngine, copy_packed_model
from quartet.rollout.protocol import Completion, Request

Make = Callable[..., Request]
RunAll = Callable[..., dict[str, Completion]]
TOKENS = torch.arange(3, 43)


def logits(packed: PackedCausalLM) -> torch.Tensor:
    with torch.no_grad():
        hidden = packed.hidden(TOKENS, torch.arange(40), PackedAttention([40]))
        return packed.logits(hidden)


@pytest.fixture
def unmerged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers run as the model has them."""
    monkeypatch.setattr(MergedLayers, "merge", lambda *_: None)


@pytest.mark.usefixtures("unmerged")
def test_logits_have_the_same_bits_with_transposed_weights(family: Any) -> None:
    """On one thread a transposed weight sums alike."""
    family.packed.release()
    packed = PackedCausalLM(copy.deepcopy(family.twin))
    expected = logits(packed)
    weights = ComputeWeights(packed)
    with weights.active():
        assert torch.equal(logits(packed), expected)
    assert weights.num_bytes > 0
    assert torch.equal(logits(packed), expected)


@pytest.fixture
def all_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights are packed as large ones are."""
    monkeypatch.setattr(merged_layers, "MIN_PACKED", 1)


@pytest.mark.usefixtures("all_packed")
@pytest.mark.parametrize("how", ["in place", "behind autograd's back"])
def test_packed_products_follow_the_weights(tiny: Any, tolerances: Any, how: str) -> None:
    weights = ComputeWeights(tiny.packed)
    with weights.active():
        old = logits(tiny.packed)
    with torch.no_grad():
        for parameter in tiny.packed.model.parameters():
            (parameter if how == "in place" else parameter.data).mul_(1.1)
    if how != "in place":
        weights.refresh()
    with weights.active():
        found = logits(tiny.packed)
    atol, rtol = tolerances[torch.float32]
    torch.testing.assert_close(found, logits(tiny.packed), atol=atol, rtol=rtol)
    assert not torch.allclose(found, old, atol=1e-3)


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_a_packed_product_do_not_see_each_other(threads: int) -> None:
    layer = torch.nn.Linear(512, 512)
    generator = torch.Generator().manual_seed(0)
    layer.weight.data.normal_(generator=generator)
    copy_ = merged_layers.PackedProduct(layer, 64)
    x = torch.randn(130, 512, generator=generator)
    former = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        copy_.put_in()
        with torch.no_grad():
            together = layer(x)
            for num in (16, 17, 31, 64, 100):
                assert torch.equal(layer(x[:num].clone()), together[:num])
    finally:
        torch.set_num_threads(former)
        copy_.take_out()


def test_layers_that_are_merged_and_packed_follow_the_sync(make_request: Make, run_all: RunAll) -> None:
    """A model whose products are large enough for packed blocks, so nothing but copies computes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=160,
    )  # fmt: skip
    trainer = packed_causal_lm(LlamaForCausalLM(config))
    shared, apart = NativeEngine(trainer), NativeEngine(copy_packed_model(trainer), owns_weights=True)
    assert apart._weights.num_bytes > 4 * merged_layers.MIN_PACKED, "nothing is packed here"
    sent = [make_request(f"r{i}", length=5 + i, seed=i, max_new_tokens=5) for i in range(5)]
    for version in (1, 2):
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        shared.update_weights(None, version)
        apart.update_weights(trainer.model.named_parameters(), version)
        assert run_all(apart, sent) == run_all(shared, sent)
