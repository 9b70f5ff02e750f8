"""How the rows of a pack are cut over context and tensor ranks, and read back in order."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quartet.train.parallel.context import ModelParallel, SplitAttention, TokenSplit


@dataclass(frozen=True)
class Place:
    """A rank's place in a group that exchanges nothing."""

    size: int
    rank: int


def splits(context: int, tensor: int, num_tokens: int, selected, row_cost: float = 0.0) -> list[TokenSplit]:
    """Of every rank, the last along tensor fastest."""
    places = [(Place(context, c), Place(tensor, t)) for c in range(context) for t in range(tensor)]
    made = [ModelParallel(t if tensor > 1 else None, c if context > 1 else None, 8, 4, row_cost) for c, t in places]
    return [parallel.split(num_tokens, selected) for parallel in made]


def test_spans_are_alike_in_cost() -> None:
    """All of the head's rows are in the second half of the pack, and each costs as much as three tokens."""
    selected, costs = torch.arange(500, 1000), torch.ones(1000)
    costs[500:] += 3.0
    of_ranks = splits(4, 1, 1000, selected, row_cost=3.0)
    found = [float(costs[split.span].sum()) for split in of_ranks]
    assert max(found) - min(found) <= 4.0
    assert [split.span.stop - split.span.start for split in of_ranks] == [532, 156, 156, 156]
    assert [s.span.stop - s.span.start for s in splits(4, 1, 1000, None, row_cost=3.0)] == [250] * 4


@given(
    st.sampled_from([(1, 2), (2, 1), (4, 2), (2, 4), (3, 1)]),
    st.integers(0, 40),
    st.lists(st.integers(0, 10_000), max_size=60),
    st.sampled_from([0.0, 0.5, 40.0]),
)
def test_every_row_is_one_rank_s(shape, more, numbers, row_cost) -> None:
    context, tensor = shape
    num_tokens = context * tensor + more
    rows = torch.tensor([n % num_tokens for n in numbers], dtype=torch.int64)
    of_ranks = splits(context, tensor, num_tokens, rows, row_cost)
    values = torch.arange(num_tokens) * 3 + 1
    starts, results, labels = 0, [], []
    for index, split in enumerate(of_ranks):
        assert split.bounds == of_ranks[0].bounds
        assert split.num_own >= 1
        assert sum(split.row_sizes) == split.span.stop - split.span.start
        read = split.read(rows, torch.device("cpu"))
        own = values[starts : starts + split.num_own]
        results.append(read.own(own))
        if index % tensor == 0:
            labels.append(read.labels(torch.arange(len(rows))))
        assert read.tensor_sizes[index % tensor] == len(results[-1])
        assert read.context_sizes[index // tensor] == sum(read.tensor_sizes)
        starts += split.num_own
    assert starts == num_tokens
    assert torch.equal(torch.cat(results)[read.back], values[rows])
    assert torch.equal(torch.cat(labels)[read.back], torch.arange(len(rows)))


def test_too_few_tokens_for_the_ranks() -> None:
    with pytest.raises(ValueError, match="7 tokens cannot be cut over 8 ranks"):
        splits(4, 2, 7, None)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (8, 4), (4, 4)])
def test_own_heads_are_taken_where_a_rank_has_all(heads, kv_heads) -> None:
    given = torch.arange(8.0).view(1, 8, 1, 1)
    seen = []

    class Inner:
        def attend(self, layer, q, k, v, rule):
            seen.append([x.flatten().tolist() for x in (q, k, v)])
            return q

    parallel = ModelParallel(Place(2, 1), None, num_heads=8, num_kv_heads=4)
    q, k, v = (given[:, :n] for n in (heads, kv_heads, 4))
    SplitAttention(Inner(), parallel.split(2, None)).attend(0, q, k, v, None)
    assert seen == [[[4.0, 5, 6, 7] if heads == 8 else [0.0, 1, 2, 3], [2.0, 3] if kv_heads == 4 else [0.0, 1], [2, 3]]]
