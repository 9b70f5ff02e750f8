"""Extra edges: what waits, for what, and that a failed step holds nobody back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from quartet.schedule.clock import now, run_virtual
from quartet.schedule.iteration import Barriers, Chunk, Scorer

Log = list[tuple[str, int, float]]


class Timed:
    """Takes ``seconds`` and notes its end."""

    def __init__(self, name: str, seconds: float, log: Log) -> None:
        self.name, self.seconds, self.log = name, seconds, log

    async def score(self, chunk: Chunk) -> str:
        await asyncio.sleep(self.seconds)
        self.log.append((self.name, chunk.index, now()))
        return self.name

    async def train(self, experience: Any, step: int) -> dict[str, float]:
        await self.score(Chunk(step, -1, 0))
        return {}


def collect(step: int, index: int, groups: Sequence[int]) -> Chunk:
    return Chunk(step, index, index)


async def play(scorers: Sequence[Scorer], barriers: Barriers, *, steps: int = 1, chunk_s: float = 1.0) -> None:
    """Two chunks per step, one after another."""
    gather = barriers.collect(collect)
    for step in range(steps):
        async with asyncio.TaskGroup() as tasks:
            for index in range(2):
                await asyncio.sleep(chunk_s)
                chunk = gather(step, index, [])
                for scorer in scorers:
                    tasks.create_task(scorer.score(chunk))  # type: ignore[arg-type]


def played(after: dict[str, Sequence[str]], seconds: dict[str, float], steps: int = 1) -> Log:
    log: Log = []
    barriers = Barriers(after, num_chunks=2)
    scorers = [barriers.scorer(name, Timed(name, s, log)) for name, s in seconds.items()]
    run_virtual(play(scorers, barriers, steps=steps))
    return log


def test_without_edges_nothing_waits() -> None:
    assert played({}, {"reward": 0.5}) == [("reward", 0, 1.5), ("reward", 1, 2.5)]


def test_a_stage_waits_for_all_chunks_of_another() -> None:
    log = played({"values": ["reward"]}, {"reward": 0.5, "values": 0.25}, steps=2)
    assert [entry for entry in log if entry[0] == "values"] == [
        ("values", 0, 2.75),
        ("values", 1, 2.75),
        ("values", 0, 5.5),
        ("values", 1, 5.5),
    ]


def test_scoring_after_generation_waits_for_the_last_chunk() -> None:
    assert played({"reward": ["generate"]}, {"reward": 0.5}) == [("reward", 0, 2.5), ("reward", 1, 2.5)]


def test_several_scorers_make_up_one_stage() -> None:
    log: Log = []
    barriers = Barriers({"values": ["reward"]}, num_chunks=2)
    rewards = [barriers.scorer("reward", Timed(f"reward{i}", 0.5 + i, log)) for i in range(2)]
    run_virtual(play([barriers.scorer("values", Timed("values", 0.0, log)), *rewards], barriers))
    assert min(end for name, _, end in log if name == "values") == 3.5


def test_a_stage_without_a_role_holds_no_other_back() -> None:
    assert played({"values": ["reward"]}, {"values": 0.5}) == [("values", 0, 1.5), ("values", 1, 2.5)]


def test_learners_wait_for_each_other_where_an_edge_says_so() -> None:
    log: Log = []

    async def main() -> None:
        barriers = Barriers({"train_critic": ["train_actor"]}, num_chunks=1)
        critic = barriers.learner("train_critic", Timed("critic", 1.0, log))
        actor = barriers.learner("train_actor", Timed("actor", 2.0, log))
        barriers.collect(collect)(0, 0, [])
        await asyncio.gather(critic.train(None, 0), actor.train(None, 0))

    run_virtual(main())
    assert log == [("actor", -1, 2.0), ("critic", -1, 3.0)]


def test_a_failed_step_is_not_waited_for() -> None:
    log: Log = []

    async def main() -> None:
        barriers = Barriers({"values": ["reward"]}, num_chunks=2)
        values = barriers.scorer("values", Timed("values", 0.0, log))
        reward = barriers.scorer("reward", Timed("reward", 0.0, log))
        gather = barriers.collect(collect)
        waiting = asyncio.create_task(values.score(gather(0, 0, [])))
        await asyncio.sleep(1.0)
        waiting.cancel()
        await asyncio.wait({waiting})
        chunks = [gather(1, index, []) for index in range(2)]
        await asyncio.gather(*(scorer.score(chunk) for chunk in chunks for scorer in (values, reward)))
        with pytest.raises(RuntimeError, match="step 1 begins twice"):
            gather(1, 0, [])

    run_virtual(main())
    assert len(log) == 4
