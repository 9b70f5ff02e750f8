"""Ranks that compute one pass together: what they exchange within it, and how they all hear that one has failed.

Shapes: n_r rows of rank r, N their sum; H heads, D head size, t_r tokens of rank r.

**Words.** Before every exchange, its memory allocated, and at the end of a pass a rank tells each other rank of the
group by one byte whether it is still in the pass. A rank that fails sends ``FAILED`` as its next word and goes no
further; so the others hear it at that word, wherever they are by then, and raise ``PeerFailed``. They send it on in
their other group. So each pass ends in every group with one word that all its ranks have sent, nobody waits for a time
limit, and the next pass begins with nothing on its way. After a failure, and where it has nothing to compute, a rank
makes *idle passes*, in which it exchanges nothing and takes zeros for what others would send.

**Order.** Parts travel as direct messages, and are added up in the order of the ranks: the same bits every time, and as
many bytes as a ring's.
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
from quartet.train.parallel.collectives import add_up, sum_in_order, swap

IN_PASS, FAILED = 0, 1


def near_equal(num_rows: int, size: int) -> tuple[int, ...]:
    """Deals ``num_rows`` rows to ``size`` ranks, one after the other; their numbers differ by one at most."""
    return tuple(num_rows * (rank + 1) // size - num_rows * rank // size for rank in range(size))


class PeerFailed(Exception):
    """A rank that computes the same pass failed in it; what it failed of is told when the passes have ended."""

    is_echo = True


class PassGroup:
    """Ranks among which the rows (tensor) or tokens (context) of every pass are cut.

    All of them call the same methods in the same order. Gradients go through all methods but ``stack``.

    Args:
        name: ``tensor``, ``context`` or, for sums between passes, ``replicate``.
        words: a gloo group of the same ranks; ``group`` itself where that is one.
        work: counts the bytes that this rank sends, words left out.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, words: dist.ProcessGroup, work: WorkCounter) -> None:
        self.name = name
        self.size, self.rank = group.size(), group.rank()
        self._group = group
        self._words = words
        self._work = work
        self._is_idle = False
        self._is_told = True  # this pass's last word
        self._pending: list[Any] = []

    # Passes ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins a pass that is computed together, or sums between passes."""
        self._is_idle = self._is_told = False

    def idle(self) -> None:
        """Stops exchanging until the next ``begin``. Where this rank was in a pass, the others hear that it failed."""
        if not (self._is_idle or self._is_told):
            self._pending, _ = self._post(FAILED)
        self._is_idle = True

    def end(self) -> None:
        """Ends a pass.

        Raises:
            PeerFailed: another rank failed in it.
        """
        if not self._is_idle:
            self.hear()
            self._is_told = True

    def settle(self) -> None:
        """Waits for the words of the others that belong to the one with which this rank failed."""
        for work in self._pending:
            work.wait()
        self._pending = []

    def hear(self) -> None:
        """Tells the others that this rank is in the pass, and waits for their words.

        Raises:
            PeerFailed: another rank failed in it.
        """
        under_way, heard = self._post(IN_PASS)
        for work in under_way:
            work.wait()
        failed = [rank for rank, word in enumerate(heard.tolist()) if word == FAILED]
        if failed:
            self._is_told = True
            raise PeerFailed(f"rank {failed[0]} of the {self.name} group failed in this pass")

    def _post(self, word: int) -> tuple[list[Any], Tensor]:
        sent = torch.tensor([word], dtype=torch.uint8)
        heard = torch.full((self.size,), IN_PASS, dtype=torch.uint8)
        under_way = []
        for rank in range(self.size):
            if rank != self.rank:
                under_way.append(self._words.send([sent], rank, 0))
                under_way.append(self._words.recv([heard[rank : rank + 1]], rank, 0))
        return under_way, heard

    # Exchanges -------------------------------------------------------------------------------------------

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
        """Replaces ``x`` by its sum over the ranks, added in their order or in the library's. No part of a pass."""
        if in_order:
            sum_in_order(x, self._group, self.hear)
        else:
            self.hear()
            dist.all_reduce(x, group=self._group)
        of_each = (self.size - 1) * x.nbytes
        self._work.sent["all-reduce"] += of_each if in_order else 2 * of_each // self.size  # of a ring

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
        if self._is_idle:
            for part in (part for rank, part in enumerate(received) if rank != self.rank):
                part.zero_()
            if received[self.rank].data_ptr() != sent[self.rank].data_ptr():
                received[self.rank].copy_(sent[self.rank])
            return
        self.hear()
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
