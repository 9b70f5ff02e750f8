"""Medusa heads: what they compute, what learns, and how they are saved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from quartet.models.medusa import MedusaHeads
from quartet.models.packed_model import PackedCausalLM

Make = Callable[..., PreTrainedModel]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_fresh_heads_say_what_the_trunk_says(make_model: Make, family: str, shared: bool) -> None:
    """With its soft caps: W is 0, and the heads are the trunk's."""
    trunk = PackedCausalLM(make_model(family))
    heads = MedusaHeads(trunk, 3, shared_head=shared)
    hidden = 3 * torch.randn(5, heads.hidden_size)
    logits = heads(hidden)
    assert logits.shape == (5, 3, heads.vocab_size)
    assert logits.dtype == torch.float32
    for k in range(3):
        torch.testing.assert_close(logits[:, k], trunk.logits(hidden).detach())


@pytest.mark.parametrize("shared", [True, False])
def test_a_head_is_the_published_one(make_model: Make, shared: bool) -> None:
    trunk = PackedCausalLM(make_model("llama"))
    heads = MedusaHeads(trunk, 2, shared_head=shared)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hidden, weights = torch.randn(4, heads.hidden_size), dict(heads.named_parameters())
    for k in range(2):
        x = hidden + F.silu(hidden @ weights[f"blocks.{k}.layers.0.weight"].T)
        head = trunk.head if shared else heads.get_submodule(f"lm_heads.{k}")
        torch.testing.assert_close(heads(hidden)[:, k], head(x).detach())
        torch.testing.assert_close(heads.logits_of(k, hidden), head(x))


@pytest.mark.parametrize("shared", [True, False])
def test_no_gradient_reaches_the_trunk(make_model: Make, shared: bool) -> None:
    trunk = PackedCausalLM(make_model("llama"))
    heads = MedusaHeads(trunk, 2, shared_head=shared)
    hidden = torch.randn(4, heads.hidden_size, requires_grad=True)
    torch.stack([heads.logits_of(k, hidden).square().sum() for k in range(2)]).sum().backward()
    assert hidden.grad is None
    assert all(parameter.grad is None for parameter in trunk.model.parameters())
    assert all(parameter.grad is not None and parameter.grad.norm() > 0 for parameter in heads.parameters())
    assert not heads(hidden).requires_grad
