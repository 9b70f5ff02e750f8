"""How closely two ways to compute the same thing agree, by the lower of their dtypes: ``(atol, rtol)``.

One table for all tests, of well-conditioned results. A test that needs more than this has found an error; it does not
get a number of its own. Where a result magnifies rounding, ``leeway`` derives how far two correct ways to compute it
may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-10, 1e-9),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (2e-2, 2e-2),
}


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The Llama in ``dtype``; in fp64 with norms that compute in fp64 too.

    transformers' own round to fp32 whatever the dtype, which would hide what fp64 is to show.
    """
    model = model.to(dtype)
    for parent in list(model.modules()) if dtype == torch.float64 else []:
        for name, child in parent.named_children():
            if isinstance(child, LlamaRMSNorm):
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
    return model


# Where a result's condition is not known ------------------------------------------------------------------
#
# A computed product is the exact product of weights that are a little off (Wilkinson's backward error), so two ways to
# compute one result differ as results differ whose weights are a little off. How little is known from the dtype and the
# number of terms; how much a result makes of it (scores before a softmax, a gradient over its own size in Adam) is
# measured, by computing it again with such weights.

DRAWS = 3
"""Times that a result is computed with other weights; the largest difference counts."""
SLACK = 4.0
"""Two ways each have an error (√2); inputs have one as weights have (√2); and the largest of many normal numbers is up
to twice the largest of as many others."""


def relative_error(dtype: torch.dtype, *, terms: int = 0) -> float:
    """The standard deviation of the relative error that a product leaves in a weight, however its sum is taken.

    A rounding has a relative error of up to ``u = eps / 2``, evenly distributed: a deviation of u / √3. A product
    rounds both factors and the result: u in all. Where the sum, too, is taken in ``dtype``, its k-th of n terms is
    rounded n - k times in the worst order, one after the other: u √(n - k) / √3, whose mean square over k is u² n / 6.

    Args:
        terms: n, the longest sum taken in ``dtype``; 0 where sums are taken in a higher one, as those of bf16 products.
    """
    return float(torch.finfo(dtype).eps) / 2 * math.sqrt(1 + terms / 6)


Rounded = Callable[[nn.Module], nn.Module]


def leeway(
    compute: Callable[[Rounded], Mapping[str, Tensor]], dtype: torch.dtype, *, terms: int = 0
) -> dict[str, float]:
    """By how much each result may differ between two correct ways to compute it, in ``dtype``.

    Args:
        compute: the results, of models that it makes or copies and gives to its argument, which changes them in place.
    """
    size = relative_error(dtype, terms=terms)
    expected = compute(lambda model: model)
    # A result is itself a sum that is rounded, in its own dtype.
    largest = {n: relative_error(t.dtype, terms=terms) * float(t.abs().max()) for n, t in expected.items()}
    for draw in range(DRAWS):
        found = compute(partial(_rounded_otherwise, size=size, generator=torch.Generator().manual_seed(draw)))
        for name, tensor in expected.items():
            largest[name] = max(largest[name], float((found[name] - tensor).abs().max()))
    return {name: SLACK * difference for name, difference in largest.items()}


@torch.no_grad()
def _rounded_otherwise(model: nn.Module, size: float, generator: torch.Generator) -> nn.Module:
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.mul_(1 + size * noise)
    return model
