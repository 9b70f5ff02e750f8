"""Tensors in Ray's object store: as raw bytes beside the pickle, which Ray writes once and without copies.

Ray's default would pickle a tensor's whole storage, also of a small view, through several copies in memory.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor


def register_tensors() -> None:
    """For this process; needs a connection to Ray."""
    ray.util.register_serializer(Tensor, serializer=to_wire, deserializer=from_wire)


def deregister_tensors() -> None:
    ray.util.deregister_serializer(Tensor)


def to_wire(tensor: Tensor) -> Any:
    """Bytes, dtype, shape and whether it wants gradients; of layouts that are not dense, a saved file.

    What was on a GPU arrives on the CPU: the reader may see other devices.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        file = io.BytesIO()
        torch.save(tensor.detach().cpu(), file)
        return file.getvalue()
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # A single element counts as contiguous with any stride, but only with 1 can its bytes be viewed.
    flat = dense.as_strided((dense.numel(),), (1,))
    array = flat.view(torch.uint8).numpy()
    return array, tensor.dtype, tuple(tensor.shape), tensor.requires_grad


def from_wire(wire: Any) -> Tensor:
    """A tensor of the reader's own: what lies in the store is shared by all readers and must not be written to."""
    if isinstance(wire, bytes):
        loaded: Tensor = torch.load(io.BytesIO(wire), weights_only=True)
        return loaded
    array, dtype, shape, requires_grad = wire
    # In torch's memory and not in numpy's, which begins where a product may have other bits (quartet/models/memory.py).
    own = torch.empty(shape, dtype=dtype)
    if len(array):
        np.copyto(own.reshape(-1).view(torch.uint8).numpy(), array)
    return own.requires_grad_() if requires_grad else own
