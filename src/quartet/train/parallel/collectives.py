"""Collectives of a sharded model that torch lets us bring: gathers and sums by messages from rank to rank.

**Order.** A library's all-reduce and reduce-scatter may add in any order, which can depend on its version, on sizes and
on which machines take part. ``OrderedReduceScatter`` sends every rank the addends, and adds them up there, one rank
after the other: the same seed on the same mesh gives the same bits. It needs the addends' memory, and as many bytes on
the wire as a ring.

**Speed.** gloo's own are slow between processes of one machine: 64 MiB over two ranks take it 118 ms to gather and
141 ms to reduce and scatter, and 30 and 56 ms this way (2 cores). So CPUs use these whether or not order is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    AllGather,
    DefaultAllGather,
    DefaultReduceScatter,
    ReduceScatter,
)

from quartet.models.work import WorkCounter


def swap(sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sends ``sent[i]`` to rank ``i`` of the group, whose part for this rank comes to ``received[i]``; parts may be
    empty.
    """
    size, rank = group.size(), group.rank()
    under_way = []
    for distance in range(1, size):
        # Every rank begins with its neighbour, so that not all send to one.
        target, source = (rank + distance) % size, (rank - distance) % size
        if sent[target].numel():
            under_way.append(dist.P2POp(dist.isend, sent[target], group=group, group_peer=target))
        if received[source].numel():
            under_way.append(dist.P2POp(dist.irecv, received[source], group=group, group_peer=source))
    for work in dist.batch_isend_irecv(under_way) if under_way else ():
        work.wait()
    if received[rank].data_ptr() != sent[rank].data_ptr():
        received[rank].copy_(sent[rank])


def add_up(addends: Sequence[Tensor], total: Tensor) -> None:
    """Writes ``total = addends[0] + addends[1] + …``, added from the left, halves in fp32: they are rounded once."""
    wide = total if total.itemsize > 2 else torch.empty_like(total, dtype=torch.float32)
    wide.copy_(addends[0])
    for addend in addends[1:]:
        wide.add_(addend)
    total.copy_(wide)


def sum_in_order(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Replaces ``tensor`` by its sum over the group."""
    addends = [torch.empty_like(tensor) for _ in range(group.size())]
    swap([tensor] * group.size(), addends, group)
    add_up(addends, tensor)


class _Counted:
    """A collective, FSDP's own or another, whose bytes that this rank sends are counted."""

    kind: str

    def __init__(self, collective: Any, work: WorkCounter) -> None:
        self._collective = collective
        self._work = work

    def allocate(self, *size: Any, **options: Any) -> Tensor:
        allocated: Tensor = self._collective.allocate(*size, **options)
        return allocated

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, *args: Any, **options: Any
    ) -> Any:
        found = self._collective(output_tensor, input_tensor, group, *args, **options)
        self._work.sent[self.kind] += (group.size() - 1) * min(input_tensor.nbytes, output_tensor.nbytes)
        return found


class CountedAllGather(_Counted, AllGather):
    """To give to ``set_custom_all_gather``."""

    kind = "all-gather"


class CountedReduceScatter(_Counted, ReduceScatter):
    """To give to ``set_custom_reduce_scatter``."""

    kind = "reduce-scatter"


class DirectAllGather(DefaultAllGather):
    """In the place of FSDP's own: every rank sends its part to all others."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        swap([input_tensor] * group.size(), output_tensor.chunk(group.size()), group)


class OrderedReduceScatter(DefaultReduceScatter):
    """In the place of FSDP's own; see the module's docstring."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """The sum of every rank's part for this rank.

        Raises:
            ValueError: something else than a sum is asked for.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"only sums have an order, and {op} is asked for")
        addends = torch.empty_like(input_tensor).chunk(group.size())
        swap(input_tensor.chunk(group.size()), addends, group)
        add_up(addends, output_tensor)
