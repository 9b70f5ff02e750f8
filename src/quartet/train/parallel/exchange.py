"""What the ranks of a role tell each other around passes that they compute together.

An update is, on every rank:

1. *begin*: all have the same batches, budget, number of updates and, the first time, weights. Passes are collective, so
   ranks that disagree must stop before the first. Before forward-only passes the peers of a data rank compare theirs.
2. *passes*: equally many on all ranks; a rank that has fewer micro-batches makes idle passes, which weigh nothing.
3. *agree*: how the passes went, with their metric sums, of peers once. Where memory ran out on one rank, all start over
   with the same smaller budget; where one failed, all fail.
4. *norm* and *check*: the gradients' norm over their parts; how the step went, and that all saw the same gradient.

A rank that fails outside of its passes says so in the exchange that the others wait in. One that fails in a pass makes
idle passes to the end, the first of them without the collectives that it has taken part in, and says so then.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from quartet.batch.partition import Atoms
from quartet.batch.ragged import RaggedBatch
from quartet.train.metrics import MetricSums, PlainSums
from quartet.train.parallel.fsdp import ShardedModel, fingerprint
from quartet.train.parallel.mesh import DataParallelGroup, RankFailed, is_broken_collective
from quartet.train.parallel.pass_group import PeerFailed
from quartet.train.parallel.tensors import is_whole_on_tensor_ranks, local
from quartet.train.token_budget import OutOfMemoryElsewhere, TokenBudget, is_out_of_memory

T = TypeVar("T")

Plans = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Report:
    """What a rank sends in an exchange.

    Attributes:
        failure: type and message of an exception.
        is_broken: the exception is that of a collective, which another rank's failure has broken.
        out_of_memory: the allocator's message.
        outset: what all ranks that have it must have in common when an update begins, by name.
        sums, present: of this rank's passes.
        value: whatever ``gather`` is given.
    """

    failure: str | None = None
    is_broken: bool = False
    out_of_memory: str | None = None
    outset: Mapping[str, str] = field(default_factory=dict)
    sums: PlainSums | None = None
    present: frozenset[str] = frozenset()
    value: Any = None


class RankExchange:
    """This rank's part in what all ranks of a role compute together; see the module's docstring.

    Args:
        ranks: which compute together; all of the role where they are left out.
    """

    def __init__(self, root: ShardedModel, ranks: DataParallelGroup | None = None) -> None:
        self.root = root
        self.data = ranks if ranks is not None else root.mesh.data
        self._is_compared = False

    @contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Tells the other ranks of a failure inside before it goes on, so that they do not wait for this one.

        Within another one for the same ranks it leaves that to the outer one. Within one for more ranks both tell it.
        """
        if self.data.is_reporting:
            yield
            return
        self.data.is_reporting = True
        try:
            yield
        except (Exception, SystemExit) as error:  # Whatever a rank fails of, the others must not wait for it.
            if isinstance(error, RankFailed) and set(self.data.ranks) <= set(error.known_to):
                raise
            is_broken = is_broken_collective(error)
            try:
                # Where a collective has passed its limit, those that still live fail as this one does.
                limit = self.root.mesh.time_limit if is_broken else None
                reports = self.data.gather(Report(failure=_summary(error), is_broken=is_broken), within=limit)
            except RankFailed as unreachable:
                if is_broken:
                    raise unreachable from error
            else:
                if is_broken:
                    raise self._rank_failed(reports) from error
            raise
        finally:
            self.data.is_reporting = False

    # Updates ---------------------------------------------------------------------------------------------

    def accumulate(
        self,
        backward: Callable[[Plans], MetricSums],
        batches: Sequence[tuple[RaggedBatch, Atoms]],
        budget: TokenBudget,
        *,
        share: bool,
        token_cost: int,
        num_updates: int,
    ) -> MetricSums:
        """Leaves the gradients of whole batches in the parameters.

        Args:
            backward: ``(plans)`` makes gradients of this rank's micro-batches of every batch, equally many on all
                ranks; some are empty.
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
        mesh, outset = self.root.mesh, self._outset(num_updates, [batch for batch, _ in batches])

        def work(plans: Plans) -> tuple[MetricSums, frozenset[str]]:
            self._begin({**outset, budget.key: str(budget.tokens)})
            return self._attempt(lambda: backward(plans))

        sums, present = budget.run_several(
            work, batches, share=share, token_cost=token_cost, rank=mesh.data_rank, num_ranks=mesh.num_data_ranks
        )
        # Not among what is started over: from here on a rank would do so alone.
        try:
            self.root.sum_gradients(present)
        except PeerFailed:
            self._exchange(Report())  # in which the rank that failed says of what
            raise
        return sums

    def _outset(self, num_updates: int, batches: Sequence[RaggedBatch]) -> dict[str, str]:
        """Describes where an update begins; the weights themselves are compared in the first one alone."""
        found = {"number of updates": str(num_updates), "number of batches": str(len(batches))}
        for i, batch in enumerate(batches):
            found[f"batch {i}"] = contents(batch)
        if not self._is_compared:
            if self.root.former_weights is not None:
                found["weights"] = self.root.former_weights
            mesh, parameters = self.root.mesh, list(self.root.model.parameters())
            found[f"weights of part {mesh.place}"] = fingerprint(map(local, parameters))
            alike = map(local, filter(is_whole_on_tensor_ranks, parameters))
            found[f"weights that tensor ranks have alike, {mesh.place // mesh.tensor}"] = fingerprint(alike)
        return found

    def _begin(self, outset: Mapping[str, str]) -> None:
        outsets = [report.outset for report in self._exchange(Report(outset=outset))]
        if found := _difference(outsets):
            raise RuntimeError(
                f"ranks that train one model began an update differently: {found}; every rank needs the whole "
                "mini-batch and the same state"
            )
        self._is_compared = True

    def _attempt(self, backward: Callable[[], MetricSums]) -> tuple[MetricSums, frozenset[str]]:
        """Computes the whole batches' metric sums under one budget, and which parameters had a gradient on any rank.

        Raises:
            torch.OutOfMemoryError: on all ranks, where memory ran out on one.
        """
        heard = None
        try:
            report = Report(sums=backward().plain(), present=frozenset(self.root.present))
        except PeerFailed as error:
            report, heard = Report(), error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            report = Report(out_of_memory=_summary(error))
        # Not in the handler: until it ends, its traceback holds the tensors of the failed attempt.
        reports = self._exchange(report)
        self._raise_out_of_memory(reports)
        if heard is not None:
            raise heard
        first_peers = reports[self.root.mesh.first_peers]
        sums = MetricSums.joined(other.sums for other in first_peers if other.sums is not None)
        return sums, frozenset[str]().union(*(other.present for other in reports))

    def total_norm(self, own: float) -> float:
        """Computes the norm of all gradients, of which every rank of a copy has a part with norm ``own``."""
        mesh = self.root.mesh
        first = self.data.rank - mesh.place
        return math.hypot(*self.gather(own)[first : first + mesh.copy.size])

    def check_step(self, grad_norm: float) -> None:
        """Waits until all ranks have made their step.

        Raises:
            RankFailed: another rank failed in it.
            RuntimeError: the ranks had different gradients.
        """
        norms = self.gather(grad_norm)
        # Equal but for other processors' rounding.
        if not all(_is_same(norm, norms[0]) for norm in norms):
            raise RuntimeError(f"the ranks' models have come apart: gradient norms by rank {norms}")

    # Forward-only passes ---------------------------------------------------------------------------------

    def most_passes(self, batch: RaggedBatch, parts: Sequence[Sequence[int]]) -> int:
        """Passes that every rank must make, where this one has these micro-batches, its peers the same.

        Raises:
            RuntimeError: on all ranks, where peers have others.
        """
        mesh = self.root.mesh
        plan = f"{contents(batch)} as {len(parts)} micro-batches ({zlib.crc32(repr(parts).encode()):08x})"
        found = self.gather((len(parts), {f"the batch of data rank {mesh.data_rank}": plan}))
        if different := _difference([outset for _, outset in found]):
            raise RuntimeError(f"ranks that compute one part of a batch together have different ones: {different}")
        return max(num_passes for num_passes, _ in found)

    @contextmanager
    def retrying_together(self) -> Iterator[None]:
        """Has ranks fail together in forward-only passes, which they make with budgets of their own: where memory runs
        out on one rank, ``torch.OutOfMemoryError`` on all, and ``OutOfMemoryElsewhere`` where there was enough.

        Raises:
            RankFailed: another rank failed.
        """
        report, heard = Report(), None
        try:
            yield
        except PeerFailed as error:
            heard = error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            report = Report(out_of_memory=_summary(error))
        reports = self._exchange(report)
        is_here = report.out_of_memory is not None
        self._raise_out_of_memory(reports, torch.OutOfMemoryError if is_here else OutOfMemoryElsewhere)
        if heard is not None:
            raise heard

    # Reports ---------------------------------------------------------------------------------------------

    def gather(self, value: T) -> list[T]:
        """Gathers every rank's value, in the order of the ranks.

        Raises:
            RankFailed: another rank failed.
        """
        return [report.value for report in self._exchange(Report(value=value))]

    def _exchange(self, report: Report) -> list[Report]:
        reports = self.data.gather(report)
        if any(found.failure is not None for found in reports):
            raise self._rank_failed(reports)
        return reports

    def _rank_failed(self, reports: Sequence[Report]) -> RankFailed:
        """Makes the error that tells what the failed ranks say; of those that failed through others only where nothing
        else is known.
        """
        failed = [
            (f"{self._name(rank)}: {said}", found.is_broken)
            for rank, found in enumerate(reports)
            if (said := found.failure or found.out_of_memory) is not None
        ]
        causes = [told for told, is_broken in failed if not is_broken] or [told for told, _ in failed]
        named = "; ".join(causes)
        return RankFailed(f"another rank failed in this update: {named}", self.data.ranks)

    def _raise_out_of_memory(self, reports: Sequence[Report], kind: type[Exception] = torch.OutOfMemoryError) -> None:
        for rank, other in enumerate(reports):
            if other.out_of_memory is not None:
                raise kind(f"{self._name(rank)}: {other.out_of_memory}")

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {self.data.size}"


def contents(batch: RaggedBatch) -> str:
    """Tells batches apart by everything that passes read of them."""
    tensors = {"": batch.input_ids, **batch.token, **batch.sequence}
    crc = zlib.crc32(repr((batch.ids, batch.segment_lengths, batch.parents, batch.leaves, sorted(tensors))).encode())
    for name in sorted(tensors):
        values = tensors[name].detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
        crc = zlib.crc32(values.view(torch.uint8).numpy().data, crc)
    return f"{len(batch)} sequences of {batch.num_tokens} tokens ({crc:08x})"


def _difference(outsets: Sequence[Mapping[str, str]]) -> str | None:
    """Finds the first name under which ranks have different values, in words; not all need have it."""
    known: dict[str, tuple[int, str]] = {}
    for rank, outset in enumerate(outsets):
        for name, value in outset.items():
            first, expected = known.setdefault(name, (rank, value))
            if value != expected:
                return f"{name} of rank {first}: {expected}, of rank {rank}: {value}"
    return None


def _is_same(norm: float, other: float) -> bool:
    if not (math.isfinite(norm) and math.isfinite(other)):
        return math.isfinite(norm) == math.isfinite(other)
    return math.isclose(norm, other, rel_tol=1e-5)


def _summary(error: BaseException) -> str:
    """Returns the error's type and first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
