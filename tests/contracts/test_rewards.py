"""What every source of reward that is asked with text must do. A new one joins by one entry in ``SOURCES``."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib.util
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import sandboxes
from quartet.config import UserError
from quartet.config.rewards import (
    ExactMatchReward,
    FormatReward,
    FunctionReward,
    HTTPReward,
    JudgeReward,
    LengthReward,
    MathReward,
    NumericReward,
    PairwiseJudge,
    RegexReward,
    RewardSourceConfig,
)
from quartet.extras.sandbox.config import CodeReward
from quartet.rewards.build import build_reward
from quartet.rewards.functions import PassedFunction
from quartet.rewards.source import GuardedReward, ScoreOutcome

PROMPTS: list[Any] = ["one?", [{"role": "user", "content": "two?"}], "three?", "four?", "five?", "six?"]
COMPLETIONS = ["1", "two", "the answer is 3", "", "5 or 6?", "ünï\ncode 6"]
ANSWERS = ["1", "2", "3", "4", None, "6"]
TESTS = [["assert x == 1"], ["assert True"], "assert 1 == 1", [{"input": "", "output": ""}], None, ["assert False"]]
COLUMNS = {"answer": ANSWERS, "tests": TESTS}


def passed(completions: list[Any], answer: list[Any], **_: Any) -> list[float | None]:
    return [None if a is None else float(len(str(c))) for c, a in zip(completions, answer, strict=True)]


async def passed_async(completions: list[Any], answer: list[Any], **_: Any) -> list[float | None]:
    await asyncio.sleep(0.05)
    return passed(completions, answer)


def scores_of_lengths(body: Any) -> tuple[int, Any]:
    time.sleep(0.05)
    pairs = zip(body["completions"], body["columns"]["answer"], strict=True)
    return 200, {"scores": [None if answer is None else len(text) for text, answer in pairs]}


def judgement(body: Any) -> tuple[int, Any]:
    time.sleep(0.05)
    question = body["messages"][0]["content"]
    text = f"Score: {len(question) % 10} [[{'ABC'[len(question) % 3]}]]"
    return 200, {"choices": [{"message": {"content": text}}]}


@dataclass
class Case:
    """A source, the column that it reads (None: all or none), and whether scoring leaves the event loop free."""

    reward: GuardedReward
    column: str | None
    is_beside: bool = False
    applies: list[bool] = field(default_factory=lambda: [True] * len(COMPLETIONS))


HAS_ANSWER = [answer is not None for answer in ANSWERS]
Build = Callable[[Any], Case]


def case(config: RewardSourceConfig, column: str | None, *, beside: bool = False, applies: Any = None) -> Case:
    return Case(build_reward(config), column, beside, list(applies) if applies else [True] * len(COMPLETIONS))


def function(name: str, **options: Any) -> FunctionReward:
    return FunctionReward(target=f"{Path(__file__).parents[1] / 'user_functions.py'}:{name}", **options)


SOURCES: dict[str, Build] = {
    "exact_match": lambda serve: case(ExactMatchReward(), "answer", applies=HAS_ANSWER),
    "numeric": lambda serve: case(NumericReward(), "answer", applies=HAS_ANSWER),
    "regex": lambda serve: case(RegexReward(pattern=r"\d"), None),
    "format": lambda serve: case(FormatReward(pattern=r".*\d.*"), None),
    "length": lambda serve: case(LengthReward(target=5), None),
    "function": lambda serve: case(function("lengths"), "answer", beside=True, applies=HAS_ANSWER),
    "function in processes": lambda serve: case(
        function("lengths", processes=2, batch_size=2), "answer", beside=True, applies=HAS_ANSWER
    ),
    "async function": lambda serve: case(function("lengths_async"), "answer", beside=True, applies=HAS_ANSWER),
    "passed function": lambda serve: Case(GuardedReward(PassedFunction(passed)), "answer", False, list(HAS_ANSWER)),
    "passed async function": lambda serve: Case(
        GuardedReward(PassedFunction(passed_async)), "answer", True, list(HAS_ANSWER)
    ),
    "math": lambda serve: case(MathReward(), "answer", beside=True, applies=HAS_ANSWER),
    "code": lambda serve: case(
        CodeReward(timeout_s=20), "tests", beside=True, applies=[test is not None for test in TESTS]
    ),
    "http": lambda serve: case(
        HTTPReward(url=serve(scores_of_lengths).url, batch_size=2), None, beside=True, applies=HAS_ANSWER
    ),
    "pointwise judge": lambda serve: case(JudgeReward(url=serve(judgement).url, model="m"), None, beside=True),
    "pairwise judge": lambda serve: case(
        JudgeReward(url=serve(judgement).url, model="m", method=PairwiseJudge()),
        "answer",
        beside=True,
        applies=HAS_ANSWER,
    ),
}


def build(name: str, serve: Any) -> Case:
    if name == "math" and importlib.util.find_spec("math_verify") is None:
        pytest.skip("math-verify is missing")
    if name == "code" and sandboxes.WHY_NOT:
        pytest.skip(sandboxes.WHY_NOT)
    return SOURCES[name](serve)


@pytest.fixture(params=list(SOURCES), scope="module")
def source(request: pytest.FixtureRequest, serve: Any) -> Iterator[Case]:
    made = build(request.param, serve)
    yield made
    made.reward.close()


def score(source: Case, places: list[int]) -> ScoreOutcome:
    return asyncio.run(score_async(source, places))


async def score_async(source: Case, places: list[int]) -> ScoreOutcome:
    columns = {name: [values[n] for n in places] for name, values in COLUMNS.items()}
    return await source.reward.score([PROMPTS[n] for n in places], [COMPLETIONS[n] for n in places], columns)


ALL = list(range(len(COMPLETIONS)))


def test_one_finite_score_per_completion_or_none_where_it_does_not_apply(source: Case) -> None:
    outcome = score(source, ALL)
    assert [value is not None for value in outcome.scores] == source.applies
    assert all(value is None or (type(value) is float and math.isfinite(value)) for value in outcome.scores)
    assert outcome.failed == [False] * len(ALL) and outcome.reasons == ()


def test_scores_do_not_depend_on_other_samples_order_or_event_loop(source: Case) -> None:
    together = score(source, ALL).scores
    assert [score(source, [n]).scores[0] for n in ALL] == together
    assert score(source, ALL[::-1]).scores == together[::-1]


def test_chunks_may_be_scored_at_the_same_time(source: Case) -> None:
    async def several() -> list[ScoreOutcome]:
        return await asyncio.gather(*(score_async(source, part) for part in (ALL[:2], ALL[2:], ALL)))

    expected = score(source, ALL).scores
    first, second, whole = asyncio.run(several())
    assert first.scores + second.scores == whole.scores == expected


def test_nothing_is_scored_as_nothing(source: Case) -> None:
    assert score(source, []) == ScoreOutcome([], [])


def test_inputs_are_left_as_they_are(source: Case) -> None:
    before = copy.deepcopy((PROMPTS, COMPLETIONS, COLUMNS))
    score(source, ALL)
    assert before == (PROMPTS, COMPLETIONS, COLUMNS)


def test_a_column_that_is_not_there_is_named_before_any_work(source: Case) -> None:
    source.reward.check_columns(list(COLUMNS))
    if source.column is None:
        source.reward.check_columns([])
        return
    with pytest.raises(UserError, match=source.column):
        source.reward.check_columns(["other"])


def test_the_event_loop_is_free_meanwhile(source: Case) -> None:
    """Generation goes on while a source waits or computes elsewhere."""
    if not source.is_beside:
        pytest.skip("a rule takes no time; a plain function that Python passes runs where it is called")

    async def count() -> int:
        turns = 0
        scoring = asyncio.create_task(score_async(source, ALL))
        while not scoring.done():
            await asyncio.sleep(0)
            turns += 1
        await scoring
        return turns

    score(source, ALL)  # whatever starts once has started
    # How many turns a free loop gets is a matter of time, and so of what else the machine does; one try is enough.
    tries = [0]
    while tries[-1] < 100 and len(tries) < 10:
        tries.append(asyncio.run(count()))
    assert tries[-1] >= 100, f"{tries}: a source that holds the loop leaves it some ten turns each time"


def test_the_name_can_be_part_of_a_metric(source: Case) -> None:
    from quartet.observe.metrics import find_metric

    for name in (f"reward/{source.reward.name}", f"reward/{source.reward.name}/left_out"):
        find_metric(name)


@pytest.mark.parametrize("name", SOURCES)
def test_close_may_be_called_twice_and_leaves_no_thread_and_no_process(name: str, serve: Any) -> None:
    build(name, serve).reward.close()  # before anything was scored
    before = alive()
    made = build(name, serve)
    assert len(score(made, ALL[:1]).scores) == 1
    made.reward.close()
    made.reward.close()
    until = time.monotonic() + 20
    while alive() - before and time.monotonic() < until:
        time.sleep(0.01)
    assert alive() <= before


def alive() -> set[threading.Thread | int]:
    """Threads, without those of the servers that are asked, and numbers of processes that this one started."""
    pids: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            pids.update(map(int, path.read_text().split()))
    return pids | {thread for thread in threading.enumerate() if "serve_forever" not in thread.name}
