"""What computes a model's passes and updates, beside the model: in the driver's process or in a worker's."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quartet.batch.columns import ColumnSet
from quartet.batch.ragged import RaggedBatch
from quartet.cluster.dispatch import SPLIT, dispatch
from quartet.models.packed import PackedModel
from quartet.train.budget import TokenBudget
from quartet.train.engine import LossTerm, Needs, Objective, TrainEngine, forward_only


@dataclass(frozen=True)
class Update:
    """One optimizer update: which sequences of the experience, what is minimised, and losses that are added."""

    sequences: tuple[int, ...]
    objective: Objective
    also: Sequence[LossTerm] = ()


@dataclass(frozen=True)
class ModelStats:
    """Counted since the run began; ``token_budget`` is that of training, None of a model that never trains."""

    num_oom: int
    num_skipped: int = 0
    token_budget: int | None = None


class ModelHost:
    """One model.

    Args:
        engine: trains it; None for a model that never changes.
        budget: tokens of a forward pass, where there is no engine.
    """

    def __init__(
        self,
        packed: PackedModel,
        *,
        engine: TrainEngine[Any] | None = None,
        budget: TokenBudget | None = None,
        logprob_chunk: int = 1024,
        share_prefixes: bool = True,
    ) -> None:
        if (engine is None) == (budget is None):
            raise ValueError("a model has a train engine, or a budget for its forward passes")
        self.packed = packed
        self.engine = engine
        self._budget = budget if engine is None else engine.forward_budget
        self._logprob_chunk = logprob_chunk if engine is None else engine.config.logprob_chunk
        self._share = share_prefixes if engine is None else engine.config.share_prefixes

    @dispatch(SPLIT, blocking=False)
    def forward(self, batch: RaggedBatch, needs: Needs, bare: bool = False) -> ColumnSet:
        """Forward-only pass, as ``TrainEngine.forward``. ``bare``: of the model without its adapters."""
        assert self._budget is not None
        with self.packed.without_adapters() if bare else contextlib.nullcontext():
            return forward_only(self.packed, batch, needs, self._budget, self._logprob_chunk, share=self._share)

    def update(self, experience: RaggedBatch, updates: Sequence[Update]) -> list[dict[str, float]]:
        """The updates in their order; what ``TrainEngine.train_step`` returns of each."""
        engine = self._trained
        return [engine.train_step(experience.select(u.sequences), u.objective, u.also) for u in updates]

    def stats(self) -> ModelStats:
        if self.engine is None:
            assert self._budget is not None
            return ModelStats(self._budget.num_oom)
        return ModelStats(self.engine.num_oom, self.engine.num_skipped, self.engine.budget.tokens)

    # State -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that an exact resume needs."""
        return self._trained.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._trained.load_state(state)

    def merged_weights(self) -> dict[str, Tensor]:
        """The model's own state, adapters merged into it, as copies."""
        with self.packed.with_merged_adapters():
            return {name: tensor.clone() for name, tensor in self.packed.model.state_dict().items()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """The opposite, into a model without adapters."""
        self.packed.model.load_state_dict(weights)

    @property
    def _trained(self) -> TrainEngine[Any]:
        if self.engine is None:
            raise RuntimeError("this model never trains")
        return self.engine
