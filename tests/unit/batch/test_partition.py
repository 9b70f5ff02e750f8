import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.batch.partition import plan_micro_batches
from quartet.config.errors import UserError

BUDGET = 100
COSTS = st.lists(st.integers(1, BUDGET), min_size=1, max_size=60)


def loads(plan, costs):
    return [sum(costs[i] for i in part) for part in plan]


def assert_covers(plan, costs):
    assert sorted(i for part in plan for i in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in plan)
    assert all(load <= BUDGET for load in loads(plan, costs))


@given(COSTS)
def test_each_item_once_and_never_above_the_budget(costs):
    plan = plan_micro_batches(costs, BUDGET)
    assert_covers(plan, costs)
    assert all(plan), "an empty part was not asked for"
    assert len(plan) >= -(-sum(costs) // BUDGET)


@given(COSTS)
def test_balanced_to_within_one_item(costs):
    found = loads(plan_micro_batches(costs, BUDGET), costs)
    assert max(found) - min(found) <= max(costs)


@given(COSTS)
def test_parts_are_few(costs):
    # No more than twice the fewest possible: filling greedily guarantees as much.
    assert len(plan_micro_batches(costs, BUDGET)) <= max(1, 2 * -(-sum(costs) // BUDGET))


@given(COSTS, st.integers(1, 5))
def test_number_of_parts_is_a_multiple(costs, multiple_of):
    plan = plan_micro_batches(costs, BUDGET, multiple_of=multiple_of)
    assert_covers(plan, costs)
    assert len(plan) % multiple_of == 0
    num_empty = sum(not part for part in plan)
    assert num_empty < multiple_of
    assert not any(plan[len(plan) - num_empty :]), "empty parts come last"
    if len(costs) >= len(plan):
        assert num_empty == 0


@given(COSTS, st.data())
def test_groups_that_fit_stay_together(costs, data):
    groups = data.draw(st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs)))
    plan = plan_micro_batches(costs, BUDGET, groups=groups)
    assert_covers(plan, costs)
    for group in set(groups):
        members = {i for i, g in enumerate(groups) if g == group}
        touched = [set(part) & members for part in plan if set(part) & members]
        if sum(costs[i] for i in members) <= BUDGET:
            assert touched == [members]
        else:
            # Runs are filled in order, so two neighbours together exceed the budget.
            assert len(touched) <= 2 * -(-sum(costs[i] for i in members) // BUDGET)


@given(COSTS, st.integers(1, 3))
def test_the_plan_depends_on_the_arguments_alone(costs, multiple_of):
    first = plan_micro_batches(costs, BUDGET, multiple_of=multiple_of)
    assert plan_micro_batches(tuple(costs), BUDGET, multiple_of=multiple_of) == first


def test_by_hand():
    # Two parts of 10 hold 20, but dearest first 2 would come to 6 + 3 or 5 + 4; hence three parts.
    assert plan_micro_batches([6, 5, 4, 3, 2], 10) == [[0], [1, 4], [2, 3]]
    assert plan_micro_batches([5, 5, 5, 5], 10) == [[0, 2], [1, 3]]
    assert plan_micro_batches([7, 1, 7, 1], 8) == [[0, 1], [2, 3]]
    assert plan_micro_batches([4, 4, 4, 4], 8, groups=[0, 1, 1, 0]) == [[0, 3], [1, 2]]
    assert plan_micro_batches([4, 4, 4, 1], 8, groups=[7, 7, 7, 7]) == [[0, 1], [2, 3]]


def test_nothing_to_plan():
    assert plan_micro_batches([], 10, multiple_of=4) == []


def test_one_item_for_many_ranks_leaves_empty_parts():
    assert plan_micro_batches([5], 10, multiple_of=3) == [[0], [], []]


def test_items_of_no_cost_fill_empty_parts_first():
    assert plan_micro_batches([0, 0, 4], 4, multiple_of=3) == [[0], [1], [2]]


def test_many_items_above_half_the_budget_are_planned_at_once():
    costs = [51 + i % 7 for i in range(5000)]
    assert len(plan_micro_batches(costs, BUDGET)) == 5000


@pytest.mark.parametrize(("costs", "budget"), [([3, 11, 12], 10), ([1], 0)])
def test_what_cannot_fit_names_the_budget(costs, budget):
    with pytest.raises(UserError, match="token_budget") as caught:
        plan_micro_batches(costs, budget)
    assert "token_budget" in caught.value.remedy
    if budget:
        assert "sequence 1 of 11 tokens" in caught.value.found and "12" in caught.value.remedy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"costs": [1, -1]}, "negative cost"),
        ({"costs": [1], "multiple_of": 0}, "multiple_of"),
        ({"costs": [1], "groups": [0, 1]}, "2 groups for 1 items"),
    ],
)
def test_calls_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        plan_micro_batches(budget=10, **options)
