"""Sums over ranks in the order of the ranks.

A library's all-reduce and reduce-scatter may add in any order, which can depend on its version, on sizes and on which
machines take part. Here every rank is sent the addends and adds them up itself, one rank after the other: the same seed
on the same mesh gives the same bits. It costs the addends' memory, and as many bytes as a reduce-scatter by rings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


class FixedOrderReduceScatter(ReduceScatter):
    """In the place of FSDP's own."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """The sum of every rank's part for this rank.

        Raises:
            ValueError: something else than a sum is asked for.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"only sums have an order, and {op} is asked for")
        addends = torch.empty_like(input_tensor)
        dist.all_to_all_single(addends, input_tensor, group=group)
        add_up(addends.chunk(group.size()), output_tensor)


def add_up(addends: Sequence[Tensor], total: Tensor) -> None:
    """``total = addends[0] + addends[1] + …``, added from the left."""
    total.copy_(addends[0])
    for addend in addends[1:]:
        total.add_(addend)


def sum_in_place(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Replaces ``tensor`` by its sum over the group."""
    addends = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(addends, tensor.contiguous(), group=group)
    add_up(addends, tensor)
