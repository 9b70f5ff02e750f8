"""A language model as a judge: questions, scores, verdicts in both orders."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quartet.config import UserError
from quartet.config.rewards import JudgeReward, PairwiseJudge, PointwiseJudge, RetryConfig
from quartet.rewards.build import build_reward
from quartet.rewards.judge import JudgeComparer, format_messages

FAST = RetryConfig(attempts=2, first_wait_s=0.0)


def says(text: str | None) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def question(body: Any) -> str:
    (message,) = body["messages"]
    assert message["role"] == "user"
    return str(message["content"])


def judge(url: str, **changes: Any) -> JudgeReward:
    return JudgeReward(**{"url": url + "/v1", "model": "m", "retry": FAST, **changes})


def score(config: JudgeReward, prompts: list[Any], completions: list[str], **columns: list[Any]) -> Any:
    reward = build_reward(config)
    reward.check_columns(list(columns))
    try:
        return asyncio.run(reward.score(prompts, completions, columns))
    finally:
        reward.close()


def test_a_pointwise_score_on_its_scale(serve: Any) -> None:
    numbers = {"good": "8", "bad": "1.5", "odd": "Score: 2\nNo: **Score:** 10"}

    def answer(body: Any) -> Any:
        text = question(body)
        return says(next(f"I think.\nScore: {n}" for key, n in numbers.items() if f"\n{key}\n" in text))

    asked = serve(answer)
    method = PointwiseJudge(rubric="Is it kind?", lowest=0, highest=10)
    outcome = score(judge(asked.url, method=method), ["q"] * 3, ["good", "bad", "odd"])
    assert outcome.scores == pytest.approx([0.8, 0.15, 1.0])
    assert set(asked.paths) == {"/v1/chat/completions"}
    body = asked.bodies[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.0, 512)
    assert "Is it kind?" in question(body) and "from 0 (worst) to 10 (best)" in question(body)


@pytest.mark.parametrize("text", ["no idea", "", "Score: 11", "Score: -1", None])
def test_an_answer_without_a_score_is_a_failure_and_not_a_low_score(serve: Any, text: str | None) -> None:
    asked = serve(lambda body: says(text))
    outcome = score(judge(asked.url), ["q"], ["a"])
    assert (outcome.scores, outcome.failed) == ([None], [True])


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ("Score: 1e400", "the score '1e400' is not on the scale from 0 to 10"),
        ("Score: 5, or Score: 1,000", "the score '1,000' is not a number"),
        ("Score: ７", "the score '７' is not a number"),
        ("Score: " + "1" * 1_000_000, "is not on the scale from 0 to 10"),
        ("Score: nan", "nothing in the judge's answer matches"),
    ],
)
def test_what_is_no_score_is_refused_with_the_reason(serve: Any, said: str, part: str) -> None:
    outcome = score(judge(serve(lambda body: says(said)).url), ["q"], ["a"])
    assert outcome.failed == [True] and part in outcome.reasons[0].found
    assert len(str(outcome.reasons[0])) < 2000


@pytest.mark.parametrize("said", ["nan", "1_0", "1e999"])
def test_what_an_own_pattern_finds_must_be_a_number(serve: Any, said: str) -> None:
    method = PointwiseJudge(pattern=r"is (.*)", lowest=-5)
    outcome = score(judge(serve(lambda body: says(f"It is {said}")).url, method=method), ["q"], ["a"])
    assert outcome.failed == [True] and "the score " in outcome.reasons[0].found


@pytest.mark.parametrize(
    ("said", "share"),
    [("7", 0.7), ("7.", 0.7), ("7/10", 0.7), ("**7**", 0.7), ("7分", 0.7), ("7.25 points", 0.725), ("1e0", 0.1)],
)
def test_numbers_as_judges_write_them(serve: Any, said: str, share: float) -> None:
    assert score(judge(serve(lambda body: says(f"Score: {said}")).url), ["q"], ["a"]).scores == pytest.approx([share])


@pytest.mark.parametrize("first", ["no idea", "Score: 11"])
def test_a_judge_that_answers_otherwise_than_asked_is_asked_again(serve: Any, first: str) -> None:
    asked = serve(lambda body: says(first if len(asked.bodies) == 1 else "Score: 5"))
    assert score(judge(asked.url), ["q"], ["a"]).scores == [0.5]


@pytest.mark.parametrize("body", [{}, {"choices": []}, {"choices": [{"text": "Score: 1"}]}, [], "Score: 1"])
def test_what_is_no_chat_completion_is_named(serve: Any, body: Any) -> None:
    asked = serve(lambda _: (200, body))
    outcome = score(judge(asked.url), ["q"], ["a"])
    assert outcome.failed == [True] and "not a chat completion" in outcome.reasons[0].found


def test_chats_and_own_templates(serve: Any) -> None:
    asked = serve(lambda body: says("Score: 10"))
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    method = PointwiseJudge(template="{rubric}|{prompt}|{completion}|{level}|{unclosed", rubric="r")
    score(judge(asked.url, method=method), [chat], ["{prompt} {level}"], level=[3])
    assert question(asked.bodies[0]) == "r|system: Be brief.\n\nuser: Hi|{prompt} {level}|3|{unclosed"
    assert format_messages("plain") == "plain"
    shown = [{"type": "image", "image": None}, {"type": "text", "text": " what?"}]
    assert format_messages([{"role": "user", "content": shown}]) == "user: [picture] what?"


def test_a_template_may_only_ask_for_what_is_there() -> None:
    method = PointwiseJudge(template="{completion} {levle}")
    with pytest.raises(UserError, match="did you mean 'level'"):
        build_reward(judge("http://localhost", method=method)).check_columns(["level"])


def longer_wins(body: Any) -> Any:
    """Reads A and B out of the question; the longer one is the better one."""
    text = question(body)
    a = text.split("[answer A]\n")[1].split("\n[end")[0]
    b = text.split("[answer B]\n")[1].split("\n[end")[0]
    return says("[[A]]" if len(a) > len(b) else "[[B]]" if len(b) > len(a) else "[[C]]")


def test_pairwise_verdicts_against_a_column(serve: Any) -> None:
    asked = serve(longer_wins)
    config = judge(asked.url, method=PairwiseJudge(column="other"))
    outcome = score(config, ["q"] * 4, ["long answer", "s", "same", "x"], other=["short", "longer", "emas", None])
    assert outcome.scores == [1.0, -1.0, 0.0, None] and not any(outcome.failed)
    assert len(asked.bodies) == 6, "each pair in both orders"


def test_a_judge_that_favours_a_place_decides_nothing(serve: Any) -> None:
    for always, expected in (("[[A]]", 0.0), ("[[B]]", 0.0), ("[[C]]", 0.0)):
        asked = serve(lambda body, always=always: says(f"{always} is what I say"))
        config = judge(asked.url, method=PairwiseJudge(column="other"))
        assert score(config, ["q"], ["one"], other=["two"]).scores == [expected]


def test_one_verdict_and_one_draw_make_a_half(serve: Any) -> None:
    def answer(body: Any) -> Any:
        return says("[[A]]" if "[answer A]\nours" in question(body) else "[[C]]")

    asked = serve(answer)
    config = judge(asked.url, method=PairwiseJudge(column="other"))
    assert score(config, ["q"], ["ours"], other=["theirs"]).scores == [0.5]


def test_compare_is_antisymmetric_and_leaves_out_what_fails(serve: Any) -> None:
    def answer(body: Any) -> Any:
        return (400, {}) if "broken" in question(body) else longer_wins(body)

    asked = serve(answer)
    comparer = JudgeComparer(judge(asked.url, method=PairwiseJudge()))
    ours, theirs = ["longest", "a", "ab", "broken"], ["long", "abc", "ba", "x"]

    async def both() -> Any:
        prompts: list[Any] = ["q"] * 4
        return await comparer.compare(prompts, ours, theirs), await comparer.compare(prompts, theirs, ours)

    forth, back = asyncio.run(both())
    comparer.close()
    assert forth == [1.0, -1.0, 0.0, None]
    assert back == [-1.0, 1.0, 0.0, None]


def test_only_a_pairwise_judge_compares() -> None:
    with pytest.raises(UserError, match="pairwise"):
        JudgeComparer(judge("http://localhost"))
