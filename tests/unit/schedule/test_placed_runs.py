"""Thousands of random placements, sizes and delays on the virtual clock: what holds for every one of them.

Models and the engine only take time; all that schedules them is the product's own. An auditor in the mover's place
keeps its own account of the bytes. Seeds are fixed, so a failure names the run that shows it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from quartet.batch.ragged import RaggedBatch
from quartet.config.placement import HEADS, PlacementConfig, ResolvedPlacement, Role, resolve_placement
from quartet.extras.simulation.simulation import (
    Cost,
    CostModel,
    GenerationCost,
    Simulation,
    SimulationResult,
    StageCost,
    assemble,
    run_virtual,
)
from quartet.observe.spans import Span
from quartet.schedule.iteration import Chunk
from quartet.schedule.leases import LeaseMode

KINDS: dict[Role, str] = {"critic": "values", "reference": "ref_logprobs", "reward": "reward"}
PLACEMENT: TypeAdapter[Any] = TypeAdapter(PlacementConfig)
TYPES = ("separated", "forward_offload", "homogeneous", "full_offload", "pipelined", "asynchronous")


class Broken(RuntimeError):
    pass


@dataclass
class Auditor:
    """Moves parts in random time, keeps its own account of bytes; breaks at one movement where told to."""

    placement: ResolvedPlacement
    sizes: Mapping[str, Mapping[LeaseMode, int]]
    draw: random.Random
    breaks_at: int = -1
    resident: Counter[str] = field(default_factory=Counter)
    num_moves: int = 0

    async def onload(self, role: str, mode: LeaseMode) -> None:
        more = self.sizes[role][mode] - self.resident[role]
        assert more > 0, "what is there is not moved in again"
        self.resident[role] += more
        self._check(role)
        try:
            await self._take_time()
        except Broken:
            self.resident[role] -= more
            raise

    async def offload(self, role: str) -> None:
        await self._take_time()
        self.resident[role] = 0

    async def _take_time(self) -> None:
        self.num_moves += 1
        if self.num_moves - 1 == self.breaks_at:
            raise Broken("a movement fails")
        await asyncio.sleep(self.draw.choice([0, 0, 1, 3]))

    def _check(self, role: str) -> None:
        pool = self.placement.pool(self.placement.pool_of[role])
        used = sum(num for name, num in self.resident.items() if self.placement.pool_of[name] == pool.name)
        assert pool.budget_bytes is None or used <= pool.budget_bytes, f"{used} > {pool.budget_bytes} on {pool.name}"


class Delays:
    """A factor for each call, drawn from (seed, stage, number) alone; one call of all breaks."""

    def __init__(self, seed: int, breaks_at: int = -1) -> None:
        self.seed = seed
        self.breaks_at = breaks_at
        self.num_calls = 0

    def __call__(self, stage: str, number: int) -> float:
        self.num_calls += 1
        if self.num_calls - 1 == self.breaks_at:
            raise Broken(f"call {number} of {stage} fails")
        return random.Random(f"{self.seed} {stage} {number}").choice([0.0, 0.5, 1.0, 1.0, 2.0, 7.0])


def logprobs_of(num_updates: Tensor) -> Tensor:
    return -1.0 - num_updates / 64


@dataclass(frozen=True)
class Setup:
    """All of a random run; ``make`` builds it, with other delays where asked to."""

    seed: int
    costs: CostModel
    placement: ResolvedPlacement
    prompts_per_step: int
    chunk_size: int
    num_steps: int
    patience: int
    rejects: frozenset[int]

    def make(self, *, delays: Delays | None = None, move_breaks_at: int = -1) -> tuple[Simulation, Auditor]:
        costs = replace(self.costs, vary=delays if delays is not None else Delays(self.seed))
        auditor = Auditor(self.placement, costs.sizes(), random.Random(self.seed), move_breaks_at)
        simulation = Simulation(
            costs,
            self.placement,
            prompts_per_step=self.prompts_per_step,
            chunk_size=self.chunk_size,
            patience=self.patience,
            accept=lambda index: index not in self.rejects,
            offloader=auditor,
        )
        simulation.stages = replace(simulation.stages, assemble=self._audited)
        return simulation, auditor

    async def _audited(self, chunks: Sequence[tuple[Chunk, Any]]) -> RaggedBatch:
        """What is learned from says of itself which weights made it: it must be those that it is labelled with."""
        batch, step = await assemble(chunks), chunks[0][0].step
        acted = batch.token["action_mask"]
        labelled = logprobs_of(batch.token["policy_version"])
        assert torch.equal(batch.token["rollout_logprobs"][acted], labelled[acted]), "weights under another version"
        for stage in self.costs.scoring:
            expected = logprobs_of(torch.full_like(batch.input_ids, step if stage.reads_own else 0))
            assert torch.equal(batch.token[stage.stage], expected), f"{stage.stage} of step {step} by other weights"
        return batch


def random_setup(seed: int, kind: str | None = None) -> Setup:
    draw = random.Random(seed)
    kind = kind or draw.choice(TYPES)
    scorers = [role for role in KINDS if draw.random() < 0.7] or ["reward"]
    if kind == "forward_offload" and scorers == ["reference"]:
        scorers.append("reward")  # its second pool is not to be empty
    roles: list[Role] = ["rollout", "actor", *scorers]
    sizes: dict[str, dict[LeaseMode, int]] = {}
    for role in roles:
        forward = draw.randint(0, 6)
        sizes[role] = {"generate": forward, "forward": forward, "train": forward + draw.randint(0, 5)}
    fragment = {"type": kind, **_random_fields(kind, roles, draw)}
    tokens = [draw.randint(1, 6 if kind == "asynchronous" else 4) for _ in range(7)]
    scoring = [StageCost(KINDS[role], role, _cost(draw), reads_own=role == "critic") for role in scorers]
    if draw.random() < 0.8:
        scoring.append(StageCost("old_logprobs", "actor", _cost(draw), reads_own=True))
    draw.shuffle(scoring)
    learning = [StageCost(f"train_{role}", role, _cost(draw)) for role in roles if role in ("critic", "actor")]
    if seed % 2:
        roles.append(HEADS)
        learning.append(StageCost("train_heads", HEADS, Cost(seed % 5)))
    placement = resolve_placement(PLACEMENT.validate_python(fragment), {role: role for role in roles})
    costs = CostModel(
        generation=GenerationCost(
            _cost(draw),
            lambda index, response: tokens[(index + response) % 7],
            responses=draw.choice([1, 1, 1, 2, 3]),
            steps_per_lease=draw.randint(1, 3),
            max_running=draw.randint(1, 6),
        ),
        scoring=tuple(scoring),
        learning=tuple(learning),
        publish_s=draw.choice([0.0, 1.0, 4.0]),
        resident_bytes=sizes,
    )
    budgets = {pool.name: _random_budget(pool.name, placement, costs.sizes(), draw) for pool in placement.pools}
    return Setup(
        seed=seed,
        costs=costs,
        placement=replace(
            placement, pools=tuple(replace(pool, budget_bytes=budgets[pool.name]) for pool in placement.pools)
        ),
        prompts_per_step=draw.randint(1, 5),
        chunk_size=draw.randint(1, 6),
        num_steps=draw.randint(1, 4),
        patience=draw.randint(0, 4),
        rejects=frozenset(draw.sample(range(12), draw.choice([0, 0, 2, 4]))),
    )


def _cost(draw: random.Random) -> Cost:
    return Cost(draw.choice([0.0, 1.0, 2.0]), draw.choice([0.0, 0.5, 1.0]))


def _random_fields(kind: str, roles: Sequence[Role], draw: random.Random) -> dict[str, Any]:
    shared = {"slots": draw.randint(1, 3)}
    match kind:
        case "separated":
            return {role: {} for role in roles}
        case "forward_offload":
            return {"rollout": {}, "actor_reference": shared, "critic_reward": shared}
        case "homogeneous":
            return {"rollout": {}, "models": shared}
        case "full_offload":
            return {"pool": shared}
    homes = {role: f"pool{draw.randint(0, 2)}" for role in roles}
    pools = {
        name: {"slots": draw.randint(1, 3), "roles": tuple(role for role in roles if homes[role] == name)}
        for name in sorted(set(homes.values()))
    }
    fields: dict[str, Any] = {"pools": pools}
    if kind == "asynchronous":
        fields["max_staleness"] = draw.randint(0, 3)
        fields["in_flight"] = draw.choice(["pick_up", "finish_old"])
    return fields


def _random_budget(
    pool: str, placement: ResolvedPlacement, sizes: Mapping[str, Mapping[LeaseMode, int]], draw: random.Random
) -> int | None:
    largest = max(max(modes.values()) for role, modes in sizes.items() if placement.pool_of[role] == pool)
    return draw.choice([None, largest + draw.randint(0, 4), largest + draw.randint(0, 8)])


def run(setup: Setup, **options: Any) -> tuple[SimulationResult, Simulation, Auditor]:
    """To the end; nothing is left behind."""

    async def main() -> tuple[SimulationResult, Simulation, Auditor]:
        simulation, auditor = setup.make(**options)
        outcome = await simulation.run(setup.num_steps)
        check_nothing_left(simulation)
        return outcome, simulation, auditor

    return run_virtual(main())


def check_nothing_left(simulation: Simulation) -> None:
    assert simulation.arbiter.is_idle
    assert simulation.stream.num_running == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


# What holds ------------------------------------------------------------------------------------------------


def check_groups(setup: Setup, outcome: SimulationResult) -> None:
    """Accepted groups in order, each once; none older than the rule says, none from the future."""
    size, placement, generation = setup.prompts_per_step, setup.placement, setup.costs.generation
    accepted = [i for i in range(100) if i not in setup.rejects]
    lag = placement.max_staleness or 0
    for step, groups in enumerate(outcome.steps):
        assert [index for index, _ in groups] == accepted[step * size : (step + 1) * size]
        for index, versions in groups:
            of_tokens = iter([version for version, num in versions for _ in range(num)])
            for response in range(generation.responses):
                seen = list(islice(of_tokens, generation.tokens(index, response)))
                assert len(seen) == generation.tokens(index, response)
                assert seen == sorted(seen) and step - lag <= seen[0] and seen[-1] <= step, (step, seen)
                assert seen[0] == seen[-1] or placement.in_flight == "pick_up"
            assert not list(of_tokens)
    assert len(outcome.steps) == setup.num_steps


def check_chunks(setup: Setup, outcome: SimulationResult) -> None:
    """Every scorer sees every chunk once, every learner every step once; then weights go out and are compared once."""
    num_chunks = -(-setup.prompts_per_step // setup.chunk_size)
    worked = Counter(
        (span.name, span.step, span.chunk) for span in outcome.spans if span.mode not in (None, "generate")
    )
    expected = Counter(
        (stage.stage, step, chunk)
        for step in range(setup.num_steps)
        for stage in setup.costs.scoring
        for chunk in range(num_chunks)
    )
    learning = [stage.stage for stage in setup.costs.learning]
    expected.update((stage, step, None) for step in range(setup.num_steps) for stage in [*learning, "canary"])
    assert worked == expected
    assert [s.step for s in outcome.spans if s.name == "publish"] == list(range(setup.num_steps))


def check_edges(setup: Setup, outcome: SimulationResult) -> None:
    """Learning comes after all scores, and these after generation where they do not begin early."""
    for step in range(setup.num_steps):
        spans = [span for span in outcome.spans if span.step == step]
        scoring, learning = ([s.stage for s in stages] for stages in (setup.costs.scoring, setup.costs.learning))
        assert setup.placement.scores_early or _first(spans, scoring) >= _last(spans, ["generate"])
        assert _first(spans, learning) >= _last(spans, scoring)
        assert _first(spans, ["publish"]) >= _last(spans, ["train_actor", "train_heads"])
        assert _first(spans, ["train_heads"]) >= _last(spans, ["train_actor"])


def _first(spans: Sequence[Span], names: Sequence[str]) -> float:
    return min((span.start_s for span in spans if span.name in names), default=float("inf"))


def _last(spans: Sequence[Span], names: Sequence[str]) -> float:
    return max((span.end_s for span in spans if span.name in names), default=0.0)


def check_slots(setup: Setup, outcome: SimulationResult) -> None:
    """At no moment do more roles work on a pool than it has slots."""
    for pool in setup.placement.pools:
        work = [s for s in outcome.spans if s.mode is not None and setup.placement.pool_of[str(s.role)] == pool.name]
        for moment in {span.start_s for span in work}:
            busy = {span.role for span in work if span.start_s <= moment < span.end_s}
            assert len(busy) <= pool.slots, (pool, moment, busy)


def check_weights(outcome: SimulationResult) -> None:
    """Nothing reads weights while they change: in training, or as the engine takes the actor's."""
    work = [span for span in outcome.spans if span.mode is not None]
    for writer in (span for span in work if span.mode == "train" or span.name == "publish"):
        reading = {"publish"} if writer.role == "actor" else set()
        for reader in (span for span in work if span.role == writer.role or span.name in reading):
            apart = reader.end_s <= writer.start_s or writer.end_s <= reader.start_s
            assert apart or reader is writer, (writer, reader)


