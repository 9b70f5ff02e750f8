"""Medusa heads: what they compute, what learns, and how they are saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import PreTrainedModel

from architectures import build
from quartet.config import UserError
from quartet.extras.speculation.heads import MedusaHeads
from quartet.models.packed_model import PackedCausalLM

Make = Callable[..., PreTrainedModel]


@pytest.fixture
def make_model() -> Make:
    """Of other families than the trainers' tests have."""
    return build


@pytest.mark.parametrize("shared", [True, False])
def test_a_head_is_the_published_one(make_model: Make, shared: bool) -> None:
    trunk = PackedCausalLM(make_model("llama"))
    heads = _trained(trunk, 2, shared=shared)
    hidden, weights = torch.randn(4, heads.hidden_size), dict(heads.named_parameters())
    for k in range(2):
        x = hidden + F.silu(hidden @ weights[f"blocks.{k}.layers.0.weight"].T)
        x = x + F.silu(x @ weights[f"blocks.{k}.layers.1.weight"].T)
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


def _trained(trunk: PackedCausalLM, depth: int = 3, *, shared: bool = True) -> MedusaHeads:
    heads = MedusaHeads(trunk, depth, layers=2, shared_head=shared)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads


@pytest.mark.parametrize("shared", [True, False])
def test_saved_heads_are_the_same_heads(
    make_model: Make, shared: bool, tmp_path: Path, tolerances: dict[torch.dtype, tuple[float, float]]
) -> None:
    trunk = PackedCausalLM(make_model("llama"))
    heads = _trained(trunk, shared=shared)
    heads.save(tmp_path)
    hidden = torch.randn(4, heads.hidden_size)
    assert torch.equal(MedusaHeads.load(tmp_path, trunk)(hidden), heads(hidden))
    first_two, (atol, rtol) = MedusaHeads.load(tmp_path, trunk, 2)(hidden), tolerances[torch.float32]
    torch.testing.assert_close(first_two, heads(hidden)[:, :2], atol=atol, rtol=rtol)


@pytest.mark.parametrize("shared", [True, False])
def test_the_files_have_the_names_and_shapes_of_vllms_medusa(make_model: Make, shared: bool, tmp_path: Path) -> None:
    """As ``vllm.model_executor.models.medusa`` and ``vllm.transformers_utils.configs.medusa`` read them."""
    trunk = PackedCausalLM(make_model("llama"))
    heads = _trained(trunk, 2, shared=shared)
    heads.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    D, V = heads.hidden_size, heads.vocab_size
    asked = {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": 2, "num_hidden_layers": 2}
    asked |= {"hidden_size": D, "vocab_size": V, "medusa_fc_bias": False, "original_lm_head": shared}
    assert config.items() >= asked.items()
    assert [key for key in config if "num" in key and "heads" in key] == ["num_heads"], "any such key is the depth"
    tensors = load_file(tmp_path / "model.safetensors")
    blocks = {f"blocks.{k}.layers.{layer}.weight": (D, D) for k in range(2) for layer in range(2)}
    own = {} if shared else {f"lm_heads.{k}.weight": (V, D) for k in range(2)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {**blocks, **own}


def test_heads_of_another_trunk_are_refused(make_model: Make, tmp_path: Path) -> None:
    trunk = PackedCausalLM(make_model("llama"))
    _trained(trunk).save(tmp_path)
    with pytest.raises(UserError, match=r"another model[\s\S]*hidden size"):
        MedusaHeads.load(tmp_path, PackedCausalLM(make_model("llama", hidden_size=48)))
    with pytest.raises(UserError, match="no more heads"):
        MedusaHeads.load(tmp_path, trunk, 4)


@pytest.mark.parametrize("damage", ["none", "json", "cut"])
def test_what_are_no_heads_is_refused(make_model: Make, damage: str, tmp_path: Path) -> None:
    trunk = PackedCausalLM(make_model("llama"))
    _trained(trunk).save(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    if damage == "none":
        config.unlink()
    elif damage == "json":
        config.write_text("{")
    else:
        weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(UserError, match="Medusa heads"):
        MedusaHeads.load(tmp_path, trunk)
