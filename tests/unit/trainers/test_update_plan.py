"""How a step's experience is cut into mini-batches."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from quartet.batch.ragged import RaggedBatch
from quartet.schedule.iteration import UpdatePlan


def experience(sizes: list[int], trained: list[bool] | None = None) -> RaggedBatch:
    """``sizes[g]`` responses per group; a group with ``trained`` False has no loss token."""
    names = [f"{g}.{r}" for g, size in enumerate(sizes) for r in range(size)]
    batch = RaggedBatch.from_groups([[1]] * len(sizes), [[[2, 3]] * size for size in sizes], names)
    group = torch.tensor([g for g, size in enumerate(sizes) for _ in range(size)])
    kept = torch.tensor([True] * len(sizes) if trained is None else trained)
    owner = batch.sequence_index()
    mask = (owner >= 0) & kept[group[owner.clamp(min=0)]]
    return batch.with_token(loss_mask=mask).with_sequence(group=group)


def mini_batches(plan: UpdatePlan, whole: RaggedBatch, step: int) -> list[RaggedBatch]:
    return [whole.select(picked) for picked in plan.selections(whole, step)]


shapes = st.integers(1, 4).flatmap(
    lambda minibatches: st.tuples(
        st.just(minibatches),
        st.integers(1, 3).flatmap(
            lambda per: st.lists(st.integers(1, 4), min_size=minibatches * per, max_size=minibatches * per)
        ),
    )
)


@given(shapes, st.integers(1, 3), st.integers(0, 5), st.integers(0, 100))
def test_mini_batches_are_whole_groups_and_cover_every_epoch(
    shape: tuple[int, list[int]], epochs: int, seed: int, step: int
) -> None:
    minibatches, sizes = shape
    whole = experience(sizes)
    found = mini_batches(UpdatePlan(minibatches, epochs, seed), whole, step)
    assert len(found) == minibatches * epochs
    for epoch in range(epochs):
        part = found[epoch * minibatches : (epoch + 1) * minibatches]
        assert sorted(name for batch in part for name in batch.ids) == sorted(whole.ids)
        for batch in part:
            for group in set(batch.sequence["group"].tolist()):
                assert sum(g == group for g in batch.sequence["group"].tolist()) == sizes[group]
    again = mini_batches(UpdatePlan(minibatches, epochs, seed), whole, step)
    assert [batch.ids for batch in again] == [batch.ids for batch in found]


def test_the_first_epoch_is_in_prompt_order_and_later_ones_are_drawn() -> None:
    whole = experience([1] * 12)
    plan = UpdatePlan(2, 3, seed=1)
    orders = [[name for batch in mini_batches(plan, whole, 4)[i : i + 2] for name in batch.ids] for i in (0, 2, 4)]
    assert orders[0] == list(whole.ids)
    assert orders[1] != orders[0] and orders[2] != orders[1]
    other = [name for batch in mini_batches(plan, whole, 5)[2:4] for name in batch.ids]
    assert other != orders[1], "the order depends on the step"


def test_a_mini_batch_without_a_trained_token_is_left_out() -> None:
    found = mini_batches(UpdatePlan(2, 1, seed=0), experience([2, 2, 2, 2], [False, False, True, False]), 0)
    assert [batch.ids for batch in found] == [("2.0", "2.1", "3.0", "3.1")]
    assert mini_batches(UpdatePlan(2, 1, seed=0), experience([2, 2], [False, False]), 0) == []
