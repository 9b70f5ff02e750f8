"""What the ranks of a role tell each other around passes that they compute together.

An update is, on every rank:

1. *begin*: all have the same batches, budget, number of updates and, the first time, weights. Passes are collective, so
   ranks that disagree must stop before the first.
2. *passes*: equally many on all ranks; those of empty micro-batches weigh nothing.
3. *sums*: of metrics, of peers once, and of the gradients.
4. *norm*: of the gradients over their parts; all copies must have the same.

A rank that fails, wherever it is, ends the update: nothing is taken up again within it. The others, which wait in a
collective, end with it: torchrun and the driver on Ray end the whole group, and start it again. One that hangs is
noticed by the time limit.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from quartet.batch.partition import Atoms
from quartet.batch.ragged import RaggedBatch
from quartet.train.metrics import MetricSums
from quartet.train.parallel.data import ShardedModel, fingerprint
from quartet.train.parallel.mesh import DataParallelGroup
from quartet.train.parallel.tensors import is_first_of_tensor_ranks, is_whole_on_tensor_ranks, local
from quartet.train.token_budget import TokenBudget

Plans = Sequence[Sequence[Sequence[int]]]


class RankExchange:
    """This rank's part in what all ranks of a role compute together; see the module's docstring.

    Args:
        ranks: which compute together; all of the role where they are left out.
    """

    def __init__(self, root: ShardedModel, ranks: DataParallelGroup | None = None) -> None:
        self.root = root
        self.data = ranks if ranks is not None else root.mesh.data
        self._is_compared = False

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
            UserError: an atom is larger than the budget, or memory ran out on this rank.
            RankFailed: another rank failed.
            RuntimeError: the ranks did not begin with the same weights, batches and budget.
        """
        mesh, outset = self.root.mesh, self._outset(num_updates, [batch for batch, _ in batches])

        def work(plans: Plans) -> MetricSums:
            self._begin({**outset, budget.key: str(budget.tokens)})
            return backward(plans)

        own = budget.run_several(
            work,
            batches,
            share=share,
            token_cost=token_cost,
            rank=mesh.data_rank,
            num_ranks=mesh.num_data_ranks,
            together=self.data.name(),
        )
        found = self.data.gather(own.plain())
        self.root.sum_gradients()
        return MetricSums.joined(found[mesh.first_peers])

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
        if found := _difference(self.data.gather(outset)):
            raise RuntimeError(
                f"ranks that train one model began an update differently: {found}; every rank needs the whole "
                "mini-batch and the same state"
            )
        self._is_compared = True

    @torch.no_grad()
    def clip_gradients(self, parameters: Iterable[nn.Parameter], max_norm: float) -> float:
        """Scales the gradients, of which every rank of a copy has its part, to at most ``max_norm``; returns their norm
        before, the same on all ranks.

        Raises:
            RankFailed: another rank failed.
            RuntimeError: the copies have different gradients.
        """
        found = [p.grad for p in parameters if p.grad is not None]
        # What tensor ranks have alike counts on the first of them.
        elsewhere = {id(p.grad) for p in self.root.counted_elsewhere}
        counted = [local(w) for w in found if is_first_of_tensor_ranks(w) and id(w) not in elsewhere]
        counted = [part for part in counted if part.numel()]
        own = float(nn.utils.get_total_norm(counted)) if counted else 0.0
        size, parts = self.root.mesh.copy.size, self.data.gather(own)
        norms = [math.hypot(*parts[first : first + size]) for first in range(0, len(parts), size)]
        # Equal but for other processors' rounding.
        if not all(_is_same(norm, norms[0]) for norm in norms):
            raise RuntimeError(f"the ranks' models have come apart: gradient norms by copy {norms}")
        norm = norms[self.data.rank // size]
        if math.isfinite(norm) and norm + 1e-6 > max_norm:
            for gradient in found:
                local(gradient).mul_(max_norm / (norm + 1e-6))
        return norm

    def most_passes(self, num_passes: int) -> int:
        """Passes that every rank must make, where this one has so many micro-batches."""
        return max(self.data.gather(num_passes))


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
