"""The addition task: worked examples, the fault rule, disjoint splits, pure functions of the seed."""

import random

import pytest

from quartet.extras.quickstart import task


@pytest.mark.parametrize(
    ("habit", "completion"),
    [
        ("careful", "7+5=12;4+8+1=13;132"),
        ("forgetful", "7+5=12;4+8+0=12;122"),
        ("eager", "7+5=12;4+8+1=13;132"),
    ],
)
def test_work_with_a_carry(habit: task.Habit, completion: str) -> None:
    assert task.work(47, 85, habit) == completion


def test_operands_of_different_length_share_their_columns() -> None:
    assert task.work(47, 5) == "7+5=12;4+0+1=5;52"
    assert task.work(96, 7) == "6+7=13;9+0+1=10;103"


def test_prompt_and_operands_are_inverse() -> None:
    assert task.operands(task.prompt_of(47, 85)) == (47, 85)


def test_demonstrations_depend_on_the_seed_alone() -> None:
    random.seed(1)
    before = random.getstate()
    rows = task.toy_demonstrations(100, 50)
    assert random.getstate() == before
    assert rows == task.toy_demonstrations(100, 80)[:50]
    assert rows != task.toy_demonstrations(101, 50)


def test_most_demonstrators_make_the_same_mistake_where_there_is_a_carry() -> None:
    with_carry, same_wrong, without_carry, right_without = 0, 0, 0, 0
    for row in task.toy_demonstrations(100, 4000):
        first, second = task.operands(row["prompt"])
        if task.work(first, second) == task.work(first, second, "forgetful"):
            without_carry += 1
            right_without += row["completion"] == task.work(first, second)
        else:
            with_carry += 1
            same_wrong += row["completion"] == task.work(first, second, "forgetful")
    assert 0.45 < with_carry / (with_carry + without_carry) < 0.65
    assert abs(same_wrong / with_carry - task.HABITS["forgetful"]) < 0.04
    assert abs(right_without / without_carry - (1 - task.HABITS["eager"])) < 0.04


def test_splits_are_disjoint_whatever_the_seed_and_the_order_of_operands() -> None:
    trained = {task.operands(row["prompt"]) for row in task.toy_demonstrations(100, 3000)}
    trained |= {task.operands(prompt) for prompt in task.toy_prompts(101, 2000)}
    held_out = {task.operands(prompt) for prompt in task.toy_prompts(102, 500, "held_out")}
    mirrored = {(second, first) for first, second in held_out}
    assert len(held_out) == 500
    assert not trained & (held_out | mirrored)


def test_prompts_are_distinct_and_depend_on_the_seed_alone() -> None:
    drawn = task.toy_prompts(100, 1000)
    assert len(set(drawn)) == 1000
    assert drawn == task.toy_prompts(100, 1000)
    assert drawn != task.toy_prompts(101, 1000)


def test_more_prompts_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="distinct"):
        task.toy_prompts(100, task.num_inputs("held_out") + 1, "held_out")