def check_peaks(setup: Setup, outcome: SimulationResult) -> None:
    for pool in setup.placement.pools:
        assert pool.budget_bytes is None or outcome.peak_bytes[pool.name] <= pool.budget_bytes


@pytest.mark.parametrize("kind", TYPES)
def test_every_random_run_ends_as_it_should(kind: str) -> None:
    """No deadlock (the clock raises one), no starvation, and all of the above: 100 runs of each placement."""
    moved, stale, swapped = 0, 0, 0
    for seed in range(100):
        setup = random_setup(seed, kind)
        outcome, _, auditor = run(setup)
        check_groups(setup, outcome)
        check_chunks(setup, outcome)
        check_edges(setup, outcome)
        check_slots(setup, outcome)
        check_weights(outcome)
        check_peaks(setup, outcome)
        moved += bool(auditor.num_moves)
        stale += any(v[0][0] < step for step, groups in enumerate(outcome.steps) for _, v in groups)
        swapped += any(len(v) > 1 for groups in outcome.steps for _, v in groups)
    assert moved > 50
    assert (stale > 25 and swapped > 10) == (kind == "asynchronous"), "the bounds are reached, and elsewhere not met"


def test_a_failure_anywhere_comes_out_and_leaves_nothing() -> None:
    failed = 0

    async def main(setup: Setup, number: int) -> None:
        nonlocal failed
        in_move = bool(number % 3 == 0)
        simulation, _ = setup.make(
            delays=Delays(setup.seed, -1 if in_move else number), move_breaks_at=number // 3 if in_move else -1
        )
        try:
            await simulation.run(setup.num_steps)
        except Broken:
            failed += 1
        check_nothing_left(simulation)

    for seed in range(350):
        run_virtual(main(random_setup(seed), random.Random(seed).randint(0, 40)))
    assert failed > 175


