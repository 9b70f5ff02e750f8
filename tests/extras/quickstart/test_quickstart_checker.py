"""Exact match of the final answer, and the judge who errs at a known rate."""

import pytest

from quartet.extras.quickstart import task
from quartet.extras.quickstart.checker import is_correct, judge_pairs


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("7+5=12;4+8+1=13;132", True),
        ("132", True),
        ("7+5=99;132", True),
        ("7+5=12;4+8+0=12;122", False),
        ("7+5=12;4+8+1=13;0132", False),
        ("7+5=12;4+8+1=13;132;", False),
        ("7+5=12;4+8+1=13;13", False),
        ("7+5=12;4+8+1=132", False),
        ("", False),
    ],
)
def test_exact_match_of_the_final_answer(completion: str, right: bool) -> None:
    assert is_correct("47+85=", completion) is right


def _groups(n: int) -> list[tuple[str, list[str]]]:
    """Groups of a right and a wrong completion each."""
    groups = []
    for prompt in task.toy_prompts(100, n):
        first, second = task.operands(prompt)
        groups.append((prompt, [task.work(first, second), str(first + second + 1)]))
    return groups


def test_a_judge_without_errors_prefers_what_is_right() -> None:
    pairs = judge_pairs(100, _groups(50), error_rate=0.0)
    assert len(pairs) == 50
    assert all(is_correct(pair["prompt"], pair["chosen"]) for pair in pairs)
    assert not any(is_correct(pair["prompt"], pair["rejected"]) for pair in pairs)


def test_the_judge_errs_at_the_stated_rate_and_repeatably() -> None:
    groups = _groups(2000)
    pairs = judge_pairs(100, groups)
    wrong = sum(is_correct(pair["prompt"], pair["rejected"]) for pair in pairs)
    assert 0.08 < wrong / len(pairs) < 0.12
    assert pairs == judge_pairs(100, groups)
    assert judge_pairs(100, groups[7:9]) == pairs[7:9]


def test_groups_without_contrast_yield_no_pair() -> None:
    assert judge_pairs(100, [("47+85=", ["132", "7+5=12;132"]), ("47+85=", ["1", "2"])]) == []
