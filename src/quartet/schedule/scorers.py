"""Scorers: the columns that the models of a run give for a chunk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from quartet.batch.columns import ColumnSet
from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.models.packed import PackedModel
from quartet.schedule.iteration import Chunk
from quartet.schedule.worker import Worker
from quartet.train.budget import TokenBudget
from quartet.train.engine import Needs, TrainEngine, forward_only


@dataclass(frozen=True)
class EngineScorer:
    """Columns of a trained model as the step began: ``old_logprobs`` of the actor, ``values`` of the critic.

    Args:
        beside: names of other token columns by the pass's own name for them.
    """

    worker: Worker
    role: str
    engine: TrainEngine[Any]
    needs: Needs
    column: str
    beside: Mapping[str, str] = field(default_factory=dict)

    async def score(self, chunk: Chunk[RaggedBatch]) -> ColumnSet:
        found = await self.worker.run(
            self.role,
            "forward",
            self.column,
            lambda: self.engine.forward(chunk.data, self.needs),
            step=chunk.step,
            chunk=chunk.index,
            tokens=chunk.num_tokens,
            reads={self.role: chunk.step},
        )
        token = dict(found.token)
        beside = {column: token.pop(name) for name, column in self.beside.items()}
        main = _renamed(ColumnSet(found.ids, token, found.sequence), self.column)
        return ColumnSet(main.ids, {**main.token, **beside}, main.sequence)


@dataclass(frozen=True)
class FrozenScorer:
    """Columns of a model that never changes: ``ref_logprobs`` or a reward model's scores.

    Args:
        render: gives the batch that a scorer with another tokenizer reads; its scores stay keyed by the same sequences.
        within: the model is what its role says inside of this context alone, entered under the lease and left before
            anything is awaited: the reference that is the actor without its adapters.
        reads: states whose tensors the pass reads, so that nobody trains them meanwhile.
    """

    worker: Worker
    role: str
    model: PackedModel
    needs: Needs
    column: str
    budget: TokenBudget
    render: Callable[[RaggedBatch], RaggedBatch] | None = None
    logprob_chunk: int = 1024
    share_prefixes: bool = True
    within: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    reads: Mapping[str, int | None] = field(default_factory=dict)

    async def score(self, chunk: Chunk[RaggedBatch]) -> ColumnSet:
        batch = self.render(chunk.data) if self.render is not None else chunk.data
        found = await self.worker.run(
            self.role,
            "forward",
            self.column,
            lambda: self._forward(batch),
            step=chunk.step,
            chunk=chunk.index,
            tokens=batch.num_tokens,
            reads=self.reads,
        )
        columns = _renamed(found, self.column)
        self._check_finite(columns)
        return columns

    def _forward(self, batch: RaggedBatch) -> ColumnSet:
        with self.within():
            return forward_only(
                self.model, batch, self.needs, self.budget, self.logprob_chunk, share=self.share_prefixes
            )

    def _check_finite(self, columns: ColumnSet) -> None:
        """A NaN among scores would pass for "does not apply"."""
        values = torch.cat([*columns.token.values(), *columns.sequence.values()])
        wrong = int((~torch.isfinite(values)).sum())
        if wrong:
            raise UserError(
                f"the model of role {self.role!r} computes values that are not finite",
                found=f"{wrong} of {len(values)} {self.column}",
                remedy="check that model's weights; the run stopped before the update and can be resumed",
            )


def _renamed(columns: ColumnSet, name: str) -> ColumnSet:
    """The one field of a pass under the name the step knows it by."""
    fields = [*columns.token.values(), *columns.sequence.values()]
    if len(fields) != 1:
        raise ValueError(f"{name} is one column, the pass gave {len(fields)}")
    return ColumnSet(
        columns.ids,
        token=dict.fromkeys([name] if columns.token else [], fields[0]),
        sequence=dict.fromkeys([name] if columns.sequence else [], fields[0]),
    )
