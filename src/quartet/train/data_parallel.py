"""Data-parallel training: several processes hold one model each and train as one.

Every rank is given the whole mini-batch, computes its share of it, and divides losses by the denominators of the whole,
so gradients are simply summed. All ranks then make the same step, so their models stay equal to the bit. An update is
three collective exchanges of all ranks:

1. *agree*: how each rank's passes went, with its metric sums. Where memory ran out on one, all start over with the same
   smaller budget; where one failed, all fail.
2. *sum*: one all-reduce of the gradients. Nothing is allocated in it, so no rank can fail while others wait.
3. *check*: how the step went, and that all saw the same gradient.

A rank that fails outside of its passes says so in the exchange that the others wait in.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quartet.batch.partition import Atoms
from quartet.batch.ragged import RaggedBatch
from quartet.train.metrics import MetricSums, PlainSums
from quartet.train.token_budget import TokenBudget, is_out_of_memory

T = TypeVar("T")
Plans = Sequence[Sequence[Sequence[int]]]

IN_PLACE_BYTES = 2**20
"""Gradients of this size are summed where they lie; smaller ones travel in one bucket."""


class RankFailed(Exception):
    """Another rank failed in an update, or cannot be reached any more; this rank's model took no part in it."""

    is_echo = True
    """Among failures of several ranks the other rank's is reported first."""


class DataParallelGroup:
    """The ranks that train one model together.

    Args:
        group: their process group; the default group where it is None.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    @classmethod
    def of_world(cls) -> DataParallelGroup:
        """All ranks of the default process group."""
        return cls()

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, in the order of the ranks.

        Raises:
            RankFailed: a rank is gone.
        """
        found: list[Any] = [None] * self.size
        with self._reaching():
            dist.all_gather_object(found, value, group=self._group)
        return found

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by its sum over all ranks, the same bits on every one; none may overlap another.

        Raises:
            RankFailed: a rank is gone.
        """
        with self._reaching():
            under_way = [dist.all_reduce(tensor, group=self._group, async_op=True) for tensor in tensors]
            for work in under_way:
                work.wait()

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankFailed(f"the other ranks of {self.size} cannot be reached any more: {error}") from error


# Gradients -----------------------------------------------------------------------------------------------


class GradientBuckets:
    """Gradients of all parameters, ready to be summed over ranks. Missing ones are put there as zeros.

    Large gradients are summed where they lie, small ones in a flat bucket, all in fp32 at least. Everything is
    allocated here and nothing in ``add_up``.

    Attributes:
        present: whose gradient was there, one character each, ``1`` or ``0``.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.present = "".join("0" if p.grad is None else "1" for p in parameters)
        self._in_place: list[Tensor] = []
        small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            if gradient.nbytes >= IN_PLACE_BYTES and gradient.dtype == dtype and gradient.is_contiguous():
                self._in_place.append(gradient)
            else:
                small.setdefault((gradient.device, dtype), []).append(gradient)
        self._buckets = [
            (torch.empty(sum(g.numel() for g in bucket), dtype=dtype, device=device), bucket)
            for (device, dtype), bucket in small.items()
        ]

    def add_up(self, dp_group: DataParallelGroup, present: Sequence[str]) -> None:
        """Sums over all ranks.

        Args:
            present: of each rank. A gradient that no rank had stays None on all.
        """
        for flat, bucket in self._buckets:
            for view, gradient in _views(flat, bucket):
                view.copy_(gradient)
        dp_group.add_up([*self._in_place, *(flat for flat, _ in self._buckets)])
        for flat, bucket in self._buckets:
            for view, gradient in _views(flat, bucket):
                gradient.copy_(view)
        for parameter, of_ranks in zip(self._parameters, zip(*present, strict=True), strict=True):
            if "1" not in of_ranks:
                parameter.grad = None


