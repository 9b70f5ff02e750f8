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
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from quartet.models.work import WorkCounter


def swap(sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """``sent[i]`` goes to rank ``i`` of the group, whose part for this rank comes to ``received[i]``."""
    size, rank = group.size(), group.rank()
    under_way = []
    for distance in range(1, size):
        # Every rank begins with its neighbour, so that not all send to one.
        target, source = (rank + distance) % size, (rank - distance) % size
        under_way.append(dist.P2POp(dist.isend, sent[target], group=group, group_peer=target))
        under_way.append(dist.P2POp(dist.irecv, received[source], group=group, group_peer=source))
    for work in dist.batch_isend_irecv(under_way) if under_way else ():
        work.wait()
    if received[rank].data_ptr() != sent[rank].data_ptr():
        received[rank].copy_(sent[rank])


def add_up(addends: Sequence[Tensor], total: Tensor) -> None:
    """``total = addends[0] + addends[1] + …``, added from the left."""
    total.copy_(addends[0])
    for addend in addends[1:]:
        total.add_(addend)


def sum_in_order(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Replaces ``tensor`` by its sum over the group."""
    addends = [torch.empty_like(tensor) for _ in range(group.size())]
    swap([tensor] * group.size(), addends, group)
    add_up(addends, tensor)


class CountedAllGather(DefaultAllGather):
    """FSDP's own, which counts what this rank sends: its part to all others, by whichever ranks it goes."""

    def __init__(self, work: WorkCounter) -> None:
        super().__init__()
        self._work = work

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        self._work.sent_bytes += (group.size() - 1) * input_tensor.nbytes
        return super().__call__(output_tensor, input_tensor, group, async_op)


class CountedReduceScatter(DefaultReduceScatter):
    """FSDP's own, which counts what this rank sends: of each of the others' parts one addend."""

    def __init__(self, work: WorkCounter) -> None:
        super().__init__()
        self._work = work

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        self._work.sent_bytes += (group.size() - 1) * output_tensor.nbytes
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


class DirectAllGather(CountedAllGather):
    """In the place of FSDP's own: every rank sends its part to all others."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self._work.sent_bytes += (group.size() - 1) * input_tensor.nbytes
        swap([input_tensor] * group.size(), output_tensor.chunk(group.size()), group)


class OrderedReduceScatter(CountedReduceScatter):
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
        self._work.sent_bytes += (group.size() - 1) * output_tensor.nbytes
        addends = torch.empty_like(input_tensor).chunk(group.size())
        swap(input_tensor.chunk(group.size()), addends, group)
        add_up(addends, output_tensor)