def test_cancelling_at_any_moment_leaves_nothing() -> None:
    cancelled = 0

    async def main(setup: Setup, seconds: int, turns: int) -> None:
        nonlocal cancelled
        simulation, _ = setup.make()
        task = asyncio.create_task(simulation.run(setup.num_steps))
        await asyncio.sleep(seconds)
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        cancelled += task.cancelled()
        assert task.cancelled() or task.exception() is None, task.exception()
        check_nothing_left(simulation)

    for seed in range(350):
        draw = random.Random(seed)
        run_virtual(main(random_setup(seed), draw.randint(0, 60), draw.randint(0, 12)))
    assert cancelled > 175


@pytest.mark.parametrize("in_flight", ["pick_up", "finish_old"])
def test_generation_goes_on_while_the_actor_trains(in_flight: str) -> None:
    """Engines that finish on old weights stop for new ones when these exist, not when their training begins."""
    pools = {"a": {"roles": ("rollout",)}, "b": {"roles": ("actor", "reward")}}
    fragment = {"type": "asynchronous", "pools": pools, "max_staleness": 2, "in_flight": in_flight}
    roles: dict[str, Role] = {"rollout": "rollout", "actor": "actor", "reward": "reward"}
    costs = CostModel(
        generation=GenerationCost(Cost(1.0), lambda index, response: 3, max_running=2),
        scoring=(StageCost("reward", "reward", Cost(0.5)),),
        learning=(StageCost("train_actor", "actor", Cost(10.0)),),
        publish_s=0.5,
    )

    async def main() -> SimulationResult:
        placement = resolve_placement(PLACEMENT.validate_python(fragment), roles)
        return await Simulation(costs, placement, prompts_per_step=4, chunk_size=4).run(3)

    outcome = run_virtual(main())
    training = next(s for s in outcome.spans if s.name == "train_actor")
    bursts = [s for s in outcome.spans if s.name == "generate" and training.start_s <= s.start_s < training.end_s]
    assert len(bursts) >= 9, "all the time"
    lengths = {len(versions) for groups in outcome.steps for _, versions in groups}
    assert (lengths == {1}) == (in_flight == "finish_old")


def test_where_generation_does_not_run_ahead_no_delay_changes_what_is_trained_on() -> None:
    for seed in range(50):
        setup = random_setup(seed, "pipelined")
        assert run(setup)[0].steps == run(setup, delays=Delays(seed + 10_000))[0].steps
