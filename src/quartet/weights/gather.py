"""Whole tensors of sharded ones, one at a time, on the first rank of their mesh alone or on all.

All ranks of the mesh make the same calls in the same order. The first one holds one whole tensor at a time beside its
own shards, the others nothing; ranks with replicas of what it has take no part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


@torch.no_grad()
def gather(tensor: Tensor, *, everywhere: bool = False) -> Tensor | None:
    """The whole tensor on the first rank of its mesh, None on the others; a plain tensor as it is. Collective.

    Args:
        everywhere: on all ranks of the mesh; those that hold a copy between them gather from each other.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert place is not None
    sharded = [dim for dim, kind in enumerate(tensor.placements) if not kind.is_replicate()]
    if not everywhere and any(index for dim, index in enumerate(place) if dim not in sharded):
        return None  # a replica
    here = tensor.to_local().contiguous()
    if here.device.type != mesh.device_type:
        here = here.to(mesh.device_type)  # it is offloaded
    if not sharded:
        return here
    if everywhere or len(sharded) > 1 or tensor.placements[sharded[0]] != Shard(0):
        options: dict[str, Any] = {"shape": tensor.shape, "stride": tensor.stride()}
        whole = DTensor.from_local(here, mesh, tensor.placements, run_check=False, **options).full_tensor()
        return whole if everywhere or not any(place) else None
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


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
