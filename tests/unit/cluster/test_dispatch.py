"""Who gets which part of a batch, and results put back in its order."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from quartet.batch import ColumnSet, RaggedBatch, join_columns
from quartet.cluster import SPLIT, RankLayout
from quartet.cluster.dispatch import BatchShare, merge_results, plan_parts, segment_table, split_table


def batch_of(groups: list[list[int]], prompt: int = 3) -> RaggedBatch:
    """Groups of responses of these lengths to prompts of ``prompt`` tokens."""
    ids = [f"{g}.{r}" for g, group in enumerate(groups) for r in range(len(group))]
    return RaggedBatch.from_groups([[1] * prompt] * len(groups), [[[2] * n for n in group] for group in groups], ids)


def test_ranks_in_a_row_work_on_one_part_and_the_first_answers() -> None:
    layout = RankLayout(8, peers=4)
    assert [layout.part_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [*layout.answering] == [0, 4] and layout.parts == 2
    with pytest.raises(ValueError, match="8 processes"):
        RankLayout(8, peers=3)


def work(batch: RaggedBatch, factor: float) -> ColumnSet:
    return ColumnSet(batch.ids, {"twice": factor * batch.input_ids}, {"score": factor * sums(batch)})


def sums(batch: RaggedBatch) -> Tensor:
    """Of each sequence's last segment."""
    found = [batch.input_ids[slice(*batch.leaf_span(s))].sum() for s in range(len(batch))]
    return torch.tensor(found, dtype=torch.float64)


def called(layout: RankLayout, function: Any, *args: Any) -> Any:
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


@pytest.mark.parametrize("layout", [RankLayout(1), RankLayout(3), RankLayout(6, peers=2)])
def test_a_split_batchs_results_come_back_in_order(layout: RankLayout) -> None:
    """Whatever the batch and the number of parts: every item is worked on once and comes back in its place."""
    for seed in range(60):
        batch = any_batch(random.Random(seed))
        joined = join_columns(batch, called(layout, work, batch, 2.0))
        for s in range(len(batch)):
            for k in batch.chain(s):
                span = slice(*batch.segment_offsets[k : k + 2])
                assert torch.equal(joined.token["twice"][span], 2.0 * batch.input_ids[span])
        assert torch.equal(joined.sequence["score"], 2.0 * sums(batch))
        assert torch.equal(called(layout, sums, batch), sums(batch))


def test_columns_of_one_part_are_not_copied() -> None:
    batch = batch_of([[2, 1], [3]])
    columns = work(batch, 1.0)
    assert merge_results([columns], split_table(segment_table(batch), 1), segment_table(batch)) is columns


def test_tokens_are_balanced_and_a_group_is_cut_only_where_that_needs_it() -> None:
    batch = batch_of([[8] * 4, [8] * 4, [4] * 4, [4] * 4], prompt=10)
    assert [batch.select(part).num_tokens for part in plan_parts(segment_table(batch), 2)] == [68, 68]
    assert [len(part) for part in plan_parts(segment_table(batch_of([[8] * 8], prompt=4)), 4)] == [2, 2, 2, 2]


def test_results_that_are_not_of_the_parts_sequences() -> None:
    table = segment_table(batch_of([[2, 3], [1]]))
    shares = [BatchShare(at, table.select(at)) for at in ([1, 2], [0])]
    others = [ColumnSet(ids, {}, {"n": torch.ones(len(ids))}) for ids in (("x", "y"), ("z",))]
    with pytest.raises(ValueError, match="not of the part's sequences"):
        merge_results(others, shares, table)
    assert merge_results([{"loss": 1.0}, {"loss": 2.0}], shares, table) == [{"loss": 1.0}, {"loss": 2.0}]
    assert merge_results([None, None], shares, table) is None


def test_a_segment_that_no_sequence_needs_has_no_columns() -> None:
    batch = RaggedBatch(torch.arange(6), (2, 3, 1), (-1, -1, 0), (2,), ("a",))
    found = called(RankLayout(2), lambda part: ColumnSet(part.ids, {"x": part.input_ids.float() + 1}), batch)
    assert join_columns(batch, found).token["x"].tolist() == [1, 2, 0, 0, 0, 6]
