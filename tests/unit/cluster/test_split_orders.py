"""Whatever the batch, the number of parts and the way: every item is worked on once and comes back in its place."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quartet.batch import ColumnSet, RaggedBatch, join
from quartet.cluster import SPLIT, ResourcePool, Worker, WorkerGroup, connect, dispatch

BATCHES = 60


class Splitter(Worker):
    @dispatch(SPLIT)
    def work(self, batch: RaggedBatch, weights: Tensor, names: list[str]) -> Any:
        assert list(batch.ids) == names
        sums = [batch.input_ids[slice(*batch.leaf_span(s))].sum() for s in range(len(batch))]
        scores = torch.stack(sums).double() * weights if sums else weights
        return ColumnSet(batch.ids, {"twice": 2 * batch.input_ids}, {"score": scores}), [n + "!" for n in names], batch

    @dispatch(SPLIT, blocking=False, chunks=3)
    def respond(self, prompts: list[list[int]], number: int) -> RaggedBatch:
        lengths = [[random.Random(p[0] * 7 + i).randint(1, 5) for i in range(number)] for p in prompts]
        responses = [[[p[0], i] * n for i, n in enumerate(of)] for p, of in zip(prompts, lengths, strict=True)]
        return RaggedBatch.from_groups(prompts, responses, [f"{p[0]}.{i}" for p in prompts for i in range(number)])

    @dispatch(SPLIT, blocking=False)
    def copied(self, batch: RaggedBatch) -> RaggedBatch:
        return batch

    @dispatch(SPLIT)
    def both(self, first: RaggedBatch, second: RaggedBatch) -> list[str]:
        assert first.ids == second.ids
        return list(first.ids)


@pytest.fixture(scope="module", autouse=True)
def backend() -> Iterator[None]:
    with connect("local"):
        yield


@pytest.fixture(scope="module", params=[(1, {}), (2, {}), (3, {}), (4, {"tensor": 2}), (6, {"pipeline": 2})])
def group(request: pytest.FixtureRequest) -> WorkerGroup:
    size, layout = request.param
    return WorkerGroup(ResourcePool([size]), Splitter, layout=layout)


@pytest.fixture(scope="module")
def three() -> WorkerGroup:
    return WorkerGroup(ResourcePool([3]), Splitter)


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


def test_a_split_batch_comes_back_in_order(group: WorkerGroup) -> None:
    for seed in range(BATCHES):
        batch = any_batch(random.Random(seed))
        weights = torch.rand(len(batch), dtype=torch.float64)
        check(batch, weights, group.work(batch, weights, list(batch.ids)))
        check(batch, weights, group.work.submit(batch, weights, list(batch.ids)).result())


def test_a_result_that_another_group_splits_anew_comes_back_in_order(group: WorkerGroup, three: WorkerGroup) -> None:
    for seed in range(BATCHES):
        draw = random.Random(seed)
        prompts = [[10 * i + 1] * draw.randint(1, 5) for i in range(draw.randint(1, 9))]
        made = group.respond(prompts, draw.randint(1, 4))
        batch = made.result()
        weights = torch.rand(len(batch), dtype=torch.float64)
        for reader in (group, three):
            check(batch, weights, reader.work(made, weights, list(batch.ids)))


def test_results_that_lay_in_other_chunks_are_split_together(group: WorkerGroup, three: WorkerGroup) -> None:
    """Where the readers of each were given other parts, a third group finds its own."""
    for seed in range(BATCHES):
        draw = random.Random(seed)
        prompts = [[i] * draw.randint(1, 9) for i in range(1, draw.randint(3, 9))]
        made = group.respond(prompts, draw.randint(1, 4))
        first, second = three.copied(made), three.copied(group.copied(made))
        assert three.both(first, second) == list(made.result().ids)
