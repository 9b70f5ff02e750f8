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


def work(batch: RaggedBatch, weights: Tensor, names: list[str]) -> Any:
    assert list(batch.ids) == names
    sums = [batch.input_ids[slice(*batch.leaf_span(s))].sum() for s in range(len(batch))]
    scores = torch.stack(sums).double() * weights if sums else weights
    return ColumnSet(batch.ids, {"twice": 2 * batch.input_ids}, {"score": scores}), [n + "!" for n in names], batch


@pytest.fixture(params=[(1, 1), (2, 1), (3, 1), (4, 2), (6, 2)])
def layout(request: pytest.FixtureRequest) -> Layout:
    size, tensor = request.param
    return Layout.fit(size, {"tensor": tensor})


def called(layout: Layout, *args: Any) -> Any:
    """What a group of such ranks returns."""
    plan = SPLIT.plan(layout, args, {})
    results = [work(*call.args) if call is not None else None for call in plan.calls]
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


def sequences(batch: RaggedBatch) -> list[tuple[str, list[list[int]]]]:
    """Ids and tokens, segment by segment."""
    segments = [part.tolist() for part in batch.input_ids.split(batch.segment_lengths)] if len(batch) else []
    found = []
    for s, k in enumerate(batch.leaves):
        chain = []
        while k >= 0:
            chain.append(segments[k])
            k = batch.parents[k]
        found.append((batch.ids[s], chain[::-1]))
    return found


def check(batch: RaggedBatch, weights: Tensor, result: Any) -> None:
    columns, names, back = result
    assert names == [f"{i}!" for i in batch.ids]
    assert sequences(back) == sequences(batch)
    joined = join(batch, columns)
    for s in range(len(batch)):
        span = slice(*batch.leaf_span(s))
        assert torch.equal(joined.token["twice"][span], 2 * batch.input_ids[span])
        assert joined.sequence["score"][s] == batch.input_ids[span].sum().double() * weights[s]


def test_a_split_batch_comes_back_in_order(layout: Layout) -> None:
    for seed in range(BATCHES):
        batch = any_batch(random.Random(seed))
        weights = torch.rand(len(batch), dtype=torch.float64)
        check(batch, weights, called(layout, batch, weights, list(batch.ids)))
