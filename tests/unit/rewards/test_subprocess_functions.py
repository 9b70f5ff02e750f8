"""Functions that a recipe names: in processes of their own, whatever they do there."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.config import UserError
from quartet.config.rewards import FunctionReward
from quartet.rewards.build import build_reward
from quartet.rewards.source import GuardedReward, RewardError, ScoreOutcome

FUNCTIONS = Path(__file__).parents[2] / "user_functions.py"

Make = Callable[..., GuardedReward]


@pytest.fixture
def made() -> Iterator[Make]:
    """Makes rewards and closes them in the end."""
    with contextlib.ExitStack() as stack:

        def make(name: str, **options: Any) -> GuardedReward:
            reward = build_reward(FunctionReward(target=f"{FUNCTIONS}:{name}", **options))
            stack.callback(reward.close)
            return reward

        yield make


async def scored(reward: GuardedReward, completions: list[str], **columns: Any) -> ScoreOutcome:
    return await reward.score(["?"] * len(completions), completions, columns)


def score(reward: GuardedReward, completions: list[str], **columns: Any) -> list[float | None]:
    return asyncio.run(scored(reward, completions, **columns)).scores


def pids(reward: GuardedReward) -> list[int]:
    seats = reward.source._pool._slots  # type: ignore[attr-defined]
    return [slot.process.pid for slot in seats if slot.process is not None]


def is_there(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# What it may do -------------------------------------------------------------------------------------------


def test_it_changes_nothing_here(made: Make) -> None:
    def here() -> list[Any]:
        signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
        streams = [os.fstat(fd).st_ino for fd in range(3)]
        found = [os.getcwd(), dict(os.environ), sys.getrecursionlimit(), sys.stdout.closed, signals, streams]
        return [*found, torch.is_grad_enabled(), sys.stderr]

    before = here()
    reward = made("every_state")
    assert score(reward, ["a"]) == score(reward, ["b"]) == [1.0]
    assert here() == before


@pytest.mark.parametrize("how", ["close", "its own end"])
def test_what_it_leaves_in_another_process_group_goes_with_it(made: Make, how: str) -> None:
    reward = made("leaves_apart")
    numbers = score(reward, ["session", "group", "daemon"])
    left = [int(number or 0) for number in numbers]
    assert all(map(is_there, left)), "as long as its process is there"
    if how == "close":
        reward.close()
    else:
        os.kill(pids(reward)[0], signal.SIGKILL)
    wait_for(lambda: not any(map(is_there, left)))


def test_its_end_is_noticed_although_a_child_of_it_keeps_the_connection(made: Make) -> None:
    begun = time.monotonic()
    with pytest.raises(RewardError, match="it ended with exit status 3"):
        score(made("leaves_a_child_and_ends"), ["a"])
    assert time.monotonic() - begun < 10


def test_signals_are_its_own(made: Make) -> None:
    assert score(made("own_signals"), ["a"]) == [1.0]


def test_signals_to_the_whole_job_leave_it_alone(made: Make) -> None:
    """The trainer finishes its step after the first of them, and needs the scores for it."""
    reward = made("sleeps")
    score(reward, ["a"])

    async def signalled() -> ScoreOutcome:
        scoring = asyncio.create_task(scored(reward, ["b"] * 3))
        await asyncio.sleep(0.01)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            os.kill(pids(reward)[0], number)
        return await scoring

    assert asyncio.run(signalled()).scores == [float(pids(reward)[0])] * 3


def test_what_it_prints_is_printed(made: Make, capfd: pytest.CaptureFixture[str]) -> None:
    assert score(made("shows_itself"), ["a"]) == [1.0]
    assert capfd.readouterr() == ("printed and written\n", "to standard error\n")


def test_it_computes_with_as_many_threads_as_the_run(made: Make) -> None:
    assert score(made("threads_of_torch"), ["a"]) == [float(torch.get_num_threads())]


def test_columns_are_what_they_were(made: Make) -> None:
    assert score(made("class_of"), ["a", "b"], thing=[datetime.date(2026, 1, 1), "text"]) == [1.0, 0.0]


def test_columns_that_cannot_be_handed_over_are_named(made: Make) -> None:
    class Local:
        pass

    reward = made("class_of")
    with pytest.raises(UserError, match="cannot be handed to the process of the reward 'class_of'"):
        score(reward, ["a"], thing=[Local()])
    with pytest.raises(UserError, match=r"cannot be handed to .*\n.*ZeroDivisionError"):
        score(reward, ["a"], thing=[NotThere()])
    assert score(reward, ["a"], thing=["text"]) == [0.0]


class NotThere:
    """Can be written down, and not be made of that."""

    def __reduce__(self) -> Any:
        return eval, ("1 / 0",)


# How it fails ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["raises", "raises_async"])
def test_whatever_it_raises_is_a_failure_of_the_reward(made: Make, function: str) -> None:
    reward = made(function, on_error="leave_out")
    (pid,) = pids(reward)
    kinds = {
        "SystemExit": "raised SystemExit: 0",
        "KeyboardInterrupt": "raised KeyboardInterrupt",
        "GeneratorExit": "raised GeneratorExit: over",
        "CancelledError": "raised CancelledError",
        "long": "raised ValueError: xxx",
        "recursion": "raised RecursionError: maximum recursion",
    }
    for kind, what in kinds.items():
        outcome = asyncio.run(scored(reward, ["a"], error=[kind]))
        (reason,) = outcome.reasons
        assert reason.problem.startswith(f"the reward {function!r} {what}"), kind
        assert "sample 0: prompt '?', completion 'a'; raised in" in reason.found and "user_functions.py" in reason.found
        assert len(str(reason)) < 4000 and outcome.failed == [True]
        assert "in raises" in str(reason.__cause__), "with its traceback"
    assert pids(reward) == [pid], "and its process goes on"


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("exit", "it ended with exit status 0"),
        ("kill", "it was ended by SIGKILL, perhaps for want of memory"),
        ("close", "it ended with exit status 1"),
    ],
)
def test_the_end_of_its_process_is_a_failure_and_the_next_call_gets_another(made: Make, how: str, what: str) -> None:
    reward = made("ends", on_error="leave_out")
    outcome = asyncio.run(scored(reward, ["a", "b"], how=[how, how]))
    assert outcome.failed == [True, True]
    assert f"the reward 'ends' lost its process: {what}" in outcome.reasons[0].problem
    assert score(reward, ["a"], how=["stay"]) == [1.0]


def test_an_answer_that_is_none_costs_the_process(made: Make) -> None:
    with pytest.raises(RewardError, match="lost its process: it said what is no message"):
        score(made("forges"), ["a"])


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("import sys\nsys.exit(0)", "cannot be imported"),
        ("import os\nos._exit(0)", "it ended with exit status 0"),
        ("def f(samples): return []", "has no parameter `completions`"),
        ("x = input()\ndef f(completions): return []", "EOF"),
    ],
)
def test_modules_that_cannot_be_loaded(tmp_path: Path, source: str, part: str) -> None:
    (tmp_path / "mine.py").write_text(source + "\n")
    with pytest.raises(UserError) as caught:
        reward = build_reward(FunctionReward(target=f"{tmp_path}/mine.py:f"))
        with contextlib.closing(reward):
            reward.check_columns([])
    assert part in str(caught.value)


def test_files_beside_the_recipe_do_not_stand_for_pythons_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's random.py in the current directory."""
    for name in ("random", "json", "socket", "math", "source"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('the wrong file')\n")
    (tmp_path / "mine.py").write_text("import math, random\ndef f(completions): return [math.sqrt(4)]\n")
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(build_reward(FunctionReward(target="mine.py:f"))) as reward:
        assert score(reward, ["a"]) == [2.0]


def test_modules_are_found_as_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "rewards.py").write_text("def f(completions): return [3.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    with contextlib.closing(build_reward(FunctionReward(target="package.rewards:f"))) as reward:
        assert score(reward, ["a"]) == [3.0] and reward.name == "f"


# Time -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sleeps", "sleeps_async", "holds_the_interpreter"])
def test_a_deadline_ends_the_call(made: Make, name: str) -> None:
    reward = made(name, deadline_s=1.0)
    (pid,) = pids(reward)
    begun = time.monotonic()
    with pytest.raises(RewardError, match="late"):
        score(reward, ["slow"])
    wait_for(lambda: not is_there(pid))
    assert time.monotonic() - begun < 10
    if name != "holds_the_interpreter":
        assert score(reward, ["quick"]) not in ([float(pid)], [None]), "the next call has another process"


def test_a_start_takes_nothing_from_a_deadline(tmp_path: Path) -> None:
    """A module that loads for longer than a call may take would never come to its turn."""
    source = (
        "import time\ntime.sleep(0.8)\ndef f(completions):\n time.sleep(60 * ('slow' in completions))\n return [1.0]\n"
    )
    (tmp_path / "mine.py").write_text(source)
    config = FunctionReward(target=f"{tmp_path}/mine.py:f", deadline_s=0.5, on_error="leave_out")
    with contextlib.closing(build_reward(config)) as reward:
        assert score(reward, ["a"]) == [1.0] and score(reward, ["slow"]) == [None]
        assert score(reward, ["a"]) == [1.0]


def test_plain_calls_come_one_after_the_other_in_the_main_thread(made: Make) -> None:
    reward = made("waits_in_threads", batch_size=1)
    begun = time.monotonic()
    assert score(reward, ["a", "b"]) == [1.0] * 2
    assert time.monotonic() - begun > 0.8


def test_several_processes_share_the_calls(made: Make) -> None:
    reward = made("sleeps", processes=2, batch_size=1)
    assert len(pids(reward)) == 2, "all are there before the first call"
    found = score(reward, ["a"] * 8)
    assert len({*found}) == 2 and {*found} == {float(pid) for pid in pids(reward)}


def test_a_cancelled_call_that_has_not_begun_costs_nothing(made: Make) -> None:
    reward = made("sleeps")
    (pid,) = pids(reward)

    async def cancelled() -> ScoreOutcome:
        first = asyncio.create_task(scored(reward, ["a"]))
        second = asyncio.create_task(scored(reward, ["b"]))
        await asyncio.sleep(0.005)
        second.cancel()
        return await first

    assert asyncio.run(cancelled()).scores == [float(pid)]


# Ends -----------------------------------------------------------------------------------------------------

ONE_CALL = """
import asyncio, os, signal, sys
from quartet.config.rewards import FunctionReward
from quartet.rewards.build import build_reward
reward = build_reward(FunctionReward(target=sys.argv[1]))
slot = reward.source._pool._slots[0]
print(slot.process.pid, flush=True)
asyncio.run(reward.score(["?"], ["a"], {}))
"""

BARE_CALL = """
import sys
from quartet.rewards.subprocesses import Subprocess
process = Subprocess("quartet.rewards.function_worker:serve_function", {"target": sys.argv[1], "threads": 0})
print(process.pid, flush=True)
process.ask({"completions": ["slow"]})
"""


@pytest.mark.parametrize("name", ["sleeps", "holds_the_interpreter"])
def test_it_ends_with_the_trainer_however_that_ends(name: str) -> None:
    """The trainer is killed in the middle of a call, and the call does not look at anything."""
    arguments = [sys.executable, "-c", BARE_CALL, f"{FUNCTIONS}:{name}"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        time.sleep(0.2)
        assert is_there(pid)
        trainer.kill()
    wait_for(lambda: not is_there(pid))


def test_it_ends_with_a_trainer_that_closes_nothing() -> None:
    arguments = [sys.executable, "-c", ONE_CALL, f"{FUNCTIONS}:sleeps"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not is_there(int(done.stdout))


def test_close_does_not_wait_for_a_call() -> None:
    reward = build_reward(FunctionReward(target=f"{FUNCTIONS}:sleeps"))
    (pid,) = pids(reward)

    async def left() -> None:
        scoring = asyncio.create_task(scored(reward, ["slow"]))
        await asyncio.sleep(0.1)
        begun = time.monotonic()
        reward.close()
        assert time.monotonic() - begun < 5
        with pytest.raises(RewardError, match="lost its process"):
            await scoring

    asyncio.run(left())
    assert not is_there(pid)


def test_questions_of_any_size(made: Make) -> None:
    reward = made("share_of_digits")
    texts = ["1" * 3_000_000, "ü" * 1_000_000, "", "\ud800 1\0"]
    assert score(reward, texts) == [1.0, 0.0, 0.0, 0.25]
