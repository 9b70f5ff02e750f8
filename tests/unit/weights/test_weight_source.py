"""Sources: what they announce is what they give."""

from __future__ import annotations

import torch
from torch import nn

from quartet.weights.in_process import NamedSource


def test_what_is_announced_is_what_comes() -> None:
    model = nn.ModuleDict({"linear": nn.Linear(4, 8), "norm": nn.LayerNorm(3)})
    source = NamedSource(model.named_parameters)
    specs, tensors = source.specs(), list(source.tensors())
    assert [spec.name for spec in specs] == ["linear.weight", "linear.bias", "norm.weight", "norm.bias"]
    for spec, tensor in zip(specs, tensors, strict=True):
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.torch_dtype) == (spec.shape, torch.float32)
        assert tensor.is_contiguous() and not tensor.requires_grad


def test_nothing_is_copied_that_need_not_be() -> None:
    own = torch.randn(6, 2)
    (sent,) = NamedSource(lambda: [("w", own)]).tensors()
    assert sent.data_ptr() == own.data_ptr()


def test_each_tensor_comes_in_the_dtype_that_is_wanted() -> None:
    """Of an engine whose products are bf16 and whose norms are not."""
    given = {
        "norm": torch.randn(3),
        "gate_proj": torch.randn(4, 3),
        "steps": torch.tensor([4]),
        "other": torch.ones(2),
    }
    like = {"norm": torch.float32, "gate_proj": torch.bfloat16}
    source = NamedSource(given.items, like=like)
    found = dict(zip((spec.name for spec in source.specs()), source.tensors(), strict=True))
    assert [spec.torch_dtype for spec in source.specs()] == [tensor.dtype for tensor in found.values()]
    wanted = {**like, "steps": torch.int64, "other": torch.float32}
    assert {name: tensor.dtype for name, tensor in found.items()} == wanted
    assert torch.equal(found["gate_proj"], given["gate_proj"].bfloat16())
