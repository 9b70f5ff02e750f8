"""One iteration with simulated roles under the real arbiter, on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from quartet.schedule.clock import now, run_virtual
from quartet.schedule.groups import AdmissionRule, GroupStream
from quartet.schedule.iteration import Chunk, IterationStages, run_iteration
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
                start = now()
                await asyncio.sleep(seconds)
                if (role, which) in self.fails:
                    raise self.fails[role, which]
                self.log.append((role, which, start, now()))
        finally:
            self.num_running -= 1

    async def produce(self, index: int) -> int:
        # One engine: groups are ready one after another, each in short leases so that scoring may interleave.
        async with self._turn:
            for _ in range(4):
                await self.work("rollout", "generate", index, self.group_s / 4)
        return index

    def roles(self, stream: GroupStream[int]) -> IterationStages:
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


def test_scoring_beside_generation_costs_no_wall_time() -> None:
    """Pools of their own: four seconds of groups, then the last chunk's scores, then both learners and the update."""
    simulation = Simulation(colocated=False)

    async def main() -> float:
        async with GroupStream(simulation.produce, AdmissionRule(4), chunk_size=1) as stream:
            await run_iteration(0, simulation.roles(stream))
        return now()

    assert run_virtual(main()) == pytest.approx(4 * 1.0 + (0.25 + 0.5) + (2.0 + 3.0) + 0.1)


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
