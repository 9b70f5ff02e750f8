"""A linear recurrence over millions of tokens without a loop over tokens.

Shape suffixes: A elements, W elements of a block, B blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
"""Elements of a block: a scan takes ``BLOCK`` vectorised steps on each of ``log(A) / log(BLOCK)`` levels."""


def reverse_linear_scan(inputs_A: Tensor, coefficients_A: Tensor) -> Tensor:
    """Solves ``out[i] = inputs[i] + coefficients[i] * out[i + 1]``, with 0 after the last element.

    A coefficient of 0 ends a segment: nothing passes from the element behind it. The elements are cut into
        blocks;
    all blocks are scanned side by side, their first elements form a recurrence 128 times shorter, and its
    solution is carried back into the blocks. Work and memory are linear in A. Coefficients are multiplied,
    never divided, so any value in [0, 1] is safe.

    Args:
        inputs_A: ``[A]`` floating point.
        coefficients_A: ``[A]`` of the same dtype.

    Returns:
        ``[A]`` of the same dtype.
    """
    size = inputs_A.shape[0]
    if size == 0:
        return inputs_A.clone()
    num_blocks = -(-size // BLOCK)
    # Contiguous copies, so the steps below run over adjacent memory and leave the arguments alone.
    out_WB = _blocks(inputs_A, num_blocks)
    product_WB = _blocks(coefficients_A, num_blocks)
    for w in range(BLOCK - 2, -1, -1):
        out_WB[w].addcmul_(product_WB[w], out_WB[w + 1])
        product_WB[w].mul_(product_WB[w + 1])
    if num_blocks > 1:
        first_B = reverse_linear_scan(out_WB[0], product_WB[0])
        carried_B = torch.cat([first_B[1:], first_B.new_zeros(1)])
        out_WB.addcmul_(product_WB, carried_B)
    return out_WB.t().reshape(-1)[:size]


def _blocks(values_A: Tensor, num_blocks: int) -> Tensor:
    padded = values_A.new_zeros(num_blocks * BLOCK)
    padded[: values_A.shape[0]] = values_A
    return padded.view(num_blocks, BLOCK).t().contiguous()
