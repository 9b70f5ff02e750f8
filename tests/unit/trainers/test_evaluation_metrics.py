"""From scored answers to figures, by source, by prompt, with intervals; and one model's answers against another's."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from quartet.algorithms.evaluation_math import win_rate_interval
from quartet.config import UserError
from quartet.config.evaluation import GradingConfig, NumberAnswer, RegexAnswer, TextAnswer
from quartet.trainers.evaluation_metrics import (
    EvaluationMetric,
    ScoredAnswer,
    build_extractor,
    compare_by_judge,
    compare_scores,
    compute_metrics,
    metric_values,
    prompt_means,
    resolve_graders,
    standard_error,
    win_rate,
)


def answers(rows: Sequence[Sequence[tuple[str, dict[str, float]]]]) -> list[ScoredAnswer]:
    """One row per prompt, one ``(text, rewards)`` per sample."""
    return [
        ScoredAnswer(f"p{p}", sample, f"p{p}", text, "length" if text == "cut" else "stop", len(text), rewards)
        for p, row in enumerate(rows)
        for sample, (text, rewards) in enumerate(row)
    ]


def figures(
    found: Sequence[ScoredAnswer], graded: Sequence[str] = ("x",), **grading: Any
) -> dict[str, EvaluationMetric]:
    weights = {name: 1.0 for name in found[0].rewards}
    rows = compute_metrics(found, {"eval/score_mean": weights}, GradingConfig(**grading), graded, seed=0)
    return {figure.name: figure for figure in rows}


def test_one_sample_gives_means_and_exact_match() -> None:
    found = figures(answers([[("a", {"x": 1.0})], [("b", {"x": 0.5})], [("cut", {"x": math.nan})]]))
    assert {name: figure.value for name, figure in found.items()} == {
        "eval/x": 0.75,
        "eval/score_mean": 0.75,
        "eval/x/exact_match": 0.5,
        "eval/length_mean": pytest.approx(5 / 3),
        "eval/truncated_frac": pytest.approx(1 / 3),
    }
    assert found["eval/x"].num_prompts == 2, "a prompt without a score has no part"
    assert found["eval/x/exact_match"].interval == "wilson"
    assert found["eval/x"].interval == "bootstrap"


def test_the_score_is_the_weighted_sum_that_training_maximises() -> None:
    rows = answers([[("a", {"x": 1.0, "y": 4.0})], [("b", {"x": 3.0, "y": math.nan})]])
    found = metric_values(compute_metrics(rows, {"eval/score_mean": {"x": 1.0, "y": 0.5}}, GradingConfig(), (), seed=0))
    assert found["eval/score_mean"] == ((1 + 2) + 3) / 2
    assert (found["eval/x"], found["eval/y"]) == (2.0, 4.0)
    assert "eval/x/exact_match" not in found, "not graded"


def test_several_samples_by_hand() -> None:
    """Two of four right: pass@2 = 1 − 1/6."""
    one = [("7", {"x": 1.0}), ("8", {"x": 0.0}), ("7", {"x": 1.0}), ("9", {"x": math.nan})]
    two = [("1", {"x": 0.0}), ("1", {"x": 0.0}), ("2", {"x": 1.0}), ("2", {"x": 1.0})]
    found = figures(answers([one, two]), pass_at=(1, 2, 3, 4), majority_at=(2, 3))
    assert found["eval/x/exact_match"].value == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert found["eval/x/pass@1"].value == pytest.approx(found["eval/x/exact_match"].value)
    assert found["eval/x/pass@2"].value == pytest.approx(((1 - 0 / 3) + (1 - 1 / 6)) / 2)
    assert found["eval/x/pass@4"].num_prompts == 1, "the other prompt has three samples with a score"
    # first prompt: 7 against 8, tied; second: 1 twice, wrong, then 2 twice, right
    assert found["eval/x/maj@2"].value == pytest.approx((0.5 + (0 + 1) / 2) / 2)
    # 7, 8, 7 is right; 1, 1, 2 is wrong
    assert found["eval/x/maj@3"].value == 0.5


def test_threshold_decides_what_is_right() -> None:
    rows = answers([[("a", {"x": 0.6})], [("b", {"x": 0.4})]])
    assert figures(rows)["eval/x/exact_match"].value == 0
    assert figures(rows, threshold=0.6)["eval/x/exact_match"].value == 0.5


def test_intervals_hold_the_value_and_depend_on_the_seed_alone() -> None:
    rows = answers([[("a", {"x": k / 10})] for k in range(10)])
    found = figures(rows)["eval/x"]
    assert found.low is not None and found.high is not None and found.low < 0.45 < found.high
    assert figures(rows)["eval/x"] == found
    narrow = figures(rows, confidence=0.5)["eval/x"]
    assert narrow.low is not None and narrow.high is not None
    assert found.low < narrow.low < narrow.high < found.high
    assert figures(rows[:1])["eval/x"].interval == "wilson", "one prompt, 0 of 1 right"
    assert figures(rows[3:4])["eval/x"].low is None, "one prompt, no spread to learn from"
    plain = compute_metrics(rows, {}, GradingConfig(), (), seed=0, intervals=False)
    assert all(figure.interval is None for figure in plain)
    assert metric_values(plain)["eval/x"] == found.value


@pytest.mark.parametrize(
    ("config", "text", "expected"),
    [
        (TextAnswer(), "  yes \n", "yes"),
        (TextAnswer(), "  ", None),
        (NumberAnswer(), "so 12 and then 1,234.50.", "1234.5"),
        (NumberAnswer(), "#### 1234.5", "1234.5"),
        (NumberAnswer(), "-0.0", "0"),
        (NumberAnswer(), "1,000 = 1e3", "1000"),
        (NumberAnswer(), "none", None),
        (RegexAnswer(pattern=r"\\boxed\{(.*?)\}"), r"\boxed{1} or \boxed{ x }", "x"),
        (RegexAnswer(pattern=r"[A-D]"), "A, no: C", "C"),
        (RegexAnswer(pattern=r"(\d)?!"), "!", None),
        (RegexAnswer(pattern=r"\d"), "no digit", None),
    ],
)
def test_what_counts_as_one_answer(config: Any, text: str, expected: str | None) -> None:
    assert build_extractor(config)(text) == expected


def test_equal_numbers_are_one_answer() -> None:
    extract = build_extractor(NumberAnswer())
    assert len({extract(text) for text in ("1,000", "1000.0", "1e3", "= 1000.")}) == 1
    assert extract("9" * 400 + "e" + "9" * 30) is not None


def test_votes_count_extracted_answers() -> None:
    row = [("so 5", {"x": 1.0}), ("5.0", {"x": 1.0}), ("it is 6", {"x": 0.0}), ("no idea", {"x": 0.0})]
    assert figures(answers([row]), majority_at=(4,), answer=NumberAnswer())["eval/x/maj@4"].value == 1
    assert figures(answers([row]), majority_at=(4,))["eval/x/maj@4"].value == 0.5, "as texts all four differ"


def test_graded_sources() -> None:
    assert resolve_graders(GradingConfig(), ["rm", "f", "g"], ["rm"]) == ("f", "g")
    assert resolve_graders(GradingConfig(sources=("rm",)), ["rm", "f"], ["rm"]) == ("rm",)
    with pytest.raises(UserError, match=r"grading\.sources"):
        resolve_graders(GradingConfig(sources=("h",)), ["rm", "f"], ["rm"])


def test_prompt_means_and_their_error() -> None:
    rows = answers([[("a", {"x": 1.0}), ("b", {"x": 0.0})], [("c", {"x": math.nan}), ("d", {"x": 1.0})]])
    found = prompt_means(rows, [answer.rewards["x"] for answer in rows])
    assert found == {"p0": 0.5, "p1": 1.0}
    assert standard_error([0.5, 1.0, math.nan]) == pytest.approx(math.sqrt(0.125 / 2))
    assert math.isnan(standard_error([1.0]))


# One model against another ---------------------------------------------------------------------------------


def side(scores: Sequence[float], samples: int = 1, text: str = "") -> list[ScoredAnswer]:
    """``samples`` answers per prompt with these scores, in order."""
    return [
        ScoredAnswer(
            f"p{i // samples}", i % samples, f"prompt {i // samples}", text or f"{score}", "stop", 1, {"x": score}
        )
        for i, score in enumerate(scores)
    ]


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


def test_the_higher_score_wins_beyond_the_margin() -> None:
    found = compare_scores(side([1.0, 0.5, 0.2, 0.0, math.nan]), side([0.0, 0.5, 0.3, 0.5, 1.0]), {}, "x", 0.15)
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


def test_one_missing_judgement_is_no_verdict() -> None:
    judge: Any = Numbers()
    found = asyncio.run(compare_by_judge(side([2.0, 1.0, 5.0, math.nan]), side([1.0, 1.0, 9.0, 1.0]), judge, 0.0))
    assert [c.verdict for c in found] == ["good", "same", "bad", None]
    assert [c.preference for c in found[:3]] == [1.0, 0.0, -1.0]


def test_several_samples_are_compared_place_by_place_and_hang_together_by_prompt() -> None:
    one, other = side([1.0, 1.0, 0.0, 1.0], samples=2), side([0.0, 1.0, 1.0, 0.0], samples=2)
    found = compare_scores(one, other, {}, "x", 0.0)
    assert [(c.first.prompt_id, c.first.sample, c.verdict) for c in found] == [
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


def test_nothing_to_count_is_said() -> None:
    with pytest.raises(UserError, match="no pair"):
        win_rate(compare_scores(side([math.nan]), side([1.0]), {}, "x", 0.0), 0.95, 0)
