"""Splitting batches and putting results back in order, over random trees of segments."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from quartet.batch import ColumnSet, RaggedBatch, join
from quartet.cluster.split import Share, merge_results, plan_parts, shares_of, table_of


def batch_of(groups: list[list[int]], prompt: int = 3) -> RaggedBatch:
    """Groups of responses of these lengths to prompts of ``prompt`` tokens; every token field has its own numbers."""
    ids = [f"{g}.{r}" for g, group in enumerate(groups) for r in range(len(group))]
    start = iter(range(10**6))
    prompts = [[next(start) for _ in range(prompt)] for _ in groups]
    responses = [[[next(start) for _ in range(n)] for n in group] for group in groups]
    batch = RaggedBatch.from_groups(prompts, responses, ids)
    lengths = torch.tensor([batch.leaf_span(s)[1] - batch.leaf_span(s)[0] for s in range(len(batch))])
    return RaggedBatch(
        batch.input_ids,
        batch.segment_lengths,
        batch.parents,
        batch.leaves,
        batch.ids,
        token={"logprobs": -batch.input_ids.float()},
        sequence={"length": lengths},
        objects={"text": [f"text {i}" for i in ids]},
    )


GROUPS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=6)


def columns_of(part: RaggedBatch) -> ColumnSet:
    return ColumnSet(part.ids, {"twice": 2 * part.token["logprobs"]}, {"first": part.sequence["length"] + 1})


def test_columns_of_one_part_are_not_copied() -> None:
    batch = batch_of([[2, 1], [3]])
    columns = columns_of(batch)
    assert merge_results([columns], shares_of(table_of(batch), 1), table_of(batch)) is columns


@given(GROUPS, st.integers(1, 5), st.integers(0, 12))
def test_split_and_merged_a_batchs_columns_are_what_they_were(
    groups: list[list[int]], num_parts: int, prompt: int
) -> None:
    batch = batch_of(groups, prompt + 1)
    table = table_of(batch)
    shares = shares_of(table, num_parts)
    assert sorted(s for share in shares for s in share.positions) == list(range(len(batch)))
    parts = [batch.select(share.positions) for share in shares]
    joined = join(batch, merge_results([columns_of(part) for part in parts], shares, table))
    assert torch.equal(joined.token["twice"], 2 * batch.token["logprobs"])
    assert torch.equal(joined.sequence["first"], batch.sequence["length"] + 1)
    assert torch.equal(merge_results([p.sequence["length"] for p in parts], shares, table), batch.sequence["length"])


def test_tokens_are_balanced_and_groups_stay_whole() -> None:
    batch = batch_of([[8] * 4, [8] * 4, [4] * 4, [4] * 4], prompt=10)
    plan = plan_parts(table_of(batch), 2)
    tokens = [batch.select(part).num_tokens for part in plan]
    assert tokens == [68, 68] and sum(tokens) == batch.num_tokens


def test_a_group_is_cut_only_where_balance_needs_it() -> None:
    batch = batch_of([[8] * 8], prompt=4)
    plan = plan_parts(table_of(batch), 4)
    assert [len(part) for part in plan] == [2, 2, 2, 2]


def test_results_that_are_not_of_the_parts_sequences() -> None:
    batch = batch_of([[2, 3], [1]])
    table = table_of(batch)
    shares = [Share(at, table.select(at)) for at in ([1, 2], [0])]
    with pytest.raises(ValueError, match="not of the part's sequences"):
        merge_results(
            [ColumnSet(("x", "y"), {}, {"n": torch.ones(2)}), ColumnSet(("z",), {}, {"n": torch.ones(1)})],
            shares,
            table,
        )
    assert merge_results([{"loss": 1.0}, {"loss": 2.0}], shares, table) == [{"loss": 1.0}, {"loss": 2.0}]
    assert merge_results([None, None], shares, table) is None
    assert merge_results([torch.tensor(1.0), torch.tensor(2.0)], shares, table) == [1.0, 2.0]


def test_empty_parts_vanish() -> None:
    batch = batch_of([[2]])
    shares = shares_of(table_of(batch), 3)
    parts = [batch.select(share.positions) for share in shares]
    assert [len(part) for part in parts].count(0) == 2
    merged = merge_results([columns_of(part) for part in parts], shares, table_of(batch))
    assert torch.equal(merged.token["twice"], 2 * batch.token["logprobs"])


def test_a_segment_that_no_sequence_needs_has_no_columns() -> None:
    batch = RaggedBatch(torch.arange(6), (2, 3, 1), (-1, -1, 0), (2,), ("a",))
    shares = shares_of(table_of(batch), 2)
    parts = [batch.select(share.positions) for share in shares]
    columns = [ColumnSet(part.ids, {"x": part.input_ids.float() + 1}) for part in parts]
    assert join(batch, merge_results(columns, shares, table_of(batch))).token["x"].tolist() == [1, 2, 0, 0, 0, 6]
