"""Attention over packed trees on a CUDA device, forward and backward, against the dense formula in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from quartet.models.attention import AttentionParams, PackedAttention, masked_attention

pytestmark = pytest.mark.gpu

TREES = {
    "roots": ((200, 17, 300, 64, 64, 1), (-1,) * 6),
    "groups": ((130, 40, 40, 70, 9, 250, 33, 100), (-1, 0, 0, 0, 0, -1, 5, 5)),
    "forks": ((50, 120, 30, 30, 64, 7, 200), (-1, 0, 1, 1, 0, 4, -1)),
    "short": ((5, 3, 2), (-1, 0, 0)),
}
RULES = {
    "causal": AttentionParams(0.125),
    "window": AttentionParams(0.125, window=48),
    "capped": AttentionParams(0.125, softcap=2.0),
    "both": AttentionParams(0.125, window=48, softcap=2.0),
}


def heads(num_tokens: int, size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_tokens + size)
    return [torch.randn(1, n, num_tokens, size, generator=generator).to(device, dtype) for n in (8, 2, 2)]


def attended(inputs: Sequence[Tensor], attend: Callable[..., Tensor]) -> list[Tensor]:
    """Output, and gradients of a fixed weighted sum of it."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    # Small, so that gradients are of the size of the outputs.
    return [out, *torch.autograd.grad((out * weight).sum() * 0.1, leaves)]


# Trees last of all: neighbouring tests share a compiled kernel.
@pytest.mark.parametrize("tree", list(TREES))
@pytest.mark.parametrize("size", [8, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", list(RULES))
def test_outputs_and_gradients_are_those_of_the_formula(
    tree: str,
    rule: str,
    dtype: torch.dtype,
    size: int,
    device: torch.device,
    walked_mask: Callable[..., Tensor],
    close: Callable[..., None],
) -> None:
    lengths, parents = TREES[tree]
    inputs = heads(sum(lengths), size, dtype, device)
    mask = walked_mask(lengths, parents, RULES[rule].window).to(device)
    found = attended(inputs, lambda q, k, v: PackedAttention(lengths, parents).attend(0, q, k, v, RULES[rule]))
    expected = attended([x.double() for x in inputs], lambda q, k, v: masked_attention(q, k, v, mask, RULES[rule]))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        close(ours, theirs)


def test_packs_of_any_shape_share_compiled_kernels(cuda: torch.device) -> None:
    from torch._dynamo.utils import counters

    def run(lengths: Sequence[int], parents: Sequence[int]) -> None:
        inputs = heads(sum(lengths), 64, torch.bfloat16, cuda)
        for name in ("causal", "window"):
            attended(inputs, lambda q, k, v, n=name: PackedAttention(lengths, parents).attend(0, q, k, v, RULES[n]))

    run(*TREES["groups"])
    run(*TREES["forks"])
    before = counters["stats"]["unique_graphs"]
    for shift in range(1, 6):
        lengths, parents = TREES["groups"]
        run([length + 11 * shift for length in lengths], parents)
    assert counters["stats"]["unique_graphs"] == before
