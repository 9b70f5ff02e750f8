"""A change of weights that takes itself back: to see where new weights arrive, without a copy of a large model."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

ModelPart = Literal["embeddings", "body"]
"""Input embedding and output head (one tensor where they are tied), or everything between them."""

_FLIPPED = 1 << 20
"""A bit of the mantissa that bf16 still has: a number changes by 6 to 12 hundredths, more than bf16 rounds away."""
_IN_PLACE_OF_ZERO = 0x3A800000
"""2**-10: zeros, as those of fresh adapters, change too."""


def flip_bits(values: Tensor) -> None:
    """Changes fp32 ``values`` in place; done twice they are as before, to the last bit.

    Raises:
        TypeError: values of another type.
    """
    if values.dtype != torch.float32:
        raise TypeError(f"bits are flipped of fp32 values, found {values.dtype}")
    bits = values.view(torch.int32)
    # Zero, its partner, and what a flipped bit would make of the two: closed under either change.
    around_zero = torch.zeros_like(bits, dtype=torch.bool)
    for value in (0, _FLIPPED, _IN_PLACE_OF_ZERO, _IN_PLACE_OF_ZERO ^ _FLIPPED):
        around_zero |= bits == value
    bits.bitwise_xor_(torch.where(around_zero, _IN_PLACE_OF_ZERO, _FLIPPED))
