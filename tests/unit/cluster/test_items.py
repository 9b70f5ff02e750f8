"""Splitting values by item and putting results back in order, over random trees of segments."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from quartet.batch import ColumnSet, RaggedBatch, join
from quartet.cluster.balance import plan_parts
from quartet.cluster.dispatch import merge_results, portion, survey
from quartet.cluster.items import Positions, Share, arrange, cut, placed
from quartet.cluster.structure import Structure


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


def assert_same(a: RaggedBatch, b: RaggedBatch) -> None:
    assert (a.ids, a.segment_lengths, a.parents, a.leaves) == (b.ids, b.segment_lengths, b.parents, b.leaves)
    assert torch.equal(a.input_ids, b.input_ids)
    for family in ("token", "sequence"):
        ours, theirs = getattr(a, family), getattr(b, family)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert dict(a.objects) == dict(b.objects)


def shares_of(plan: Sequence[Positions], structure: Structure | None = None) -> list[Share]:
    return [Share(part, None if structure is None else structure.select(part)) for part in plan]


GROUPS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=6)


def test_parts_that_come_in_order_are_not_stored_twice() -> None:
    batch = batch_of([[2, 1], [3]])
    assert arrange([batch], [Share(range(3))]) is batch
    structure, plan = Structure.of(batch), [range(2), range(2, 3)]
    joined = arrange([batch.select(part) for part in plan], shares_of(plan, structure), structure)
    assert_same(joined, batch)


@given(GROUPS, st.integers(1, 5), st.integers(0, 12))
def test_split_and_merged_a_batch_and_its_columns_are_what_they_were(
    groups: list[list[int]], num_parts: int, prompt: int
) -> None:
    batch = batch_of(groups, prompt + 1)
    structure, count = survey([batch])
    assert structure is not None
    plan = plan_parts(count, num_parts, structure)
    assert sorted(s for part in plan for s in part) == list(range(len(batch)))
    parts = [portion(batch, part, structure) for part in plan]
    shares = shares_of(plan, structure)
    assert all(structure.select(at).describes(part) for at, part in zip(plan, parts, strict=True))
    assert_same(merge_results(parts, shares, structure), batch)
    columns = [ColumnSet(p.ids, {"twice": 2 * p.token["logprobs"]}, {"first": p.sequence["length"] + 1}) for p in parts]
    joined = join(batch, merge_results(columns, shares, structure))
    assert torch.equal(joined.token["twice"], 2 * batch.token["logprobs"])
    assert torch.equal(joined.sequence["first"], batch.sequence["length"] + 1)


def test_tokens_are_balanced_and_groups_stay_whole() -> None:
    batch = batch_of([[8] * 4, [8] * 4, [4] * 4, [4] * 4], prompt=10)
    plan = plan_parts(16, 2, Structure.of(batch))
    tokens = [batch.select(part).num_tokens for part in plan]
    assert tokens == [68, 68] and sum(tokens) == batch.num_tokens


def test_a_group_is_cut_only_where_balance_needs_it() -> None:
    batch = batch_of([[8] * 8], prompt=4)
    plan = plan_parts(8, 4, Structure.of(batch))
    assert [len(part) for part in plan] == [2, 2, 2, 2]


def test_items_without_tokens_are_dealt_out_in_order() -> None:
    assert plan_parts(7, 3) == [range(0, 2), range(2, 4), range(4, 7)]
    assert [len(part) for part in plan_parts(1, 3)] == [0, 0, 1]


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
def test_lists_tensors_and_arrays(kind: type) -> None:
    value = kind([3, 1, 4, 1, 5])
    parts = [cut(value, at, None) for at in ([1, 2], [4, 0], [3])]
    merged = merge_results(parts, shares_of([[1, 2], [4, 0], [3]]), None)
    assert list(merged) == [3, 1, 4, 1, 5] and type(merged) is type(value)


def test_several_results_for_each_item_keep_its_place() -> None:
    merged = merge_results([["c0", "c1", "a0", "a1"], ["b0", "b1"]], shares_of([[2, 0], [1]]), None)
    assert merged == ["a0", "a1", "b0", "b1", "c0", "c1"]


def test_results_that_cannot_be_placed_are_refused() -> None:
    with pytest.raises(ValueError, match="3 results for 2 items"):
        merge_results([[1, 2, 3]], shares_of([[0, 1]]), None)
    with pytest.raises(ValueError, match="missing or twice"):
        merge_results([[1, 2], [3]], shares_of([[0], [1]]), None)
    with pytest.raises(ValueError, match="several kinds"):
        merge_results([[1], torch.ones(1)], shares_of([[0], [1]]), None)


def test_values_without_items_form_a_list_and_tuples_are_taken_apart() -> None:
    merged = merge_results([(["a"], {"loss": 1.0}), (["b"], {"loss": 2.0})], shares_of([[1], [0]]), None)
    assert merged == (["b", "a"], [{"loss": 1.0}, {"loss": 2.0}])
    assert merge_results([None, None], shares_of([[0], [1]]), None) is None
    assert merge_results([torch.tensor(1.0), torch.tensor(2.0)], shares_of([[0], [1]]), None) == [1.0, 2.0]


def test_arguments_with_other_numbers_of_items_are_refused() -> None:
    with pytest.raises(ValueError, match="list of 2, Tensor of 3"):
        survey([[1, 2], torch.ones(3)])
    with pytest.raises(ValueError, match="found none"):
        survey([1, (2,)])


def test_token_columns_need_their_batch() -> None:
    batch = batch_of([[2, 3]])
    columns = ColumnSet(batch.ids, {"x": batch.token["logprobs"]})
    with pytest.raises(ValueError, match="beside the batch"):
        cut(columns, [0], None)
    piece = cut(columns, [1], Structure.of(batch))
    assert torch.equal(piece.token["x"], batch.select([1]).token["logprobs"])


def test_empty_parts_vanish() -> None:
    batch = batch_of([[2]])
    structure, count = survey([batch])
    assert structure is not None
    plan = plan_parts(count, 3, structure)
    parts = [portion(batch, at, structure) for at in plan]
    assert [len(part) for part in parts].count(0) == 2
    assert_same(merge_results(parts, shares_of(plan, structure), structure), batch)


def test_a_result_with_sequences_of_its_own_has_its_own_table() -> None:
    made = batch_of([[2], [3]])
    share = placed(made, Share([4]))
    assert share.positions == [8, 9] and share.table is not None and share.table.describes(made)


def test_segments_of_other_origins_are_not_merged() -> None:
    ones = batch_of([[1, 2]])
    a, b = Structure.of(ones.select([0])), Structure.of(ones.select([1]))
    assert len(Structure.concat([a, b]).merged([0, 1]).names) == 4
    whole = Structure.of(ones)
    assert len(Structure.concat([whole.select([1]), whole.select([0])]).merged([0, 1]).names) == 3


def test_arrange_refuses_missing_items() -> None:
    with pytest.raises(ValueError, match="missing or twice"):
        arrange([[1], [2]], [Share([0]), Share([2])])


def test_a_segment_that_no_sequence_needs_has_no_columns_and_leaves_a_batch() -> None:
    batch = RaggedBatch(torch.arange(6), (2, 3, 1), (-1, -1, 0), (2,), ("a",))
    structure, count = survey([batch])
    assert structure is not None
    plan = plan_parts(count, 2, structure)
    parts = [portion(batch, at, structure) for at in plan]
    columns = [ColumnSet(part.ids, {"x": part.input_ids.float() + 1}) for part in parts]
    merged = merge_results(columns, shares_of(plan, structure), structure)
    assert join(batch, merged).token["x"].tolist() == [1, 2, 0, 0, 0, 6]
    assert merge_results(parts, shares_of(plan, structure), structure).input_ids.tolist() == [0, 1, 5]


def test_columns_go_to_a_table_of_the_same_sequences_whatever_its_segments_are_named() -> None:
    batch = batch_of([[2, 3], [1]])
    own, other = Structure.of(batch), Structure.of(batch)
    parts = [ColumnSet(batch.select(at).ids, {"x": batch.select(at).token["logprobs"]}) for at in ([0, 2], [1])]
    shares = [Share(at, own.select(at)) for at in ([0, 2], [1])]
    assert torch.equal(arrange(parts, shares, other).token["x"], batch.token["logprobs"])
