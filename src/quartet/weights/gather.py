"""Whole tensors of sharded ones, one at a time, on the first rank of their mesh alone or on all.

All ranks of the mesh make the same calls in the same order. The first one holds one whole tensor at a time beside its
own shards. The others hold nothing, or where a tensor is cut along two dimensions of the mesh, as by FSDP and tensor
parallelism, some of them what they pass on: one part of it by the first of these. Ranks with replicas of what the first
one has take no part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

Place = tuple[int, ...]
"""A rank's coordinates in a mesh."""


def slices_at(tensor: DTensor, place: Sequence[int]) -> tuple[slice, ...]:
    """Which part of the whole tensor is on the rank at ``place`` of its mesh.

    For a dimension that is cut twice torch's own answer is only right where it divides.
    """
    slices = [slice(0, size) for size in tensor.shape]
    # From the last on: FSDP cuts what tensor parallelism has cut, and has the dimension of the mesh before it.
    for index, kind, size in reversed([*zip(place, tensor.placements, tensor.device_mesh.shape, strict=True)]):
        if not kind.is_replicate():
            dim: int = kind.dim  # type: ignore[attr-defined]
            cut = slices[dim]
            step = -(-(cut.stop - cut.start) // size)
            slices[dim] = slice(*(min(cut.start + step * i, cut.stop) for i in (index, index + 1)))
    return tuple(slices)


@torch.no_grad()
def gather(tensor: Tensor, *, everywhere: bool = False) -> Tensor | None:
    """The whole tensor on the first rank of its mesh, None on the others; a plain tensor as it is. Collective.

    Args:
        everywhere: on all ranks of the mesh; those that hold a copy between them gather from each other.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    place = tuple(coordinate)
    cut = [dim for dim, kind in enumerate(tensor.placements) if not kind.is_replicate()]
    if not everywhere and any(index for dim, index in enumerate(place) if dim not in cut):
        return None  # a replica
    here = tensor.to_local().contiguous()
    if here.device.type != mesh.device_type:
        here = here.to(mesh.device_type)  # it is offloaded
    if not cut:
        return here
    parts, whole = {place: here}, None
    if everywhere or not any(place):
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=here.device)
        parts[place] = whole[slices_at(tensor, place)]
        if here.numel():
            parts[place].copy_(here)
        del here
    for dim in reversed(cut):
        parts = _joined(tensor, parts, dim, whole, everywhere=everywhere)
    return whole


def _joined(
    tensor: DTensor, parts: dict[Place, Tensor], dim: int, whole: Tensor | None, *, everywhere: bool
) -> dict[Place, Tensor]:
    """``parts``, by place, and those that the other ranks along ``dim`` of the mesh have, on the first of them or on
    all; nothing on those that have given theirs away. In ``whole``, if it is here, they come to their place."""
    group, index = tensor.device_mesh.get_group(dim), tensor.device_mesh.get_local_rank(dim)
    ranks, found = dist.get_process_group_ranks(group), dict(parts)
    for distance in range(1, len(ranks)):
        target, source = (index + distance) % len(ranks), (index - distance) % len(ranks)
        exchanged, arriving = [], []
        if everywhere or target == 0:
            sent = (part.contiguous() for part in parts.values() if part.numel())
            exchanged += [dist.P2POp(dist.isend, part, ranks[target], group) for part in sent]
        for place, part in parts.items() if everywhere or index == 0 else ():
            other = (*place[:dim], source, *place[dim + 1 :])
            slices = slices_at(tensor, other)
            new = whole[slices] if whole is not None else part.new_empty([s.stop - s.start for s in slices])
            found[other] = new
            if new.numel():
                # Columns of the whole are not in one piece.
                arriving.append((new, new if new.is_contiguous() else new.new_empty(new.shape)))
        exchanged += [dist.P2POp(dist.irecv, arrived, ranks[source], group) for _, arrived in arriving]
        for work in dist.batch_isend_irecv(exchanged) if exchanged else []:
            work.wait()
        for new, arrived in arriving:
            if arrived is not new:
                new.copy_(arrived)
    return found if everywhere or index == 0 else {}
