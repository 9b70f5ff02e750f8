"""A model's bits do not depend on where its tensors lay when it came: in a file, in a copy, or after they had moved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quartet.models.loading import load_causal_lm, scalar_model_from
from quartet.models.packed_model import PackedCausalLM, PackedModel, PackedScalarModel
from quartet.train.offload import MappedFileStore, Offload

ROWS = (1, 2, 3, 5, 7, 13, 17, 40)
"""Few enough for products with a vector in any layer, or not divisible by the rows that a kernel takes at once."""


def critic(build_architecture: Any) -> Any:
    return scalar_model_from(build_architecture("qwen2"), seed=0)


def values_and_gradients(packed: PackedScalarModel) -> list[Tensor]:
    """Values of every number of rows, and the gradient that they leave at the head and at its input."""
    found: list[Tensor] = []
    for num_rows in ROWS:
        width = packed.head.weight.shape[1]
        hidden = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(num_rows))
        hidden.requires_grad_()
        packed.model.zero_grad()
        values = packed.scalars(hidden)
        values.square().sum().backward()
        gradients = [p.grad for p in packed.model.parameters() if p.grad is not None]
        found += [values.detach(), hidden.grad, *gradients]  # type: ignore[list-item]
    return found


def test_a_scalar_head_has_one_result_wherever_its_weights_lay(build_architecture: Any, as_from_a_file: Any) -> None:
    model = critic(build_architecture)
    here = values_and_gradients(PackedScalarModel(copy.deepcopy(model)))
    there = values_and_gradients(PackedScalarModel(as_from_a_file(model)))
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_few_rows_of_every_layer_have_one_result_wherever_its_weights_lay(
    build_architecture: Any, as_from_a_file: Any
) -> None:
    model = build_architecture("llama")
    here, there = PackedCausalLM(copy.deepcopy(model)), PackedCausalLM(as_from_a_file(model))
    for one, other in zip(here.model.modules(), there.model.modules(), strict=True):
        if isinstance(one, nn.Linear):
            for num_rows in ROWS:
                x = torch.randn(num_rows, one.in_features, generator=torch.Generator().manual_seed(num_rows))
                assert torch.equal(one(x), other(x)), (one, num_rows)


def test_moved_parts_come_back_with_the_same_bits(build_architecture: Any, as_from_a_file: Any, tmp_path: Path) -> None:
    packed = PackedScalarModel(as_from_a_file(critic(build_architecture)))
    before = values_and_gradients(packed)
    moves = Offload(packed, MappedFileStore(tmp_path))
    moves.offload()
    moves.onload()
    assert all(torch.equal(a, b) for a, b in zip(before, values_and_gradients(packed), strict=True))


def test_a_loaded_model_is_aligned_when_it_is_taken_over(build_architecture: Any, tmp_path: Path) -> None:
    """Whatever the length of the file's header, which decides where its tensors begin."""
    for metadata in ("", "x", "a longer one", "and another that is longer still"):
        build_architecture("qwen2", name_or_path=metadata).save_pretrained(tmp_path)
        packed = PackedCausalLM(load_causal_lm(str(tmp_path)))
        assert all(tensor.data_ptr() % 64 == 0 for tensor in packed.model.parameters())


def test_what_shares_memory_still_does_and_objects_stay(build_architecture: Any, as_from_a_file: Any) -> None:
    model = as_from_a_file(build_architecture("qwen2"))  # its head is tied
    layer = model.model.layers[0].mlp
    # Two parameters in one storage, as a flattened model has them.
    layer.up_proj.weight.data = layer.gate_proj.weight.data.flatten()[:].view_as(layer.up_proj.weight)
    objects, values = list(model.parameters()), [p.detach().clone() for p in model.parameters()]
    packed: PackedModel = PackedCausalLM(model)
    assert [id(p) for p in packed.model.parameters()] == [id(p) for p in objects]
    assert all(torch.equal(p, value) for p, value in zip(objects, values, strict=True))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    layer.gate_proj.weight.data.fill_(3.0)
    assert bool((layer.up_proj.weight == 3.0).all())
