"""Rules about the text, as functions and as sources of a recipe."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from quartet.config import UserError
from quartet.config.rewards import (
    ExactMatchReward,
    FormatReward,
    LengthReward,
    MathReward,
    NumericReward,
    RegexReward,
)
from quartet.rewards.build import RuleSource
from quartet.rewards.builtin import MathSource, exact_match, format_match, last_number, length, numeric, regex


def score(config: Any, completions: list[str], **columns: Any) -> list[float | None]:
    return asyncio.run(RuleSource(config).score(["?"] * len(completions), completions, columns))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is 42.", 42.0),
        ("1,234,567.5 in all", 1234567.5),
        ("#### -3", -3.0),
        ("x=-0.5", -0.5),
        ("10-7", 7.0),
        ("f(2)-1", 1.0),
        ("2e-3", 0.002),
        (".5", 0.5),
        ("$18", 18.0),
        ("25%", 25.0),
        ("−7", -7.0),
        ("first 3, then 12,34", 34.0),
        ("3 apples and 4 pears", 4.0),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_numeric_compares_last_numbers() -> None:
    assert numeric(["it is 1,000", "9 or 10"], ["1000", "#### 9"]) == [1.0, 0.0]
    assert numeric(["no number", "3"], [3, "none"]) == [0.0, None]
    assert numeric(["3.14", "3.2", "-3.14"], [3.1416] * 3, tolerance=0.01) == [1.0, 0.0, 0.0]
    assert numeric(["101", "102"], [100, 100], relative_tolerance=0.01) == [1.0, 0.0]


def test_exact_match() -> None:
    assert exact_match([" Paris\n", "paris", "Rome"], ["Paris", "Paris", None]) == [1.0, 0.0, None]
    assert exact_match(["paris"], ["Paris"], ignore_case=True) == [1.0]
    assert exact_match([[{"role": "assistant", "content": "4"}]], [4]) == [1.0]


def test_regex_finds_or_compares_its_group() -> None:
    assert regex(["yes, A", "no"], pattern="A") == [1.0, 0.0]
    pattern = r"answer: (\w+)"
    texts = ["answer: A, no, answer: B", "answer: A", "B"]
    assert regex(texts, ["B", "B", "B"], pattern=pattern) == [1.0, 0.0, 0.0]
    assert regex(["ANSWER: b"], ["B"], pattern=pattern, ignore_case=True) == [1.0]
    assert regex(["x"], [None], pattern=pattern) == [None]
    assert regex(["answer"], ["B"], pattern="answer(: B)?") == [0.0], "a group that took no part"


def test_format_by_pattern_and_by_tags() -> None:
    assert format_match(["<a>1\n2</a>\n", "so <a>1</a>"], pattern="<a>.*</a>") == [1.0, 0.0]
    right = "<think>because</think>\n<answer>4</answer>"
    wrong = [
        "<answer>4</answer><think>because</think>",
        "<think>a</think><think>b</think><answer>4</answer>",
        "<think>because<answer>4</answer></think>",
        "<think>because</think><answer>4",
        "4",
    ]
    assert format_match([right, *wrong], tags=["think", "answer"]) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_length() -> None:
    texts = ["", "ab", "abcd", "abcdef", "abcdefgh", "abcdefghij"]
    assert length(texts) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert length(texts, max=4) == [1.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    assert length(texts, target=4) == [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    assert length(["a bc  d", "a"], max=2, unit="words") == [0.5, 1.0]


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (["18", "eighteen 18"], ["18", "eighteen 18"], ["17"]),
        ((18, 19), ["18", "19"], ["1819"]),
        (np.array([18, 19]), ["18", "19"], ["17"]),
        ([["18"], None, math.nan], ["18"], ["nan"]),
        (18.0, ["18", "18.0"], ["180"]),
        (np.float64(18.0), ["18"], ["180"]),
        (1e16, ["10000000000000000"], ["1"]),
        (1e-05, ["0.00001"], ["1"]),
        ("18", ["18"], ["nan"]),
        (math.nan, [], ["nan", "18"]),
        (None, [], ["None"]),
        ([], [], ["[]"]),
        ([None, math.nan], [], ["nan"]),
    ],
)
@pytest.mark.parametrize(
    "config", [ExactMatchReward(), NumericReward(), RegexReward(pattern=r"(.+)", column="answer"), MathReward()]
)
def test_right_answers_of_every_kind_of_column(config: Any, answer: Any, right: list[str], wrong: list[str]) -> None:
    """Any of a list counts, a whole number may have become a float, NaN is no answer."""
    if isinstance(config, MathReward):  # the process that compares is not what is tested
        pytest.importorskip("math_verify")
        source = MathSource(config)
        source._compared = lambda text, gold: float(text == gold)  # type: ignore[method-assign]
    else:
        source = RuleSource(config)
    texts = right + wrong
    scores = asyncio.run(source.score(["?"] * len(texts), texts, {"answer": [answer] * len(texts)}))
    assert scores == ([1.0] * len(right) + [0.0] * len(wrong) if right else [None] * len(wrong))


@pytest.mark.parametrize("answer", [{"style": "rule", "ground_truth": "4"}, ["4", {"ground_truth": "4"}]])
@pytest.mark.parametrize("function", [exact_match, numeric])
def test_an_object_is_no_right_answer(function: Any, answer: Any) -> None:
    with pytest.raises(UserError, match=r"(?s)are objects.*'ground_truth'.*data.columns.answer=COLUMN.KEY"):
        function(["4"], [answer])


@pytest.mark.parametrize(
    ("column", "columns", "remedy"),
    [
        ("answer", ["reward_model", "reward_model.ground_truth"], "data.columns.answer=reward_model.ground_truth"),
        ("answer", ["extra", "extra.answer", "r", "r.ground_truth"], "data.columns.answer=r.ground_truth"),
        ("ground_truth", ["ground", "ground.ground_truth"], "data.columns.ground_truth=ground.ground_truth"),
        ("index", ["extra_info", "extra_info.index", "r.ground_truth"], "data.columns.index=extra_info.index"),
        ("reward_mode", ["reward_model", "reward_model.style"], "did you mean 'reward_model.style'?"),
        ("reward_mode", ["reward_model"], "did you mean 'reward_model'?"),
    ],
)
def test_the_hint_never_leads_to_an_object(column: str, columns: list[str], remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        RuleSource(NumericReward(column=column)).check_columns(columns)
    assert caught.value.remedy.endswith(remedy)


def test_types_of_a_recipe_are_these_functions_with_options() -> None:
    assert score(ExactMatchReward(column="gold", ignore_case=True), ["A"], gold=["a"], answer=["b"]) == [1.0]
    assert score(NumericReward(tolerance=0.5), ["1.4"], answer=[1]) == [1.0]
    assert score(RegexReward(pattern="^a"), ["ab", "ba"], answer=["x", "x"]) == [1.0, 0.0], "no column is compared"
    assert score(RegexReward(pattern="(.)$", column="last"), ["ab"], last=["b"]) == [1.0]
    assert score(FormatReward(tags=("t",)), ["<t></t>"]) == [1.0]
    assert score(LengthReward(max=2), ["abc"]) == [0.5]
