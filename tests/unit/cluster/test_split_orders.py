"""Whatever the batch and the number of parts: every item is worked on once and comes back in its place."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from quartet.batch import ColumnSet, RaggedBatch, join
from quartet.cluster import SPLIT, Layout

BATCHES = 60


def work(batch: RaggedBatch, factor: float) -> ColumnSet:
    return ColumnSet(batch.ids, {"twice": factor * batch.input_ids}, {"score": factor * sums(batch)})


def sums(batch: RaggedBatch) -> Tensor:
    """Of each sequence's last segment."""
    found = [batch.input_ids[slice(*batch.leaf_span(s))].sum() for s in range(len(batch))]
    return torch.tensor(found, dtype=torch.float64)


@pytest.fixture(params=[(1, 1), (2, 1), (3, 1), (4, 2), (6, 2)])
def layout(request: pytest.FixtureRequest) -> Layout:
    size, tensor = request.param
    return Layout.fit(size, {"tensor": tensor})


def called(layout: Layout, function: Any, *args: Any) -> Any:
    """What a group of such ranks returns."""
    plan = SPLIT.plan(layout, args, {})
    results = [function(*call.args) if call is not None else None for call in plan.calls]
    return plan.collect([results[rank] for rank in plan.answers], plan.shares)


def any_batch(draw: random.Random) -> RaggedBatch:
    """Groups with segments shared by some of their sequences, which stand in any order."""
    lengths: list[int] = []
    parents: list[int] = []
    leaves: list[int] = []

    def segment(parent: int) -> int:
        lengths.append(draw.randint(1, 6))
        parents.append(parent)
        return len(lengths) - 1

    for _ in range(draw.randint(0, 6)):
        inner = [segment(-1)]
        inner += [segment(draw.choice(inner)) for _ in range(draw.randint(0, 2))]
        leaves += [segment(draw.choice(inner)) for _ in range(draw.randint(1, 4))]
    draw.shuffle(leaves)
    tokens = torch.tensor([draw.randint(1, 1000) for _ in range(sum(lengths))], dtype=torch.int64)
    return RaggedBatch(tokens, tuple(lengths), tuple(parents), tuple(leaves), tuple(map(str, range(len(leaves)))))


def test_a_split_batchs_columns_come_back_in_order(layout: Layout) -> None:
    for seed in range(BATCHES):
        batch = any_batch(random.Random(seed))
        joined = join(batch, called(layout, work, batch, 2.0))
        for s in range(len(batch)):
            for k in batch.chain(s):
                span = slice(*batch.segment_offsets[k : k + 2])
                assert torch.equal(joined.token["twice"][span], 2.0 * batch.input_ids[span])
        assert torch.equal(joined.sequence["score"], 2.0 * sums(batch))
        assert torch.equal(called(layout, sums, batch), sums(batch))
