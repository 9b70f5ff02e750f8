"""Whole tensors of sharded ones, one at a time, on the first rank of their mesh alone.

All ranks of the mesh make the same calls in the same order. The first one holds one whole tensor at a time beside its
own shards, the others nothing; ranks with replicas of what it has take no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def gathered(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor | None]]:
    """The tensors by their names, whole, each valid until the next one is asked for; as ``gather`` gives them."""
    for name, tensor in named:
        yield name, gather(tensor)


@torch.no_grad()
def gather(tensor: Tensor) -> Tensor | None:
    """The whole tensor on the first rank of its mesh, None on the others; a plain tensor as it is. Collective."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert place is not None
    sharded = [dim for dim, kind in enumerate(tensor.placements) if not kind.is_replicate()]
    if any(index for dim, index in enumerate(place) if dim not in sharded):
        return None  # a replica
    here = tensor.to_local().contiguous()
    if here.device.type != mesh.device_type:
        here = here.to(mesh.device_type)  # it is offloaded
    if not sharded:
        return here
    if len(sharded) > 1 or tensor.placements[sharded[0]] != Shard(0):
        whole = tensor.full_tensor()
        return whole if not any(place) else None
    (dim,) = sharded
    group, rank = mesh.get_group(dim), place[dim]
    ranks = dist.get_process_group_ranks(group)
    if rank:
        _exchange([dist.P2POp(dist.isend, here, ranks[0], group)] if here.numel() else [])
        return None
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=here.device)
    parts = whole.split(max(1, -(-len(whole) // len(ranks))))
    if parts[0].numel():
        parts[0].copy_(here)
        others = zip(parts[1:], ranks[1:], strict=False)  # of a small tensor the last ranks have nothing
        _exchange([dist.P2POp(dist.irecv, part, other, group) for part, other in others])
    return whole


@torch.no_grad()
def gather_everywhere(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank that holds a part of the same copy; a plain tensor as it is. Collective."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    here, mesh = tensor.to_local(), tensor.device_mesh
    if here.device.type != mesh.device_type:  # it is offloaded
        there = here.to(mesh.device_type)
        options: dict[str, Any] = {"shape": tensor.shape, "stride": tensor.stride()}
        tensor = DTensor.from_local(there, mesh, tensor.placements, run_check=False, **options)
    return tensor.full_tensor()


def is_first(tensors: Iterable[Tensor]) -> bool:
    """Whether this rank gets what ``gather`` makes of the tensors."""
    meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    return not any(any(mesh.get_coordinate() or ()) for mesh in meshes)


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
