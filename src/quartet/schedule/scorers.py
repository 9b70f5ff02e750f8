"""Scorers: the columns that the models of a run give for a chunk, or for parts of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from quartet.batch.columns import ColumnSet
from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.schedule.iteration import Chunk, Scorer, side_by_side
from quartet.schedule.lease_context import LeaseContext
from quartet.schedule.model_worker import ModelWorker
from quartet.schedule.role_group import RoleGroup
from quartet.train.forward import Needs


@dataclass(frozen=True)
class ModelScorer:
    """One pass of a model over a chunk: ``values``, ``old_logprobs``, ``ref_logprobs``, a reward model's scores.

    Args:
        column: what the pass's one field is called from then on.
        beside: names of other token columns by the pass's own name for them.
        further: token columns of passes after it, of one field each, by name.
        trains: the role's weights change: the columns are those of its weights as the step began.
        reads_text: the worker reads prompts and completions as text, so they are sent along.
        reads: other states whose tensors the pass reads, so that they are not trained meanwhile.
    """

    leases: LeaseContext
    role: str
    model: RoleGroup[ModelWorker]
    needs: Needs
    column: str
    beside: Mapping[str, str] = field(default_factory=dict)
    further: Mapping[str, Needs] = field(default_factory=dict)
    trains: bool = False
    reads_text: bool = False
    reads: Mapping[str, int | None] = field(default_factory=dict)

    async def score(self, chunk: Chunk) -> ColumnSet:
        batch = chunk.data
        reads = {**self.reads, self.role: chunk.step} if self.trains else self.reads
        turn = self.leases.turn(
            self.role,
            "forward",
            self.column,
            step=chunk.step,
            chunk=chunk.index,
            tokens=batch.num_tokens,
            reads=reads,
        )
        read = _with_texts(batch) if self.reads_text else batch.without_objects()
        async with turn:
            found = await self.model.call(ModelWorker.forward, read, self.needs)
            others = [await self.model.call(ModelWorker.forward, read, needs) for needs in self.further.values()]
        columns = self._named(found)
        for name, other in zip(self.further, others, strict=True):
            (values,) = other.token.values()
            columns = replace(columns, token={**columns.token, name: values})
        if not self.trains:
            self._check_finite(columns)
        return columns

    def _named(self, found: ColumnSet) -> ColumnSet:
        """The one field of a pass, and those beside it, under the names that the step knows them by."""
        token = dict(found.token)
        beside = {column: token.pop(name) for name, column in self.beside.items()}
        fields = [*token.values(), *found.sequence.values()]
        if len(fields) != 1:
            raise ValueError(f"{self.column} is one column, the pass gave {len(fields)}")
        own = {self.column: fields[0]}
        return ColumnSet(found.ids, {**own, **beside} if token else beside, {} if token else own)

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


def _with_texts(batch: RaggedBatch) -> RaggedBatch:
    """The batch with objects ``prompt`` and ``completion``, both as text; other columns of a data row do not travel."""
    prompts = [item.prompt for item in batch.objects["prompt"]]
    return batch.without_objects().with_objects(prompt=prompts, completion=batch.objects["completion"])


@dataclass(frozen=True)
class PartScorer:
    """A scorer that is given some sequences of a chunk at a time.

    Args:
        parts: places of the sequences that are scored together, for each call. The others, and the tokens that all
            sequences share, have no scores: NaN in sequence columns, 0 in token columns.
    """

    inner: Scorer
    parts: Callable[[RaggedBatch], Sequence[Sequence[int]]]

    async def score(self, chunk: Chunk) -> ColumnSet:
        batch, parts = chunk.data, self.parts(chunk.data)
        read = [batch.select(part) for part in parts]
        scored = await side_by_side([self.inner.score(replace(chunk, data=part)) for part in read])
        token: dict[str, torch.Tensor] = {}
        sequence: dict[str, torch.Tensor] = {}
        for places, part, found in zip(parts, read, scored, strict=True):
            for name, values in found.token.items():
                column = token.setdefault(name, values.new_zeros(batch.num_tokens))
                for k, s in enumerate(places):
                    column[slice(*batch.leaf_span(s))] = values[slice(*part.leaf_span(k))]
            for name, values in found.sequence.items():
                column = sequence.setdefault(name, values.new_full((len(batch),), math.nan))
                column[list(places)] = values
        return ColumnSet(batch.ids, token, sequence)
