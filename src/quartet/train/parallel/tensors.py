"""What lies on this rank of a tensor that is sharded over a mesh. Plain tensors lie here as a whole."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quartet.train.parallel.mesh import TENSOR
from quartet.weights.sink import slices_at

MODEL, OPTIMIZER = "model.", "optimizer.state."
"""Beginnings of names in a training state (``train.state``)."""


def parameter_name(name: str) -> str | None:
    """Returns the model's tensor that a tensor of a training state belongs to, by its name; None of anything else."""
    if name.startswith(OPTIMIZER):
        return name.removeprefix(OPTIMIZER).rpartition(".")[0]
    return name.removeprefix(MODEL) if name.startswith(MODEL) else None


def local(tensor: Tensor) -> Tensor:
    """Returns the memory of a tensor that is here, without gradient."""
    with torch.no_grad():
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def inner_tensor(tensor: Tensor) -> Tensor:
    """Returns the tensor itself, or the one that a DTensor holds: of that very one ``.data`` may be changed."""
    if not isinstance(tensor, DTensor):
        return tensor
    # to_local() makes an alias of a parameter's.
    names, _ = tensor.__tensor_flatten__()
    inner: Tensor = getattr(tensor, names[0])
    return inner


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Returns which part of the whole tensor is here."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    place = tensor.device_mesh.get_coordinate()
    assert place is not None
    return slices_at(tensor, place)


def write_part(tensor: Tensor, values: Tensor) -> None:
    """Copies what lies here from the values of the whole tensor, or of one that is sharded in the same way."""
    local(tensor).copy_(local(values) if isinstance(values, DTensor) else values[local_slices(tensor)])


def with_local(tensor: Tensor, memory: Tensor) -> Tensor:
    """Returns ``tensor`` with other memory in the place of what is here. No collective."""
    if not isinstance(tensor, DTensor):
        return memory
    return DTensor.from_local(
        memory,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def is_first_holder(tensor: DTensor) -> bool:
    """Tells whether something of a tensor is here, and this rank is the first of its mesh that holds the same part."""
    place = tensor.device_mesh.get_coordinate()
    if place is None or not local(tensor).numel():
        return False
    return all(index == 0 or not kind.is_replicate() for index, kind in zip(place, tensor.placements, strict=True))


def is_whole_on_tensor_ranks(tensor: Tensor) -> bool:
    """Tells whether every tensor rank of a mesh with such ranks has the same of the tensor."""
    if not isinstance(tensor, DTensor):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    return TENSOR in names and tensor.placements[names.index(TENSOR)].is_replicate()


def is_first_of_tensor_ranks(tensor: Tensor) -> bool:
    """Tells whether no tensor rank before this one has the same of the tensor."""
    if not (isinstance(tensor, DTensor) and is_whole_on_tensor_ranks(tensor)):
        return True
    return tensor.device_mesh.get_local_rank(TENSOR) == 0
