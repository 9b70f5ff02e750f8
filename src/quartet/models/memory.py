"""Where tensors lie in memory, and how they get to a device. The place decides a product's bits as much as
the values do.

Products with a vector (a scalar head's, or a few rows of any layer's) take their sums in another order when a tensor
does not begin on a multiple of 16 bytes. A safetensors file leaves its tensors wherever its header ends, and a copy of
them begins on a multiple of 64, as all memory of torch's. So a model computes from torch's own memory from the start:
then its bits are the same before and after its parts moved, in an engine's copy, and in another process.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""Bytes. As torch's own memory on the CPU."""


@torch.inference_mode(False)
@torch.no_grad()
def align_storages(model: nn.Module) -> int:
    """Number of storages on the CPU that did not begin on a multiple of ``ALIGNMENT`` and were copied to one.

    Whole storages are copied: parameters and buffers stay the same objects, and what shared memory still does.
    """
    copies: dict[int, Tensor] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_inference():
            continue
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place % ALIGNMENT == 0:
            continue
        if place not in copies:
            copies[place] = torch.empty(storage.nbytes(), dtype=torch.uint8).copy_(storage_bytes(storage))
        tensor.data = reflected(tensor, copies[place])
    return len(copies)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` of the host on ``device``; a CUDA device is not waited for."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def storage_bytes(storage: torch.UntypedStorage) -> Tensor:
    """A flat ``uint8`` view of the whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def reflected(tensor: Tensor, memory: Tensor) -> Tensor:
    """What lies in ``memory`` as ``tensor`` lies in its storage."""
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    return torch.empty(0, dtype=tensor.dtype, device=memory.device).set_(memory.untyped_storage(), *place)
