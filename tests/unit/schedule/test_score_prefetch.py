"""Scoring ahead: what is scored before its step, when, and what that may not change."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from quartet.schedule.clock import now, run_virtual
from quartet.schedule.groups import AdmissionRule, GroupStream
from quartet.schedule.iteration import Chunk, IterationStages, ScorePrefetcher, run_iteration

Seconds = Callable[[str], float]


@dataclass
class World:
    """A run of numbers: group ``i`` is ``i``, and every stage takes ``seconds(stage)``.

    ``log``: stage, step, chunk, when it began and when it ended.
    """

    seconds: Seconds
    prompts_per_step: int = 4
    chunk_size: int = 2
    max_staleness: int | None = 1
    num_steps: int = 4
    rejects: frozenset[int] = frozenset()
    looks_ahead: bool = True
    breaks_at: tuple[int, int] | None = None
    log: list[tuple[str, int, int, float, float]] = field(default_factory=list)
    learned: list[Any] = field(default_factory=list)
    version: int = 0
    trained: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.stream = GroupStream(
            self.produce,
            AdmissionRule(self.prompts_per_step, self.max_staleness),
            chunk_size=self.chunk_size,
            accept=lambda group: group not in self.rejects,
        )
        reward, values = Stage(self, "reward"), Stage(self, "values")
        ahead = ScorePrefetcher(self.stream, self.collect, [reward], self.num_steps) if self.looks_ahead else None
        self.stages: IterationStages = IterationStages(
            self.stream, self.collect, [reward, values], self.assemble, [self], self.publish, ahead
        )

    async def produce(self, index: int) -> int:
        await asyncio.sleep(self.seconds("generate"))
        return index

    def collect(self, step: int, index: int, groups: Sequence[int]) -> Chunk:
        self.log.append(("collect", step, index, now(), now()))
        return Chunk(step, index, list(groups))

    async def assemble(self, chunks: Any) -> Any:
        self.learned.append([(chunk.index, chunk.data, columns) for chunk, columns in chunks])
        return self.learned[-1]

    async def train(self, experience: Any, step: int) -> dict[str, float]:
        begun = now()
        await asyncio.sleep(self.seconds("train"))
        self.log.append(("train", step, -1, begun, now()))
        self.version = step + 1
        self.trained.set()
        return {}

    async def publish(self, version: int) -> dict[str, float]:
        await self.trained.wait()
        self.trained.clear()
        return {}

    async def run(self) -> World:
        try:
            async with self.stream:
                for step in range(self.num_steps):
                    await run_iteration(step, self.stages)
        finally:
            if self.stages.prefetch is not None:
                await self.stages.prefetch.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return self

    def of(self, stage: str) -> list[tuple[int, int, float, float]]:
        return [entry[1:] for entry in self.log if entry[0] == stage]


@dataclass(frozen=True)
class Stage:
    """A scorer; ``values`` are of the weights that are there."""

    world: World
    name: str

    async def score(self, chunk: Chunk) -> Any:
        begun, world = now(), self.world
        await asyncio.sleep(world.seconds(self.name))
        if self.name == "reward" and world.breaks_at == (chunk.step, chunk.index):
            raise ConnectionError("the judge is gone")
        world.log.append((self.name, chunk.step, chunk.index, begun, now()))
        return ("values", world.version) if self.name == "values" else ("reward", sum(chunk.data))


def played(**options: Any) -> World:
    async def main() -> World:
        return await World(**options).run()

    return run_virtual(main())


COSTS = {"generate": 1.0, "reward": 4.0, "values": 0.0, "train": 4.0}


def test_a_slow_reward_is_waited_for_while_the_actor_trains() -> None:
    """Rewards and updates take 4 seconds each: one after the other 8 a step, side by side 4, and 1 in every second step
    for groups that the update before it has let in."""
    steps = 5
    world, plain = (played(seconds=COSTS.__getitem__, num_steps=steps, looks_ahead=ahead) for ahead in (True, False))
    ends, before = ([end for *_, end in of.of("train")] for of in (world, plain))
    assert before == [9.0, 17.0, 25.0, 33.0, 41.0]
    assert ends == [9.0, 13.0, 18.0, 22.0, 27.0]
    assert world.learned == plain.learned


@pytest.mark.parametrize("seed", range(300))
def test_it_changes_nothing_but_when(seed: int) -> None:
    """Random runs: each chunk is collected and scored once and in order; values are those of the step's own weights."""
    draw = random.Random(seed)
    options: dict[str, Any] = {
        "prompts_per_step": draw.randint(1, 5),
        "chunk_size": draw.randint(1, 6),
        "max_staleness": draw.choice((None, 0, 1, 1, 2, 3)),
        "num_steps": draw.randint(1, 5),
        "rejects": frozenset(draw.sample(range(15), draw.choice((0, 0, 3)))),
    }
    timed = random.Random(seed)
    world = played(seconds=lambda stage: timed.choice((0.0, 1.0, 1.0, 5.0)), **options)
    plain = played(seconds=lambda stage: 0.0, looks_ahead=False, **options)
    assert world.learned == plain.learned
    per_step = -(-world.prompts_per_step // world.chunk_size)
    places = [(step, index) for step in range(world.num_steps) for index in range(per_step)]
    assert [(step, index) for step, index, *_ in world.of("collect")] == places
    for stage in ("reward", "values"):
        assert sorted((step, index) for step, index, *_ in world.of(stage)) == places
    begun = {step: begun for step, _, begun, _ in world.of("train")}
    for step, _, start, end in world.of("values"):
        assert end <= begun[step] and (step == 0 or start >= begun[step - 1])


def test_what_fails_ahead_is_raised_in_its_own_step() -> None:
    async def main() -> World:
        world = World(seconds=COSTS.__getitem__, breaks_at=(2, 1))
        with pytest.raises(ConnectionError, match="judge is gone"):
            await world.run()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return world

    world = run_virtual(main())
    assert [step for step, *_ in world.of("train")] == [0, 1], "the step before it went to its end"
    assert (2, 1) in [(step, index) for step, index, *_ in world.of("collect")]
