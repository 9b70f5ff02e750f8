"""Reward functions: what they receive and every way in which they can fail."""

import asyncio
import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quartet.config.errors import UserError
from quartet.config.targets import load_target
from quartet.rewards.builtin import exact_match
from quartet.rewards.functions import PassedFunction
from quartet.rewards.source import RewardError

PROMPTS = ["one?", "two?"]
COMPLETIONS = ["1", "22"]


def score(function: Callable[..., Any], prompts: Any = PROMPTS, **columns: Any) -> list[float | None]:
    return asyncio.run(PassedFunction(function).score(prompts, COMPLETIONS, columns))


def test_a_function_gets_what_it_names() -> None:
    def reward(completions: list[str], answer: list[str]) -> list[float]:
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    assert score(reward, answer=["1", "2"], other=[0, 0]) == [1.0, 0.0]


def test_a_function_with_keyword_arguments_gets_all() -> None:
    seen: dict[str, Any] = {}

    def reward(**everything: Any) -> list[float]:
        seen.update(everything)
        return [0.0, 0.0]

    score(reward, answer=["1", "2"])
    assert seen == {"prompts": PROMPTS, "completions": COMPLETIONS, "answer": ["1", "2"]}


def test_chat_prompts_come_with_conversational_completions() -> None:
    chat = [[{"role": "user", "content": "one?"}], [{"role": "user", "content": "two?"}]]
    assert score(lambda completions: [len(c[0]["content"]) for c in completions], prompts=chat) == [1.0, 2.0]


def test_async_functions_are_awaited() -> None:
    async def reward(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    assert score(reward) == [1.0, 1.0]


def test_a_function_cannot_change_the_batch() -> None:
    def reward(completions: list[str]) -> list[float]:
        completions.clear()
        return [0.0, 0.0]

    completions = list(COMPLETIONS)
    asyncio.run(PassedFunction(reward).score(PROMPTS, completions, {}))
    assert completions == COMPLETIONS


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ([1, None], [1.0, None]),
        ((0.5, True), [0.5, 1.0]),
        (np.array([1, 2]), [1.0, 2.0]),
        (torch.tensor([1.0, 2.0]), [1.0, 2.0]),
        ([np.float32(1), np.int64(2)], [1.0, 2.0]),
        ([torch.tensor(1.5), 2], [1.5, 2.0]),
    ],
)
def test_results_that_are_taken(result: Any, expected: list[float | None]) -> None:
    assert score(lambda completions: result) == expected


@pytest.mark.parametrize(
    ("result", "problem", "sample"),
    [
        ([1.0], "returned 1 scores for 2 completions", "22"),
        ([1.0, 2.0, 3.0], "returned 3 scores for 2 completions", "22"),
        ([1.0, math.nan], "returned nan for sample 1", "22"),
        ([math.inf, 0.0], "returned inf for sample 0", "'1'"),
        ([10**400, 0.0], "returned a number beyond what float32 holds for sample 0", "'1'"),
        ([0.0, -1e39], "returned a number beyond what float32 holds for sample 1", "22"),
        ([np.float64(1e300), 0.0], "returned a number beyond what float32 holds for sample 0", "'1'"),
        ([1.0, "good"], "returned 'good' (str) for sample 1", "22"),
        ([[1.0], [2.0]], "returned [1.0] (list) for sample 0", "'1'"),
        (None, "returned NoneType, not a list", "'1'"),
        ([1j, 0.0], "returned 1j (complex) for sample 0", "'1'"),
        ([Decimal("0.5"), 0.0], "returned Decimal('0.5') (Decimal) for sample 0", "'1'"),
        ({"a": 1}, "returned dict, not a list", "'1'"),
    ],
)
def test_results_that_stop_the_run(result: Any, problem: str, sample: str) -> None:
    with pytest.raises(RewardError) as caught:
        score(lambda completions: result)
    assert problem in caught.value.problem and sample in caught.value.found and "resume" in caught.value.remedy


def test_a_function_that_raises_is_shown_with_its_cause() -> None:
    def brittle(completions: list[str]) -> list[float]:
        raise KeyError("oops")

    with pytest.raises(RewardError, match=r"'brittle' raised KeyError: 'oops'") as caught:
        score(brittle)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "prompt 'one?', completion '1'" in caught.value.found


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("error", "what"),
    [
        (GeneratorExit("over"), "raised RuntimeError: it raised GeneratorExit"),
        (SystemExit(0), "raised SystemExit: 0"),
        (StopIteration(), "raised "),
        (ValueError("x" * 10_000_000), "raised ValueError: xxx"),
    ],
)
def test_whatever_a_function_raises_is_a_failure(error: BaseException, what: str, is_async: bool) -> None:
    def raises(completions: list[str]) -> list[float]:
        raise error

    async def raises_later(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        raise error

    with pytest.raises(RewardError) as caught:
        score(raises_later if is_async else raises)
    assert f"' {what}" in caught.value.problem and len(str(caught.value)) < 4000
    assert "in raises" in caught.value.found and "test_reward_functions.py" in caught.value.found


def test_a_cancelled_part_of_an_async_function_is_a_failure_and_no_cancelled_run() -> None:
    async def reward(completions: list[str]) -> list[float]:
        part = asyncio.ensure_future(asyncio.sleep(30))
        part.cancel()
        await part
        return []

    with pytest.raises(RewardError, match="raised CancelledError"):
        score(reward)


def test_missing_columns_are_named_before_any_work() -> None:
    def reward(completions: list[str], answer: list[str]) -> list[float]:
        return []

    with pytest.raises(UserError, match="did you mean 'answers'"):
        PassedFunction(reward).check_columns(["answers"])
    PassedFunction(reward).check_columns(["answer"])
    with pytest.raises(UserError, match="no parameter `completions`"):
        PassedFunction(lambda samples: []).check_columns([])


def test_functions_are_found_in_files_and_modules(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("FACTOR = 3\ndef f(completions):\n    return [FACTOR for _ in completions]\n")
    found = load_target(f"{path}:f", "function")
    assert found(["a"]) == [3]
    assert load_target("quartet.rewards.builtin:exact_match", "function") is exact_match


@pytest.mark.parametrize(
    ("target", "part"),
    [
        ("f", "file.py:name or package.module:name"),
        ("{dir}/mine.py", "file.py:name or package.module:name"),
        ("{dir}/mnie.py:f", "did you mean 'mine.py'"),
        ("{dir}/mine.py:brevty", "did you mean 'brevity'"),
        ("{dir}/mine.py:FACTOR", "there is no function 'FACTOR'"),
        ("{dir}/broken.py:f", "line 1: SyntaxError"),
        ("{dir}/raises.py:f", "ZeroDivisionError"),
        ("no.such.module:f", "ModuleNotFoundError"),
        ("{dir}/exits.py:f", "cannot be imported"),
        ("~nobody_of_that_name/mine.py:f", "no such file"),
    ],
)
def test_targets_that_cannot_be_loaded(tmp_path: Path, target: str, part: str) -> None:
    (tmp_path / "mine.py").write_text("FACTOR = 3\ndef brevity(completions): return []\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(UserError) as caught:
        load_target(target.format(dir=tmp_path), "function")
    assert part in str(caught.value)
