"""What holds for every source: batches, order, concurrency, deadlines, failures."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from quartet.config import UserError
from quartet.rewards.functions import PassedFunction
from quartet.rewards.source import GuardedReward, LimitedThreads, RewardError, RewardSource, ScoreOutcome


class Source(RewardSource):
    """Scores by a function of one completion, after whatever ``before`` does."""

    name = "probe"

    def __init__(self, judge: Callable[[str], float | None], before: Callable[[], Any] | None = None) -> None:
        self.judge, self.before = judge, before
        self.calls: list[list[str]] = []

    async def score(
        self, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[float | None]:
        self.calls.append(list(completions))
        assert len(prompts) == len(completions) == len(columns["n"])
        if self.before is not None:
            await self.before()
        return [self.judge(completion) for completion in completions]


def failing(text: str) -> RewardError:
    return RewardError(f"cannot score {text}", found="a", remedy="b")


def run(reward: GuardedReward, completions: Sequence[str]) -> ScoreOutcome:
    columns = {"n": list(range(len(completions)))}
    return asyncio.run(reward.score(["?"] * len(completions), completions, columns))


def test_calls_are_marked_where_they_begin_and_end() -> None:
    """Also where somebody else keeps the event loop busy before the scores are taken."""
    marks: list[float] = []
    reward = GuardedReward(Source(float))

    async def busy() -> None:
        await asyncio.sleep(0)
        time.sleep(0.2)

    async def beside() -> None:
        score = reward.score(["?"], ["1"], {"n": [0]}, lambda: marks.append(time.monotonic()))
        await asyncio.gather(score, busy())

    begun = time.monotonic()
    asyncio.run(beside())
    assert time.monotonic() - begun >= 0.2
    assert len(marks) == 2 and marks[1] - marks[0] < 0.1


def test_batches_and_their_order_whenever_they_end() -> None:
    waits = random.Random(0)

    async def wait() -> None:
        await asyncio.sleep(waits.random() * 0.02)

    source = Source(float, wait)
    outcome = run(GuardedReward(source, batch_size=3), [str(n) for n in range(10)])
    assert outcome == ScoreOutcome([float(n) for n in range(10)], [False] * 10)
    assert sorted(map(len, source.calls)) == [1, 3, 3, 3]
    assert run(GuardedReward(source), []) == ScoreOutcome([], [])


def test_concurrency_holds_over_all_chunks() -> None:
    at_once, most = 0, 0

    async def wait() -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.005)
        at_once -= 1

    reward = GuardedReward(Source(float, wait), batch_size=1, concurrency=3)

    async def chunks() -> None:
        texts = ["1"] * 6
        await asyncio.gather(*(reward.score(["?"] * 6, texts, {"n": texts}) for _ in range(3)))

    asyncio.run(chunks())
    assert most == 3
    asyncio.run(chunks())  # and in another event loop
    assert most == 3


def judge_or_fail(text: str) -> float:
    if text == "bad":
        raise failing(text)
    return 1.0


def test_a_failure_stops_or_is_left_out() -> None:
    texts = ["a", "bad", "c"]
    with pytest.raises(RewardError, match="cannot score bad"):
        run(GuardedReward(Source(judge_or_fail), batch_size=1), texts)
    reward = GuardedReward(Source(judge_or_fail), batch_size=1, on_error="leave_out")
    outcome = run(reward, texts)
    assert (outcome.scores, outcome.failed) == ([1.0, None, 1.0], [False, True, False])
    assert [str(reason.problem) for reason in outcome.reasons] == ["cannot score bad"]
    assert reward.warnings() == ["reward 'probe': 1 samples left out; the first because cannot score bad: a"]


def test_errors_that_are_no_failures_of_the_source_always_come_out() -> None:
    def judge(text: str) -> float:
        raise UserError("a column is missing", found="", remedy="")

    with pytest.raises(UserError, match="column"):
        run(GuardedReward(Source(judge), on_error="leave_out"), ["a"])


def test_the_deadline_leaves_out_what_is_late_and_keeps_the_rest() -> None:
    class Slow(Source):
        async def score(self, prompts: Any, completions: Any, columns: Any) -> list[float | None]:
            await asyncio.sleep(30 if completions[0] == "slow" else 0)
            return [1.0]

    start = time.monotonic()
    texts = ["a", "slow", "c"]
    outcome = run(GuardedReward(Slow(float), batch_size=1, deadline_s=0.1, on_error="leave_out"), texts)
    assert (outcome.scores, outcome.failed) == ([1.0, None, 1.0], [False, True, False])
    with pytest.raises(RewardError, match="late"):
        run(GuardedReward(Slow(float), batch_size=1, deadline_s=0.1), texts)
    assert time.monotonic() - start < 10


def test_a_busy_event_loop_makes_nothing_late() -> None:
    """The score was there in time; that nobody looked for it until the deadline is not its fault."""
    threads = LimitedThreads(1, "probe")
    done = threading.Event()

    class InThread(Source):
        async def score(self, prompts: Any, completions: Any, columns: Any) -> list[float | None]:
            def work() -> list[float | None]:
                done.set()
                return [1.0]

            return (await asyncio.gather(threads.run(work)))[0]

    async def both() -> ScoreOutcome:
        reward = GuardedReward(InThread(float), deadline_s=0.2, on_error="leave_out")
        scoring = asyncio.create_task(reward.score(["?"], ["a"], {"n": [0]}))
        while not done.is_set():
            await asyncio.sleep(0)
        time.sleep(0.5)  # generation holds the loop
        return await scoring

    assert asyncio.run(both()).scores == [1.0]
    threads.close()


def test_what_is_cancelled_stops_its_calls() -> None:
    cancelled = 0

    async def wait() -> None:
        nonlocal cancelled
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled += 1
            raise

    async def stop() -> None:
        reward = GuardedReward(Source(float, wait), batch_size=1)
        task = asyncio.create_task(reward.score(["?"] * 2, ["1", "2"], {"n": [0, 1]}))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stop())
    assert cancelled == 2


@pytest.mark.parametrize(
    ("error", "raised"), [(StopIteration("over"), RuntimeError), (KeyError("k"), KeyError), (SystemExit(3), SystemExit)]
)
def test_whatever_a_thread_raises_is_raised_where_it_is_waited_for(
    error: BaseException, raised: type[BaseException]
) -> None:
    """Also what a future of asyncio refuses to hold: Python makes a RuntimeError of StopIteration in a coroutine."""

    def fail() -> None:
        raise error

    async def wait() -> None:
        with pytest.raises(raised):
            await threads.run(fail)

    threads = LimitedThreads(1, "probe")
    asyncio.run(asyncio.wait_for(wait(), 10))
    threads.close()


def test_a_deadline_holds_for_an_async_function() -> None:
    async def awaits(completions: list[str]) -> list[float]:
        await asyncio.sleep(30 if "slow" in completions else 0)
        return [1.0]

    held = GuardedReward(PassedFunction(awaits), deadline_s=0.1, on_error="leave_out")
    assert asyncio.run(held.score(["?"], ["slow"], {})).failed == [True]
    assert asyncio.run(held.score(["?"], ["quick"], {})).failed == [False]


def test_calls_that_are_no_longer_waited_for_never_begin() -> None:
    threads, release, begun = LimitedThreads(1, "probe"), threading.Event(), []

    async def stop() -> None:
        first = asyncio.create_task(threads.run(release.wait, 10))
        others = [asyncio.create_task(threads.run(begun.append, n)) for n in range(3)]
        await asyncio.sleep(0.01)
        others[1].cancel()
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(first, *others, return_exceptions=True)

    asyncio.run(stop())
    threads.close()
    assert begun == [0, 2]


def test_a_call_that_never_comes_back_does_not_keep_the_process() -> None:
    code = """
import asyncio, contextlib, time
from quartet.rewards.source import Threads
async def wait():
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(threads.run(time.sleep, 1e6), 0.1)
threads = Threads(1, "probe")
asyncio.run(wait())
threads.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
