"""Products of few rows with weights in the order that a kernel of the CPU reads.

Shapes: D inputs, O outputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quartet.models.lora import AdaptedLayer
from quartet.rollout.compute_dtype_weights import CopySource, Form, WeightCopy, as_it_is

MIN_PACKED = 2**17
"""Numbers of a weight from which on a packed product is quicker than a transposed one."""
MAX_TRANSPOSED_INPUTS = 768
"""On one thread, sums over more numbers than this take another order in a transposed product, and one that depends on
the number of rows; a request would then get other bits alone than in a batch."""


def transposed(weight: Tensor) -> Tensor:
    return weight.t().contiguous().t()


def packed_for(num_rows: int) -> Form:
    """In the blocks that oneDNN's kernel reads for products of about ``num_rows`` rows.

    A row's bits do not depend on the number of rows, from two rows on, whatever the number of threads.
    """
    return partial(torch.ops.mkldnn._reorder_linear_weight, batch_size=num_rows)


def is_packed_best(num_numbers: int) -> bool:
    """Whether a packed product of an fp32 weight on the CPU can be had and is quicker."""
    mkldnn = torch.backends.mkldnn
    return num_numbers >= MIN_PACKED and bool(mkldnn.is_available() and mkldnn.enabled)


def plain_form(num_inputs: int) -> Form:
    """Transposed where that gives a row the same bits in any batch."""
    return transposed if num_inputs <= MAX_TRANSPOSED_INPUTS or torch.get_num_threads() > 1 else as_it_is


def product(weight: Tensor | None, x: Tensor, bias: Tensor | None) -> Tensor:
    """``x Wᵀ + bias``: ``[..., D] → [..., O]``."""
    assert weight is not None
    if weight.is_mkldnn:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


class PackedProduct(WeightCopy):
    """The weight of a linear layer in the blocks that oneDNN's kernel reads; the module gets another forward."""

    def __init__(self, module: nn.Linear, num_rows: int, layer: AdaptedLayer | None = None) -> None:
        self._module: Any = module
        super().__init__([module], [CopySource(module.weight, layer)], [packed_for(num_rows)])

    def put_in(self) -> None:
        self._module.forward = self._forward

    def take_out(self) -> None:
        # The instance's attribute goes, and the class's method shows again.
        del self._module.forward

    def _forward(self, x: Tensor) -> Tensor:
        return product(self._weights[0].tensor, x, self._module.bias)
