"""Good, same, bad: rules, judges with their favourite place, counts and intervals."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from quartet.algorithms.evaluation import win_rate_interval
from quartet.config import UserError
from quartet.data.datasets import PromptItem
from quartet.trainers.comparison import BothOrders, compare_by_judge, compare_scores, win_rate
from quartet.trainers.evaluation import Answer


def side(scores: Sequence[float], samples: int = 1, text: str = "") -> list[Answer]:
    """``samples`` answers per prompt with these scores, in order."""
    return [
        Answer(
            PromptItem(f"p{i // samples}", f"prompt {i // samples}", {}, "", 1),
            text or f"{score}",
            "stop",
            {"x": score},
            i % samples,
        )
        for i, score in enumerate(scores)
    ]


def by_x(answers: Sequence[Answer]) -> list[float]:
    return [answer.rewards["x"] for answer in answers]


class Numbers:
    """Prefers the larger number, whatever the place; no verdict about what is none."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    async def compare(self, prompts: Sequence[Any], a: Sequence[str], b: Sequence[str]) -> list[float | None]:
        assert all(str(prompt).startswith("prompt") for prompt in prompts)
        self.asked += list(zip(a, b, strict=True))
        return [
            None if "nan" in x + y else float((float(x) > float(y)) - (float(x) < float(y)))
            for x, y in zip(a, b, strict=True)
        ]


class First:
    """Always prefers the first place."""

    async def compare(self, prompts: Sequence[Any], a: Sequence[str], b: Sequence[str]) -> list[float | None]:
        return [1.0] * len(prompts)


def test_the_higher_score_wins_beyond_the_margin() -> None:
    found = compare_scores(side([1.0, 0.5, 0.2, 0.0, math.nan]), side([0.0, 0.5, 0.3, 0.5, 1.0]), by_x, 0.15)
    assert [c.verdict for c in found] == ["good", "same", "same", "bad", None]
    rate = win_rate(found, 0.95, 0)
    assert (rate.good, rate.same, rate.bad, rate.no_verdict) == (1, 2, 1, 1)
    assert rate.win_rate == 0.5 and rate.interval == "score"
    assert (rate.low, rate.high) == win_rate_interval(1, 2, 1)
    assert rate.metrics() == {
        "eval/win_rate": 0.5,
        "eval/good": 0.25,
        "eval/same": 0.5,
        "eval/bad": 0.25,
        "eval/no_verdict": 1.0,
    }


def test_turning_the_models_round_turns_the_verdicts_round() -> None:
    one, other = side([1.0, 0.4, 0.2, 0.1]), side([0.0, 0.5, 0.3, 0.1])
    forth, back = (win_rate(compare_scores(a, b, by_x, 0.0), 0.95, 0) for a, b in ((one, other), (other, one)))
    assert (forth.good, forth.same, forth.bad) == (back.bad, back.same, back.good)
    assert forth.win_rate == 1 - back.win_rate and forth.low == pytest.approx(1 - back.high)


def test_a_judge_that_loves_the_first_place_proves_nothing() -> None:
    one, other = side([1.0] * 30), side([0.0] * 30)
    fair = win_rate(asyncio.run(compare_by_judge(one, other, BothOrders(First()), 0.0)), 0.95, 0)
    assert fair.win_rate == 0.5 and fair.same == 30
    naive = win_rate(asyncio.run(compare_by_judge(one, other, First(), 0.0)), 0.95, 0)
    assert naive.win_rate == 1, "what asking once would have said"


def test_both_orders_are_asked_and_agree() -> None:
    judge = Numbers()
    found = asyncio.run(compare_by_judge(side([2.0, 1.0, 5.0]), side([1.0, 1.0, 9.0]), BothOrders(judge), 0.0))
    assert [c.verdict for c in found] == ["good", "same", "bad"]
    assert [c.preference for c in found] == [1.0, 0.0, -1.0]
    assert judge.asked[:3] == [(b, a) for a, b in judge.asked[3:]]


def test_one_missing_judgement_is_no_verdict() -> None:
    class Once(Numbers):
        async def compare(self, prompts: Sequence[Any], a: Sequence[str], b: Sequence[str]) -> list[float | None]:
            found = await super().compare(prompts, a, b)
            return [None, *found[1:]] if len(self.asked) > len(prompts) else found

    found = asyncio.run(compare_by_judge(side([2.0, 3.0]), side([1.0, 1.0]), BothOrders(Once()), 0.0))
    assert [c.verdict for c in found] == [None, "good"]


def test_a_half_hearted_preference_counts_unless_the_margin_holds_it() -> None:
    class Unsure:
        async def compare(self, prompts: Sequence[Any], a: Sequence[str], b: Sequence[str]) -> list[float | None]:
            return [0.5 if x > y else -0.5 for x, y in zip(a, b, strict=True)]

    pairs = side([1.0]), side([0.0])
    assert asyncio.run(compare_by_judge(*pairs, BothOrders(Unsure()), 0.0))[0].verdict == "good"
    assert asyncio.run(compare_by_judge(*pairs, BothOrders(Unsure()), 0.5))[0].verdict == "same"


def test_several_samples_are_compared_place_by_place_and_hang_together_by_prompt() -> None:
    one, other = side([1.0, 1.0, 0.0, 1.0], samples=2), side([0.0, 1.0, 1.0, 0.0], samples=2)
    found = compare_scores(one, other, by_x, 0.0)
    assert [(c.first.item.prompt_id, c.first.sample, c.verdict) for c in found] == [
        ("p0", 0, "good"),
        ("p0", 1, "same"),
        ("p1", 0, "bad"),
        ("p1", 1, "good"),
    ]
    rate = win_rate(found, 0.95, 0)
    assert rate.win_rate == (2 + 0.5) / 4 and rate.interval == "bootstrap"
    assert (rate.low, rate.high) == (0.5, 0.75), "two prompts, with 0.75 and 0.5"
    alone = win_rate(found[:2], 0.95, 0)
    assert (alone.low, alone.high, alone.interval) == (0.0, 1.0, "none")


def test_pairs_are_matched_by_prompt_and_place() -> None:
    one, other = side([1.0, 2.0, 3.0]), side([0.0, 5.0, 0.0])[::-1][:2]
    assert [c.verdict for c in compare_scores(one, other, by_x, 0.0)] == ["bad", "good"]


def test_nothing_to_count_is_said() -> None:
    with pytest.raises(UserError, match="no pair"):
        win_rate(compare_scores(side([math.nan]), side([1.0]), by_x, 0.0), 0.95, 0)


def test_rows_keep_both_answers() -> None:
    (found,) = compare_scores(side([1.0], text="ours"), side([math.nan], text="theirs"), by_x, 0.0)
    assert found.row() == {
        "prompt_id": "p0",
        "sample": 0,
        "prompt": "prompt 0",
        "completion": "ours",
        "against": "theirs",
        "rewards": {"x": 1.0},
        "against_rewards": {"x": None},
        "preference": None,
        "verdict": None,
    }
