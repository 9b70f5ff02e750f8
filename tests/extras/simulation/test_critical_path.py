"""The critical path of spans, drawn by hand and of simulated iterations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quartet.config.placement import (
    HEADS,
    FullOffloadPlacement,
    NamedPoolConfig,
    PipelinedPlacement,
    PoolConfig,
    Role,
    resolve,
)
from quartet.extras.simulation.simulation import (
    Cost,
    CostModel,
    GenerationCost,
    Simulation,
    SimulationResult,
    StageCost,
    critical_path,
    iteration_causes,
    seconds_on_path,
)
from quartet.observe.spans import Span
from quartet.schedule.clock import run_virtual

KINDS: dict[str, Role] = {"actor": "actor", "critic": "critic", "reward": "reward", "rollout": "rollout"}
TWO = PipelinedPlacement(
    pools={
        "a": NamedPoolConfig(roles=("rollout", "actor")),
        "b": NamedPoolConfig(roles=("critic", "reward")),
    }
)
COSTS = CostModel(
    generation=GenerationCost(Cost(fixed_s=1.0), max_running=2),
    scoring=(StageCost("reward", "reward", Cost(0.25)), StageCost("values", "critic", Cost(0.5), reads_own=True)),
    learning=(StageCost("train_critic", "critic", Cost(3.0)), StageCost("train_actor", "actor", Cost(2.0))),
    publish_s=1.5,
)


def test_the_path_goes_from_cause_to_cause_and_names_the_waits() -> None:
    spans = [Span("a", 0, 2), Span("b", 0, 3), Span("c", 3, 4), Span("d", 4.5, 6), Span("e", 2, 5)]
    path = critical_path(
        spans, lambda earlier, later: (earlier.name, later.name) in {("a", "d"), ("c", "d"), ("b", "c")}
    )
    assert [(link.span.name, link.wait_s) for link in path] == [("b", 0.0), ("c", 0.0), ("d", 0.5)]
    assert seconds_on_path(path) == {"b": 3, "c": 1, "d": 1.5, "wait": 0.5}
    assert critical_path([], lambda earlier, later: True) == []


def test_spans_of_no_length_do_not_go_in_circles() -> None:
    spans = [Span("a", 1, 1), Span("b", 1, 1), Span("c", 0, 1)]
    path = critical_path(spans, lambda earlier, later: True)
    assert sum(link.span.seconds for link in path) == 1 and len(path) == 3


def kinds_of(costs: CostModel) -> dict[str, Role]:
    learns_along = any(stage.role == HEADS for stage in costs.learning)
    return {**KINDS, HEADS: HEADS} if learns_along else KINDS


def simulate(
    costs: CostModel, placement: PipelinedPlacement | FullOffloadPlacement, steps: int = 1
) -> SimulationResult:
    async def main() -> SimulationResult:
        simulation = Simulation(costs, resolve(placement, kinds_of(costs)), prompts_per_step=4, chunk_size=2)
        return await simulation.run(steps)

    return run_virtual(main())


def on_path(costs: CostModel, placement: PipelinedPlacement | FullOffloadPlacement, steps: int = 1) -> dict[str, float]:
    outcome = simulate(costs, placement, steps)
    path = critical_path(outcome.spans, iteration_causes(costs, resolve(placement, kinds_of(costs)), outcome.spans))
    assert sum(link.span.seconds + link.wait_s for link in path) == pytest.approx(outcome.ended_s[-1])
    return seconds_on_path(path)


def test_two_pools_two_bursts_then_the_last_chunks_scores_then_the_slower_side() -> None:
    """Actor and weights on one side take 3.5 s, the critic 3 s on the other."""
    assert on_path(COSTS, TWO) == pytest.approx(
        {"generate": 2.0, "reward": 0.25, "values": 0.5, "train_actor": 2.0, "publish": 1.5}
    )
    slow_critic = replace(COSTS, learning=(StageCost("train_critic", "critic", Cost(5.0)), COSTS.learning[1]))
    assert on_path(slow_critic, TWO) == pytest.approx(
        {"generate": 2.0, "reward": 0.25, "values": 0.5, "train_critic": 5.0}
    )


def test_on_one_pool_everything_is_critical_in_every_step() -> None:
    found = on_path(COSTS, FullOffloadPlacement(pool=PoolConfig()), steps=2)
    assert found == pytest.approx(
        {"generate": 4.0, "reward": 1.0, "values": 2.0, "train_critic": 6.0, "train_actor": 4.0, "publish": 3.0}
    )


@pytest.mark.parametrize("stage", ["reward", "values", "train_critic", "train_actor"])
def test_only_what_is_on_the_path_shortens_the_step(stage: str) -> None:
    def quicker(stages: tuple[StageCost, ...]) -> tuple[StageCost, ...]:
        return tuple(replace(s, cost=s.cost.times(0.9)) if s.stage == stage else s for s in stages)

    before = simulate(COSTS, TWO).ended_s[-1]
    after = simulate(replace(COSTS, scoring=quicker(COSTS.scoring), learning=quicker(COSTS.learning)), TWO).ended_s[-1]
    assert (after < before) == (stage in on_path(COSTS, TWO))


def test_moving_parts_is_on_the_path() -> None:
    sized = replace(
        COSTS,
        resident_bytes={"actor": {"train": 10}, "critic": {"train": 10}},
        move_bytes_per_s={"actor": 10.0, "critic": 20.0},
    )
    found = on_path(sized, FullOffloadPlacement(pool=PoolConfig(budget_bytes=10)))
    assert found["onload"] == pytest.approx(1.5) and found["offload"] == pytest.approx(0.5)


def test_heads_cost_nothing_while_the_critic_trains_longer() -> None:
    """Actor 2 s, heads 0.5 and weights 1.5 on one pool; on the other the critic, 3 s or 5. On one pool all is added."""
    beside = replace(COSTS, learning=(*COSTS.learning, StageCost("train_heads", HEADS, Cost(0.5))))
    without, found = simulate(COSTS, TWO, steps=2).ended_s[-1], on_path(beside, TWO, steps=2)
    assert found["train_heads"] == pytest.approx(1.0) and sum(found.values()) == pytest.approx(without + 1.0)

    def slow(costs: CostModel) -> CostModel:
        return replace(costs, learning=(StageCost("train_critic", "critic", Cost(5.0)), *costs.learning[1:]))

    assert on_path(slow(beside), TWO, steps=2) == on_path(slow(COSTS), TWO, steps=2)
    one = FullOffloadPlacement(pool=PoolConfig())
    assert on_path(beside, one) == pytest.approx({**on_path(COSTS, one), "train_heads": 0.5})
