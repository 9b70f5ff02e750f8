"""What ranks send each other: within a pass that they compute together, and to sum gradients.

Shapes: n_r rows of rank r, N their sum; H heads, D head size, t_r tokens of rank r.

**Order.** A library's all-reduce and reduce-scatter may add in any order, which can depend on its version, on sizes and
on which machines take part. Here parts travel as direct messages, and are added up in the order of the ranks: the same
bits every time, and as many bytes as a ring's.

**Speed.** gloo's own are slow between processes of one machine: 64 MiB over two ranks take it 118 ms to gather and
141 ms to reduce and scatter, and 30 and 56 ms this way (2 cores). So CPUs use these whether or not order is asked for.

A rank that fails in a pass leaves the others in an exchange: they end with its process, or by the time limit of the
process group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from quartet.models.work import WorkCounter

# torch 2.13 has new names for them.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def swap(sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sends ``sent[i]`` to rank ``i`` of the group, whose part for this rank comes to ``received[i]``; parts may be
    empty, and all are contiguous.
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


class _Collective:
    """One of torch's ``fully_shard``, whose bytes that this rank sends are counted.

    Args:
        direct: by direct messages; else the library's.
    """

    def __init__(self, work: WorkCounter, *, direct: bool) -> None:
        self._work = work
        self._direct = direct

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Makes memory for what is sent or received."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Collective):
    """Gathers every rank's part on all of them, for ``set_custom_all_gather``."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._work.sent["all-gather"] += (group.size() - 1) * input_tensor.nbytes
        if not self._direct:
            found: dist.Work | None = _all_gather(output_tensor, input_tensor, group, async_op)
            return found
        swap([input_tensor] * group.size(), output_tensor.chunk(group.size()), group)
        return None


class ReduceScatter(_Collective):
    """Sums every rank's part for this rank, for ``set_custom_reduce_scatter``. Directly it needs the addends' memory,
    and as many bytes on the wire as a ring.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self._work.sent["reduce-scatter"] += (group.size() - 1) * output_tensor.nbytes
        if not self._direct:
            found: dist.Work | None = _reduce_scatter(output_tensor, input_tensor, op, group, async_op)
            return found
        addends = torch.empty_like(input_tensor).chunk(group.size())
        swap(input_tensor.chunk(group.size()), addends, group)
        add_up(addends, output_tensor)
        return None


def near_equal(num_rows: int, size: int) -> tuple[int, ...]:
    """Deals ``num_rows`` rows to ``size`` ranks, one after the other; their numbers differ by one at most."""
    return tuple(num_rows * (rank + 1) // size - num_rows * rank // size for rank in range(size))


class PassGroup:
    """Ranks among which the rows (tensor) or tokens (context) of every pass are cut.

    All of them call the same methods in the same order. Gradients go through all methods but ``stack``.

    Args:
        work: counts the bytes that this rank sends.
    """

    def __init__(self, group: dist.ProcessGroup, work: WorkCounter) -> None:
        self.size, self.rank = group.size(), group.rank()
        self._group = group
        self._work = work

    def gather_rows(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Gathers ``[n_r, …] → [N, …]``, where ranks go on differently; backward: the sum of their
        gradients, own rows.
        """
        return _exchanged(x, partial(self._gather, sizes=sizes), partial(self._sum, sizes=sizes))

    def scatter_rows(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Sums addends ``[N, …]`` → the own rows ``[n_r, …]`` of their sum; backward: gathered."""
        return _exchanged(x, partial(self._sum, sizes=sizes), partial(self._gather, sizes=sizes))

    def join_rows(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Joins ``[n_r, …] → [N, …]``, where all ranks go on with the same; backward: own rows, nothing is
        exchanged.
        """
        return _exchanged(x, partial(self._gather, sizes=sizes), lambda grad: grad.split(list(sizes))[self.rank])

    def gather_columns(self, x: Tensor) -> Tensor:
        """Gathers ``[…, n] → […, n · size]``; backward: the sum of the ranks' gradients, own columns."""
        return _exchanged(x, self._gather_columns, self._sum_columns)

    def to_heads(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Exchanges ``[1, H, t_r, D] → [1, H / size, Σ t, D]``: all tokens of the own heads. ``sizes`` are tokens."""
        return _exchanged(x, partial(self._to_heads, sizes=sizes), partial(self._to_tokens, sizes=sizes))

    def to_tokens(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Exchanges ``[1, H / size, Σ t, D] → [1, H, t_r, D]``: the way back."""
        return _exchanged(x, partial(self._to_tokens, sizes=sizes), partial(self._to_heads, sizes=sizes))

    @torch.no_grad()
    def stack(self, x: Tensor) -> Tensor:
        """Gathers ``[size, *x.shape]`` of equal shapes, in the order of the ranks, without gradient."""
        return self._gather(x.detach().unsqueeze(0), [1] * self.size)

    def sum_up(self, x: Tensor, *, in_order: bool) -> None:
        """Replaces ``x``, contiguous, by its sum over the ranks, added in their order or in the library's. No part of a
        pass.
        """
        if in_order:
            # Each rank adds up a part, which it sends to all.
            parts = x.view(-1).tensor_split(self.size)
            own = parts[self.rank]
            addends = [torch.empty_like(own) for _ in parts]
            swap(parts, addends, self._group)
            add_up(addends, own)
            swap([own] * self.size, parts, self._group)
        else:
            dist.all_reduce(x, group=self._group)
        self._work.sent["all-reduce"] += 2 * (self.size - 1) * x.nbytes // self.size

    def _gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        own, whole = x.contiguous(), x.new_empty(sum(sizes), *x.shape[1:])
        self._swap("all-gather", [own] * self.size, whole.split(list(sizes)))
        return whole

    def _sum(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        parts = x.contiguous().split(list(sizes))
        total = torch.empty_like(parts[self.rank])
        addends = [total if rank == self.rank else torch.empty_like(total) for rank in range(self.size)]
        addends[self.rank] = parts[self.rank]  # which is not copied
        self._swap("reduce-scatter", parts, addends)
        add_up(addends, total)
        return total

    def _gather_columns(self, x: Tensor) -> Tensor:
        parts = self._gather(x.unsqueeze(0), [1] * self.size)
        return parts.movedim(0, -2).flatten(-2)

    def _sum_columns(self, grad: Tensor) -> Tensor:
        parts = grad.unflatten(-1, (self.size, -1)).movedim(-2, 0)
        return self._sum(parts, [1] * self.size).squeeze(0)

    def _to_heads(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        parts = x[0].contiguous().chunk(self.size)
        received = [x.new_empty(len(parts[0]), size, x.shape[-1]) for size in sizes]
        self._swap("all-to-all", parts, received)
        return torch.cat(received, 1).unsqueeze(0)

    def _to_tokens(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        parts = [part.contiguous() for part in x[0].split(list(sizes), 1)]
        whole = x.new_empty(self.size, *parts[self.rank].shape)
        self._swap("all-to-all", parts, whole.unbind())
        return whole.flatten(0, 1).unsqueeze(0)

    def _swap(self, kind: str, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Sends ``sent[r]`` to rank r, whose part comes to ``received[r]``; all are contiguous."""
        swap(sent, received, self._group)
        self._work.sent[kind] += sum(part.nbytes for rank, part in enumerate(sent) if rank != self.rank)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def _exchanged(x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns ``there(x)``, whose gradient goes through ``back``."""
    found: Tensor = _Exchange.apply(x, there, back)
    return found
