"""Where tensors lie in memory, how they get to a device, and what is dropped for room. The place decides a product's
bits as much as the values do.

Products with a vector (a scalar head's, or a few rows of any layer's) take their sums in another order when a tensor
does not begin on a multiple of 16 bytes. A safetensors file leaves its tensors wherever its header ends, and a copy of
them begins on a multiple of 64, as all memory of torch's. So a model computes from torch's own memory from the start:
then its bits are the same before and after its parts moved, in an engine's copy, and in another process.

What was computed from weights, as an engine's copies in other forms, is worth nothing once an update has changed them.
It is dropped before the update, whose gradients and activations are the most that a model needs.
"""

from __future__ import annotations

from itertools import chain
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""Bytes. As torch's own memory on the CPU."""


@torch.inference_mode(False)
@torch.no_grad()
def align_storages(model: nn.Module) -> int:
    """Copies storages on the CPU that do not begin on a multiple of ``ALIGNMENT`` to one; returns their number.

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
        tensor.data = view_like(tensor, copies[place])
    return len(copies)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Brings ``tensor`` of the host to ``device``; a CUDA device is not waited for."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def storage_bytes(storage: torch.UntypedStorage) -> Tensor:
    """Returns a flat ``uint8`` view of the whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def view_like(tensor: Tensor, memory: Tensor) -> Tensor:
    """Returns what lies in ``memory`` as ``tensor`` lies in its storage."""
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    return torch.empty(0, dtype=tensor.dtype, device=memory.device).set_(memory.untyped_storage(), *place)


# What an update makes stale ------------------------------------------------------------------------------


class DerivedTensors(Protocol):
    """Holds tensors that were computed from a model's weights."""

    def drop(self) -> None:
        """Gives back the memory of what an update makes stale; the next use computes it again."""


_DERIVED: WeakKeyDictionary[nn.Module, WeakSet[DerivedTensors]] = WeakKeyDictionary()
"""No attribute of the model, so that copies of it do not take it along."""


def register_derived(model: nn.Module, derived: DerivedTensors) -> None:
    """Has ``drop_derived(model)`` reach ``derived`` from now on, for as long as something else refers to it."""
    _DERIVED.setdefault(model, WeakSet()).add(derived)


def drop_derived(model: nn.Module) -> None:
    """Drops what was computed from the weights of ``model``, which are about to change."""
    for derived in _DERIVED.get(model, ()):
        derived.drop()
