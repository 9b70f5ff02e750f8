"""User code in this process draws no random number of training's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quartet.observe.global_state import RandomStateGuard

DRAWS: dict[str, Callable[[], Any]] = {
    "the generator of `random`": random.random,
    "numpy's global generator": np.random.rand,
    "torch's global generator": lambda: torch.rand(()).item(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_drawn_beside_training(name: str) -> None:
    """The code draws what it would draw alone, call after call, and training what it would draw without it."""
    draw = DRAWS[name]

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed()
    alone = [draw() for _ in range(4)]
    seed()
    guard, inside, outside = RandomStateGuard("the reward 'x'"), [], []
    for _ in range(4):
        with guard.held():
            inside.append(draw())
        outside.append(draw())
    assert inside == alone == outside and len(set(alone)) == 4
    (warning,) = guard.warnings()
    assert f"draws from {name}" in warning and "resumed" in warning


def test_what_is_drawn_before_an_error_is_not_training_s_either() -> None:
    guard = RandomStateGuard("the reward 'x'")
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    with pytest.raises(ZeroDivisionError), guard.held():
        torch.rand(5)
        raise ZeroDivisionError
    assert torch.equal(torch.rand(3), wanted) and "torch's global generator" in guard.warnings()[0]


# Code that waits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWS)
def test_async_code_has_its_own_generators_between_the_places_where_it_waits(name: str) -> None:
    draw = DRAWS[name]

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    async def numbers() -> list[Any]:
        found = []
        for _ in range(4):
            found.append(draw())
            await asyncio.sleep(0)
        return found

    async def both() -> list[list[Any]]:
        return await asyncio.gather(RandomStateGuard("the reward 'x'").driven(numbers()), numbers())

    seed()
    alone = [draw() for _ in range(4)]
    seed()
    assert asyncio.run(both()) == [alone, alone]


def test_async_code_hears_errors_and_cancellation() -> None:
    guard, heard = RandomStateGuard("the reward 'x'"), []

    async def work() -> str:
        try:
            await failing()
        except ZeroDivisionError:
            heard.append("error")
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except TimeoutError:
            heard.append("timeout")
        try:
            await asyncio.sleep(60)
        finally:
            heard.append("cancelled")
        return "never"

    async def failing() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    async def cancelled() -> None:
        task = asyncio.create_task(guard.driven(work()))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert heard == ["error", "timeout", "cancelled"]
