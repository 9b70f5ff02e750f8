"""One iteration with simulated roles under the real arbiter, on the virtual clock.

Scoring ahead: what is scored before its step, when, and what that may not change.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from quartet.extras.simulation.simulation import run_virtual
from quartet.schedule.clock import loop_time
from quartet.schedule.groups import AdmissionRule, GroupStream
from quartet.schedule.iteration import Chunk, IterationStages, ScorePrefetcher, run_iteration
from quartet.schedule.leases import Arbiter, LeaseMode, PoolSpec, RoleSpec

Log = list[tuple[str, int, float, float]]
"""``(what, which, start, end)`` of every piece of work."""


async def _assembled(chunks: Any) -> Any:
    return list(chunks)


@dataclass
class Simulation:
    """Groups take ``group_s`` each, one after another; ``rollout`` has a pool of its own unless colocated."""

    colocated: bool = True
    prompts_per_step: int = 4
    chunk_size: int = 1
    group_s: float = 1.0
    score_s: Mapping[str, float] = field(default_factory=lambda: {"reward": 0.25, "reference": 0.5})
    train_s: Mapping[str, float] = field(default_factory=lambda: {"critic": 2.0, "actor": 3.0})
    fails: Mapping[tuple[str, int], BaseException] = field(default_factory=dict)
    log: Log = field(default_factory=list)
    num_running: int = 0

    def __post_init__(self) -> None:
        rollout_pool = "train" if self.colocated else "rollout"
        roles = [RoleSpec("rollout", rollout_pool, {"generate": 1})]
        roles += [RoleSpec(name, "train", {"forward": 1}) for name in self.score_s]
        roles += [RoleSpec(name, "train", {"forward": 1, "train": 4}) for name in self.train_s]
        pools = [PoolSpec(name) for name in dict.fromkeys(role.pool for role in roles)]
        self.arbiter = Arbiter(pools, roles, versions=dict.fromkeys(["rollout", *self.train_s], 0))
        self._turn = asyncio.Lock()

    async def work(
        self, role: str, mode: LeaseMode, which: int, seconds: float, *, reads: Any = None, writes: str | None = None
    ) -> None:
        self.num_running += 1
        try:
            async with self.arbiter.lease(role, mode, reads=reads, writes=writes):
                start = loop_time()
                await asyncio.sleep(seconds)
                if (role, which) in self.fails:
                    raise self.fails[role, which]
                self.log.append((role, which, start, loop_time()))
        finally:
            self.num_running -= 1

    async def produce(self, index: int) -> int:
        # One engine: groups are ready one after another, each in short leases so that scoring may interleave.
        async with self._turn:
            for _ in range(4):
                await self.work("rollout", "generate", index, self.group_s / 4)
        return index

    def roles(self, stream: GroupStream) -> IterationStages:
        return IterationStages(
            stream=stream,
            collect=lambda step, index, groups: Chunk(step, index, list(groups)),
            scorers=[_Scorer(self, name, seconds) for name, seconds in self.score_s.items()],
            assemble=_assembled,
            learners=[_Learner(self, name, seconds) for name, seconds in self.train_s.items()],
            publish=self.publish,
        )

    async def publish(self, version: int) -> dict[str, float]:
        await self.work("rollout", "generate", version, 0.1, reads={"actor": version}, writes="rollout")
        return {"policy_version": float(version)}

    def run(self, steps: int = 1) -> list[tuple[Any, dict[str, float]]]:
        async def main() -> list[tuple[Any, dict[str, float]]]:
            rule = AdmissionRule(self.prompts_per_step)
            async with GroupStream(self.produce, rule, chunk_size=self.chunk_size) as stream:
                roles = self.roles(stream)
                return [await run_iteration(step, roles) for step in range(steps)]

        return run_virtual(main())

    def of(self, *names: str) -> Log:
        return [entry for entry in self.log if entry[0] in names]


@dataclass(frozen=True)
class _Scorer:
    simulation: Simulation
    name: str
    seconds: float

    async def score(self, chunk: Chunk) -> str:
        await self.simulation.work(self.name, "forward", chunk.index, self.seconds)
        return f"{self.name} of {chunk.data}"


@dataclass(frozen=True)
class _Learner:
    simulation: Simulation
    name: str
    seconds: float

    async def train(self, experience: Sequence[Any], step: int) -> dict[str, float]:
        await self.simulation.work(self.name, "train", step, self.seconds, writes=self.name)
        return {f"{self.name}/trained": float(step)}


@pytest.mark.parametrize("colocated", [True, False])
def test_chunks_are_scored_while_later_groups_are_generated(colocated: bool) -> None:
    simulation = Simulation(colocated=colocated)
    simulation.run()
    last = max(start for name, which, start, _ in simulation.of("rollout") if which == 3)
    scored = [which for name, which, _, end in simulation.of("reward") if end < last]
    assert 0 in scored and 1 in scored, simulation.log


def test_results_come_in_prompt_order_and_scorer_order_whatever_finishes_first() -> None:
    slow_first = Simulation(chunk_size=2, score_s={"reward": 2.0, "reference": 0.01})
    ((experience, _),) = slow_first.run()
    assert [chunk.data for chunk, _ in experience] == [[0, 1], [2, 3]]
    assert [columns for _, columns in experience] == [
        [f"reward of {groups}", f"reference of {groups}"] for groups in ([0, 1], [2, 3])
    ]


def test_learners_start_after_every_score_and_publishing_after_every_update() -> None:
    simulation = Simulation()
    ((_, metrics),) = simulation.run()
    scored = max(end for *_, end in simulation.of("reward", "reference"))
    trained = simulation.of("critic", "actor")
    assert min(start for *_, start, _ in trained) >= scored
    assert metrics == {"critic/trained": 0.0, "actor/trained": 0.0, "policy_version": 1.0}
    published = [start for _, which, start, end in simulation.of("rollout") if end - start == pytest.approx(0.1)]
    assert published and published[0] >= max(end for *_, end in trained)


def test_the_next_step_generates_with_the_next_version_only() -> None:
    simulation = Simulation()
    simulation.run(steps=3)
    for step in (1, 2):
        first = min(start for _, which, start, _ in simulation.of("rollout") if which == 4 * step)
        assert first >= max(end for _, which, _, end in simulation.of("actor") if which == step - 1)
    assert simulation.arbiter.version("actor") == simulation.arbiter.version("rollout") == 3
    assert simulation.arbiter.is_idle


class Broken(RuntimeError):
    pass


def _fails(role: str, which: int) -> tuple[Simulation, BaseException]:
    error = Broken(f"{role} {which}")
    error.__cause__ = OSError("why")
    return Simulation(fails={(role, which): error}), error


@pytest.mark.parametrize(
    ("role", "which"), [("reward", 0), ("reference", 2), ("rollout", 1), ("actor", 0), ("critic", 0)]
)
def test_an_error_comes_out_itself_and_nothing_is_left_running(role: str, which: int) -> None:
    simulation, error = _fails(role, which)
    with pytest.raises(Broken) as caught:
        simulation.run()
    assert caught.value is error and caught.value.__cause__ is error.__cause__ is not None
    assert simulation.num_running == 0
    assert simulation.arbiter.is_idle


def test_a_cancelled_iteration_leaves_nothing_running() -> None:
    simulation = Simulation()

    async def main() -> None:
        async with GroupStream(simulation.produce, AdmissionRule(4), chunk_size=1) as stream:
            task = asyncio.ensure_future(run_iteration(0, simulation.roles(stream)))
            await asyncio.sleep(2.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert simulation.num_running == 0

    run_virtual(main())
    assert simulation.arbiter.is_idle


def test_scoring_after_generation_waits_for_the_last_chunk() -> None:
    simulation = Simulation(colocated=False)

    async def main() -> None:
        async with GroupStream(simulation.produce, AdmissionRule(4), chunk_size=1) as stream:
            await run_iteration(0, replace(simulation.roles(stream), scores_early=False))

    run_virtual(main())
    generated = max(end for _, _, _, end in simulation.of("rollout") if end <= 4.0)
    assert generated == 4.0
    assert min(start for _, _, start, _ in simulation.of("reward", "reference")) == 4.0
    assert [which for _, which, _, _ in simulation.of("reward")] == [0, 1, 2, 3]


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
        self.log.append(("collect", step, index, loop_time(), loop_time()))
        return Chunk(step, index, list(groups))

    async def assemble(self, chunks: Any) -> Any:
        self.learned.append([(chunk.index, chunk.data, columns) for chunk, columns in chunks])
        return self.learned[-1]

    async def train(self, experience: Any, step: int) -> dict[str, float]:
        begun = loop_time()
        await asyncio.sleep(self.seconds("train"))
        self.log.append(("train", step, -1, begun, loop_time()))
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
        begun, world = loop_time(), self.world
        await asyncio.sleep(world.seconds(self.name))
        if self.name == "reward" and world.breaks_at == (chunk.step, chunk.index):
            raise ConnectionError("the judge is gone")
        world.log.append((self.name, chunk.step, chunk.index, begun, loop_time()))
        return ("values", world.version) if self.name == "values" else ("reward", sum(chunk.data))


def played_of_prefetch(**options: Any) -> World:
    async def main() -> World:
        return await World(**options).run()

    return run_virtual(main())


COSTS = {"generate": 1.0, "reward": 4.0, "values": 0.0, "train": 4.0}


def test_a_slow_reward_is_waited_for_while_the_actor_trains() -> None:
    """Rewards and updates take 4 seconds each: one after the other 8 a step, side by side 4, and 1 in every second step
    for groups that the update before it has let in."""
    steps = 5
    world, plain = (
        played_of_prefetch(seconds=COSTS.__getitem__, num_steps=steps, looks_ahead=ahead) for ahead in (True, False)
    )
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
    world = played_of_prefetch(seconds=lambda stage: timed.choice((0.0, 1.0, 1.0, 5.0)), **options)
    plain = played_of_prefetch(seconds=lambda stage: 0.0, looks_ahead=False, **options)
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