def _views(flat: Tensor, bucket: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each gradient with its place in the bucket."""
    places = flat.split([gradient.numel() for gradient in bucket])
    return ((place.view(gradient.shape), gradient) for place, gradient in zip(places, bucket, strict=True))


def fingerprint(parameters: Sequence[nn.Parameter]) -> str:
    """Tells models with different weights apart; not those whose weights are the same numbers in another order."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [p.detach().contiguous().view(integers[p.itemsize]).sum(dtype=torch.int64) for p in parameters]
    numbers = [int(total) for total in sums]
    return f"{zlib.crc32(repr((numbers, [tuple(p.shape) for p in parameters])).encode()):08x}"


# Exchanges -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What a rank sends in an exchange.

    Attributes:
        failure: type and message of an exception.
        out_of_memory: the allocator's message.
        outset: what all ranks must have in common when an update begins, by name.
        sums, present: of this rank's passes.
        grad_norm: of the step.
    """

    failure: str | None = None
    out_of_memory: str | None = None
    outset: Mapping[str, str] = field(default_factory=dict)
    sums: PlainSums | None = None
    present: str = ""
    grad_norm: float = 0.0


class Replica:
    """This rank's part in the updates of a model that several ranks train; see the module's docstring."""

    def __init__(self, dp_group: DataParallelGroup) -> None:
        self.dp_group = dp_group
        self._is_compared = False

    @contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """A failure inside is told to the other ranks before it goes on, so that they do not wait for this one."""
        try:
            yield
        except RankFailed:
            raise  # All others know it, too.
        except (Exception, SystemExit) as error:  # Whatever a rank fails of, the others must not wait for it.
            with suppress(RankFailed):
                self.dp_group.gather(Report(failure=_summary(error)))
            raise

    def accumulate(
        self,
        backward: Callable[[Plans], MetricSums],
        batches: Sequence[tuple[RaggedBatch, Atoms]],
        parameters: Sequence[nn.Parameter],
        budget: TokenBudget,
        *,
        share: bool,
        token_cost: int,
        num_updates: int,
    ) -> MetricSums:
        """Leaves the gradients of whole batches in ``parameters``.

        Args:
            backward: ``(plans)`` drops former gradients and makes those of this rank's micro-batches of every batch.
            batches: each with the sequences that must stay together.
            share: prompts are computed once.
            token_cost: as in ``plan_micro_batches``.
            num_updates: so far.

        Returns:
            The whole batches' metric sums.

        Raises:
            UserError: an atom is larger than the budget, or memory ran out at the smallest micro-batches; on all ranks.
            RankFailed: another rank failed.
            RuntimeError: the ranks did not begin with the same weights, batches and budget.
        """
        outset = self._outset(num_updates, [batch for batch, _ in batches], parameters)
        return budget.run_several(
            lambda plans: self._attempt(
                lambda: backward(plans), parameters, {**outset, budget.key: str(budget.tokens)}
            ),
            batches,
            share=share,
            token_cost=token_cost,
            rank=self.dp_group.rank,
            num_ranks=self.dp_group.size,
        )

    def _outset(
        self, num_updates: int, batches: Sequence[RaggedBatch], parameters: Sequence[nn.Parameter]
    ) -> dict[str, str]:
        """Where an update begins; the weights themselves are compared in the first one alone."""
        found = {"number of updates": str(num_updates)}
        for i, batch in enumerate(batches):
            ids = zlib.crc32("\n".join(batch.ids).encode())
            found[f"batch {i}"] = f"{len(batch)} sequences of {batch.num_tokens} tokens ({ids:08x})"
        if not self._is_compared:
            found["weights"] = fingerprint(parameters)
        return found

    def _attempt(
        self, backward: Callable[[], MetricSums], parameters: Sequence[nn.Parameter], outset: Mapping[str, str]
    ) -> MetricSums:
        """As ``accumulate`` under one budget; where memory ran out on one rank, ``torch.OutOfMemoryError`` on all."""
        buckets: GradientBuckets | None = None
        try:
            sums = backward().plain()
            buckets = GradientBuckets(parameters)
            report = Report(outset=outset, sums=sums, present=buckets.present)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            report = Report(outset=outset, out_of_memory=_summary(error))
        # Not in the handler: until it ends, its traceback holds the tensors of the failed attempt.
        reports = self._exchange(report)
        _check_outset(reports)
        for rank, other in enumerate(reports):
            if other.out_of_memory is not None:
                raise torch.OutOfMemoryError(f"{self._name(rank)}: {other.out_of_memory}")
        assert buckets is not None
        buckets.add_up(self.dp_group, [other.present for other in reports])
        self._is_compared = True
        return MetricSums.joined(other.sums for other in reports if other.sums is not None)

    def check_step(self, grad_norm: float) -> None:
        """Waits until all ranks have made their step.

        Raises:
            RankFailed: another rank failed in it.
            RuntimeError: the ranks had different gradients.
        """
        norms = [report.grad_norm for report in self._exchange(Report(grad_norm=grad_norm))]
        # Equal but for other processors' rounding.
        if not all(_is_same(norm, norms[0]) for norm in norms):
            raise RuntimeError(f"the ranks' models have come apart: gradient norms by rank {norms}")

    def _exchange(self, report: Report) -> list[Report]:
        reports = self.dp_group.gather(report)
        failures = [f"{self._name(r)}: {found.failure}" for r, found in enumerate(reports) if found.failure is not None]
        if failures:
            raise RankFailed("another rank failed in this update: " + "; ".join(failures))
        return reports

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {self.dp_group.size}"


def _check_outset(reports: Sequence[Report]) -> None:
    for rank, report in enumerate(reports):
        first = reports[0].outset
        for name in {**first, **report.outset}:
            ours, theirs = first.get(name, "none"), report.outset.get(name, "none")
            if ours != theirs:
                raise RuntimeError(
                    f"ranks that train one model began an update differently: {name} of rank 0: {ours}, of rank "
                    f"{rank}: {theirs}; every rank needs the whole mini-batch and the same state"
                )


def _is_same(norm: float, other: float) -> bool:
    if not (math.isfinite(norm) and math.isfinite(other)):
        return math.isfinite(norm) == math.isfinite(other)
    return math.isclose(norm, other, rel_tol=1e-5)


def _summary(error: BaseException) -> str:
    """Type and first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
