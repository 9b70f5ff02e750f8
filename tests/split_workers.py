"""Workers of one role without processes: calls are split over them, and they alone see token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from quartet.batch.ragged import RaggedBatch
from quartet.cluster.dispatch import SPLIT, RankLayout, dispatched_methods
from quartet.schedule.role_group import RoleGroup


def without_ids(batch: RaggedBatch) -> RaggedBatch:
    """The batch as a driver has it: no model and no tokenizer knows these ids."""
    return replace(batch, input_ids=torch.full((batch.num_tokens,), -1))


class SplitWorkers(RoleGroup[Any]):
    """
    Args:
        workers: one per data-parallel rank.
        whole: the batch that they are called with, with its ids; the caller has it without.
    """

    def __init__(self, workers: Sequence[Any], whole: RaggedBatch) -> None:
        self.workers = workers
        self._whole = whole

    async def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = method.__name__
        assert dispatched_methods(type(self.workers[0]))[name].mode is SPLIT
        batch, *others = args
        assert batch.ids == self._whole.ids and bool((batch.input_ids == -1).all()), "the caller holds token ids"
        filled = replace(batch, input_ids=self._whole.input_ids)
        plan = SPLIT.plan(RankLayout(len(self.workers)), (filled, *others), kwargs)
        calls = [call for call in plan.calls if call is not None]
        results = [getattr(worker, name)(*of.args, **of.kwargs) for worker, of in zip(self.workers, calls, strict=True)]
        return plan.collect(results, plan.shares)
