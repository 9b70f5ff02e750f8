"""What overlap is worth: the figures of a published study, placements side by side, and what heads that learn add.

    python benchmarks/overlap.py [--parts study placements heads] [--repeats 2] [--ray] [--no-real]

Nothing here computes: models and the engine take the seconds of a cost model; all that schedules them is the product's
own. *study*: the stage times of a published study (256 samples, 16 GPUs), whose serial runs take 1376, 456 and 432 s
and whose overlapped one 295 s, on the virtual clock and, 100 times faster, on the real one. *placements*: every
placement on 16 GPUs, with stages that a pool's GPUs divide among them and with stages that take the same time on any
pool. *heads*: the seconds that Medusa heads which learn along add to a step, beside a critic that trains as long as the
actor and one that trains longer. Ends with an error where a figure is off.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from common import arguments, markdown, write_results
from pydantic import TypeAdapter

from quartet.batch.ragged import ColumnSet
from quartet.cluster import BROADCAST, ResourcePool, Worker, WorkerGroup, connect, dispatch
from quartet.config.placement import HEADS, PlacementConfig, ResolvedPlacement, Role, resolve_placement
from quartet.extras.simulation.simulation import (
    Cost,
    CostModel,
    GenerationCost,
    Simulation,
    SimulationResult,
    Sleep,
    StageCost,
    run_virtual,
    sleep_here,
)
from quartet.observe.spans import Span, SpanRecorder
from quartet.schedule.clock import loop_time
from quartet.schedule.groups import Chunk
from quartet.schedule.iteration import Scorer
from quartet.schedule.leases import LeaseMode

SAMPLES, GPUS, CHUNK = 256, 16, 32
KINDS: dict[str, Role] = {role: role for role in ("actor", "critic", "reference", "reward", "rollout", HEADS)}
HEADS_S, CRITICS = 5.0, (1.0, 1.5)
"""Seconds of the heads in a step, on any pool: the share of a step that is measured (docs/medusa.md). Seconds of the
critic's training, of the actor's."""
REAL_SPEED = 100
"""How many times faster than the study the real clock's workers sleep."""


def placed(fragment: Mapping[str, Any]) -> ResolvedPlacement:
    """A recipe's ``placement`` for a run with all five roles."""
    return resolve_placement(TypeAdapter(PlacementConfig).validate_python(fragment), KINDS)


# The study -----------------------------------------------------------------------------------------------

ONE_POOL = {"type": "full_offload", "pool": {"processes": 8, "nodes": 2}}
TWO_POOLS = {
    "type": "pipelined",
    "pools": {
        "policy": {"processes": 8, "roles": ("rollout", "actor")},
        "scores": {"processes": 8, "roles": ("reference", "reward", "critic")},
    },
}
BARRIERS = {"values": "reward", "ref_logprobs": "values", "old_logprobs": "values"}
"""Stages of the study, and the one of which each waits for all chunks."""


@dataclass(frozen=True)
class Seconds:
    """Of one step, all samples; ``actor`` and ``critic`` per epoch."""

    generation: float
    refit: float
    reward: float = 45.0
    values: float = 45.0
    logprobs: float = 20.0
    reference: float = 10.0
    actor: float = 64.0
    critic: float = 64.0
    epochs: int = 2

    def costs(self) -> CostModel:
        """An engine whose decode step ends ``CHUNK`` groups; passes whose seconds grow with the groups."""

        def per_group(seconds: float) -> Cost:
            return Cost(each_s=seconds / SAMPLES)

        generation = GenerationCost(Cost(fixed_s=self.generation * CHUNK / SAMPLES), max_running=CHUNK)
        return CostModel(
            generation=generation,
            scoring=(
                StageCost("reward", "reward", per_group(self.reward)),
                StageCost("values", "critic", per_group(self.values), reads_own=True),
                StageCost("ref_logprobs", "reference", per_group(self.reference)),
                StageCost("old_logprobs", "actor", per_group(self.logprobs), reads_own=True),
            ),
            learning=(
                StageCost("train_critic", "critic", per_group(self.critic * self.epochs)),
                StageCost("train_actor", "actor", per_group(self.actor * self.epochs)),
            ),
            publish_s=self.refit,
        )


FAST_ENGINE = Seconds(60.0, 20.0)
LESS_MEMORY = replace(FAST_ENGINE, actor=58.0, critic=58.0)
# Beside each other on one machine the passes are slower: 20 → 25 s, and 58 → 70 s per epoch.
CONTENDED = replace(LESS_MEMORY, logprobs=25.0, reference=12.5, actor=70.0, critic=70.0)


@dataclass(frozen=True)
class Case:
    """``published_s`` None: no figure to compare with, except ``at_most_s``. ``after``: as ``BARRIERS``."""

    name: str
    seconds: Seconds
    placement: Mapping[str, Any]
    published_s: float | None
    at_most_s: float | None = None
    after: Mapping[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Waiting:
    """A scorer that waits, in the first step, until every chunk has gone through another one."""

    inner: Scorer
    after: Waiting | None = None

    def __post_init__(self) -> None:
        self.left, self.ended = -(-SAMPLES // CHUNK), asyncio.Event()

    async def score(self, chunk: Chunk) -> ColumnSet:
        if self.after is not None:
            await self.after.ended.wait()
        found = await self.inner.score(chunk)
        self.left -= 1
        if not self.left:
            self.ended.set()
        return found


CASES = (
    Case("serial", Seconds(1000.0, 0.0), ONE_POOL, 1376.0),
    Case("serial, fast engine", FAST_ENGINE, ONE_POOL, 456.0),
    Case("serial, less memory", LESS_MEMORY, ONE_POOL, 432.0),
    Case("two pools, the study's barriers", CONTENDED, TWO_POOLS, 295.0, after=BARRIERS),
    Case("two pools, data dependencies only", CONTENDED, TWO_POOLS, None, at_most_s=295.0 * 1.05),
)


class Moves:
    """Parts that take bytes ÷ speed to move; each movement is a span."""

    def __init__(self, costs: CostModel, bytes_per_s: Mapping[str, float], recorder: SpanRecorder) -> None:
        self._sizes = costs.sizes()
        self._bytes_per_s = bytes_per_s
        self._recorder = recorder
        self._resident: dict[str, int] = {}

    async def onload(self, role: str, mode: LeaseMode) -> None:
        target = self._sizes[role][mode]
        await self._move("onload", role, target - self._resident.get(role, 0))
        self._resident[role] = target

    async def offload(self, role: str) -> None:
        await self._move("offload", role, self._resident.get(role, 0))
        self._resident[role] = 0

    async def _move(self, name: str, role: str, num_bytes: int) -> None:
        with self._recorder.span(name, role=role, nbytes=num_bytes):
            await asyncio.sleep(num_bytes / self._bytes_per_s[role])


def simulated(
    costs: CostModel,
    placement: ResolvedPlacement,
    steps: int = 1,
    *,
    after: Mapping[str, str] | None = None,
    run: Callable[[Coroutine[Any, Any, SimulationResult]], SimulationResult] = run_virtual,
    sleep: Sleep = sleep_here,
    bytes_per_s: Mapping[str, float] | None = None,
) -> SimulationResult:
    """A run on the virtual clock, or with ``asyncio.run`` on the real one; roles' parts move at ``bytes_per_s``."""

    async def main() -> SimulationResult:
        recorder = SpanRecorder(clock=loop_time)
        moves = None if bytes_per_s is None else Moves(costs, bytes_per_s, recorder)
        sizes = {"prompts_per_step": SAMPLES, "chunk_size": CHUNK}
        simulation = Simulation(costs, placement, **sizes, recorder=recorder, offloader=moves, sleep=sleep)
        names = [stage.stage for stage in costs.scoring]
        held = {name: Waiting(scorer) for name, scorer in zip(names, simulation.stages.scorers, strict=True)}
        for name, earlier in (after or {}).items():
            held[name].after = held[earlier]
        simulation.stages = replace(simulation.stages, scorers=[*held.values()]) if after else simulation.stages
        return await simulation.run(steps)

    return run(main())


def slower(cost: Cost, factor: float) -> Cost:
    return Cost(cost.fixed_s * factor, cost.each_s * factor)


def times(costs: CostModel, factor: float) -> CostModel:
    """The study's iteration with all seconds times ``factor``."""

    def stages(given: Sequence[StageCost]) -> tuple[StageCost, ...]:
        return tuple(replace(stage, cost=slower(stage.cost, factor)) for stage in given)

    return replace(
        costs,
        generation=replace(costs.generation, step=slower(costs.generation.step, factor)),
        scoring=stages(costs.scoring),
        learning=stages(costs.learning),
        publish_s=costs.publish_s * factor,
    )


class Sleeper(Worker):
    """A worker process that does nothing, for as long as it is told."""

    @dispatch(BROADCAST)
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@contextmanager
def ray_workers(placement: ResolvedPlacement) -> Iterator[Sleep]:
    """One worker process per pool; roles of a pool with one slot take turns in it."""
    with connect(num_cpus=1):
        groups = {pool.name: WorkerGroup(ResourcePool([1], cpus=0.1), Sleeper) for pool in placement.pools}

        async def sleep(role: str, seconds: float) -> None:
            await asyncio.to_thread(groups[placement.pool_of[role]].sleep, seconds)

        yield sleep


def study(case: Case, *, real_runs: int, ray_runs: int = 0) -> dict[str, float]:
    """Seconds of one iteration in the study's units; on the real clock the least of so many runs."""
    costs, placement = case.seconds.costs(), placed(case.placement)
    found = {"virtual_s": simulated(costs, placement, after=case.after).ended_s[0]}
    faster = times(costs, 1 / REAL_SPEED)
    if real_runs:
        seconds = [simulated(faster, placement, after=case.after, run=asyncio.run).ended_s[0] for _ in range(real_runs)]
        found["real_s"] = min(seconds) * REAL_SPEED
    if ray_runs:
        with ray_workers(placement) as sleep:
            seconds = [
                simulated(faster, placement, after=case.after, run=asyncio.run, sleep=sleep).ended_s[0]
                for _ in range(ray_runs)
            ]
        found["ray_s"] = min(seconds) * REAL_SPEED
    found["samples_per_gpu_s"] = SAMPLES / GPUS / found["virtual_s"]
    return found


def off_by(case: Case, seconds: float) -> str | None:
    """What is wrong with a figure, or None."""
    if case.published_s is not None and abs(seconds / case.published_s - 1) > 0.05:
        return f"{case.name}: {seconds:.1f} s is more than 5 % from {case.published_s:g} s"
    if case.at_most_s is not None and seconds > case.at_most_s:
        return f"{case.name}: {seconds:.1f} s is more than {case.at_most_s:g} s"
    return None


def study_table(results: Mapping[str, Mapping[str, float]]) -> str:
    rows = []
    for case in CASES:
        found = results[case.name]
        rows.append(
            [
                case.name,
                "" if case.published_s is None else f"{case.published_s:g}",
                f"{found['virtual_s']:.1f}",
                f"{found['real_s']:.1f}" if "real_s" in found else "",
                f"{found['ray_s']:.1f}" if "ray_s" in found else "",
                f"{found['samples_per_gpu_s']:.4f}",
            ]
        )
    head = ["run", "published s", "virtual clock s", "real clock s × 100", "Ray workers s × 100", "samples/GPU/s"]
    return markdown(head, rows)


# Placements side by side -----------------------------------------------------------------------------------

GB = 1_000_000_000
# 13 B parameters: 2 bytes each to compute with, 16 to train; the engine's cache beside its weights.
SIZES: dict[str, dict[LeaseMode, int]] = {
    "rollout": {"generate": 176 * GB},
    "actor": {"forward": 26 * GB, "train": 208 * GB},
    "critic": {"forward": 26 * GB, "train": 208 * GB},
    "reference": {"forward": 26 * GB},
    "reward": {"forward": 26 * GB},
}
BYTES_PER_GPU_S = 20 * GB
# 16 devices each; budgets are what the largest role needs.
PLACEMENTS: dict[str, dict[str, Any]] = {
    "separated": {
        "type": "separated",
        "rollout": {"processes": 4, "budget_bytes": 176 * GB},
        "actor": {"processes": 4, "budget_bytes": 208 * GB},
        "critic": {"processes": 4, "budget_bytes": 208 * GB},
        "reference": {"processes": 2, "budget_bytes": 26 * GB},
        "reward": {"processes": 2, "budget_bytes": 26 * GB},
    },
    "forward_offload": {
        "type": "forward_offload",
        "rollout": {"processes": 4, "budget_bytes": 176 * GB},
        "actor_reference": {"processes": 6, "budget_bytes": 208 * GB},
        "critic_reward": {"processes": 6, "budget_bytes": 208 * GB},
    },
    "homogeneous": {
        "type": "homogeneous",
        "rollout": {"processes": 4, "budget_bytes": 176 * GB},
        "models": {"processes": 6, "nodes": 2, "budget_bytes": 208 * GB},
    },
    "full_offload": {
        "type": "full_offload",
        "pool": {"processes": 8, "nodes": 2, "budget_bytes": 208 * GB},
    },
    "pipelined": {
        "type": "pipelined",
        "pools": {
            "policy": {"processes": 8, "budget_bytes": 208 * GB, "roles": ["rollout", "actor"]},
            "scores": {"processes": 8, "budget_bytes": 208 * GB, "roles": ["critic", "reference", "reward"]},
        },
    },
    "asynchronous": {
        "type": "asynchronous",
        "max_staleness": 1,
        "in_flight": "pick_up",
        "pools": {
            "rollout": {"processes": 2, "budget_bytes": 176 * GB, "roles": ["rollout"]},
            "policy": {"processes": 6, "budget_bytes": 208 * GB, "roles": ["actor", "reference"]},
            "scores": {"processes": 8, "budget_bytes": 208 * GB, "roles": ["critic", "reward"]},
        },
    },
}


def on_devices(costs: CostModel, placement: ResolvedPlacement, *, divides: bool) -> CostModel:
    """Models of ``SIZES``; with ``divides`` seconds on all ``GPUS`` become those on each role's own pool, loss-free."""

    def processes(role: str) -> int:
        return placement.pool(placement.pool_of[role]).num_processes

    def share(role: str) -> float:
        # Every process makes the heads' whole update.
        return GPUS / processes(role) if divides and role != HEADS else 1.0

    def stages(given: Sequence[StageCost]) -> tuple[StageCost, ...]:
        return tuple(replace(stage, cost=slower(stage.cost, share(stage.role))) for stage in given)

    generation = replace(costs.generation, step=slower(costs.generation.step, share("rollout")))
    return replace(
        costs,
        generation=generation,
        scoring=stages(costs.scoring),
        learning=stages(costs.learning),
        resident_bytes=SIZES,
    )


IsCause = Callable[[Span, Span], bool]


@dataclass(frozen=True)
class PathSpan:
    """A span of the path; ``wait_s`` passed between the end of its cause (or the run's beginning) and its own start."""

    span: Span
    wait_s: float


_TOLERANCE_S = 1e-6
"""By how much a cause may end after its effect began and still count as before it."""


def critical_path(spans: Iterable[Span], is_cause: IsCause) -> list[PathSpan]:
    """Returns the path to the span that ends last, in order of time.

    Args:
        is_cause: ``(earlier, later)`` → whether ``later`` may have waited for ``earlier``; times are not its business.
    """
    rest = sorted(spans, key=lambda span: (span.end_s, span.start_s))
    if not rest:
        return []
    first_s = min(span.start_s for span in rest)
    current, path = rest.pop(), []
    while True:
        rest = [span for span in rest if span.end_s <= current.start_s + _TOLERANCE_S]
        causes = [span for span in rest if is_cause(span, current)]
        if not causes:
            path.append(PathSpan(current, current.start_s - first_s))
            return path[::-1]
        cause = causes[-1]
        path.append(PathSpan(current, max(0.0, current.start_s - cause.end_s)))
        rest.remove(cause)
        current = cause


def seconds_on_path(path: Sequence[PathSpan]) -> dict[str, float]:
    """Returns the seconds per span name that took any, and ``wait`` for what lies between."""
    found: dict[str, float] = {}
    for link in (link for link in path if link.span.seconds > 0):
        found[link.span.name] = found.get(link.span.name, 0.0) + link.span.seconds
    waits = sum(link.wait_s for link in path)
    return {**found, "wait": waits} if waits > 0 else found


def iteration_causes(costs: CostModel, placement: ResolvedPlacement, spans: Iterable[Span]) -> IsCause:
    """Tells what may hold up what in the spans of a run: data, extra edges of the placement, and its pools.

    A movement of parts needs what the work needs for which they move.
    """
    scoring = {stage.stage for stage in costs.scoring}
    learning = {stage.stage for stage in costs.learning}
    publishers = {stage.stage for stage in costs.learning if stage.role in ("actor", HEADS)}
    ends_step = learning | {"publish", "canary"}
    movers = _purposes(list(spans), placement)

    def shares_pool(earlier: Span, later: Span) -> bool:
        return _pool(placement, earlier) == _pool(placement, later)

    def gives_data(earlier: Span, later: Span) -> bool:
        later = movers.get(id(later), later)
        if earlier.step is None or later.step is None:
            return False
        follows = earlier.step == later.step - 1 and earlier.name in ends_step
        same_step = earlier.step == later.step
        if later.name == "generate":
            return follows
        if later.name in scoring:
            return follows or (earlier.name == "generate" and earlier.step <= later.step)
        if later.name in learning:
            return same_step and earlier.name in scoring
        if later.name == "canary":
            return same_step and earlier.name == "publish"
        return same_step and earlier.name in publishers

    return lambda earlier, later: shares_pool(earlier, later) or gives_data(earlier, later)


def _purposes(spans: Sequence[Span], placement: ResolvedPlacement) -> dict[int, Span]:
    """Maps each movement (by its id) to the work before which it came.

    What moves in is for its role's next work; what moves out for the next that moves in on its pool.
    """
    found: dict[int, Span] = {}
    in_time = sorted(spans, key=lambda span: span.start_s)
    for move in (span for span in spans if span.name in ("onload", "offload")):
        later = [span for span in in_time if span.start_s >= move.end_s and span is not move]
        mine = [span for span in later if _pool(placement, span) == _pool(placement, move)]
        arriving = move if move.name == "onload" else next((span for span in mine if span.name == "onload"), None)
        role = None if arriving is None else arriving.role
        work = next((span for span in mine if span.role == role and span.mode is not None), None)
        if work is not None:
            found[id(move)] = work
    return found


def _pool(placement: ResolvedPlacement, span: Span) -> str:
    return placement.pool_of[str(span.role)]


def added_by_heads(name: str, *, critic: float = 1.0) -> dict[str, float]:
    """Seconds of a step without and with heads, and those of the heads on its critical path.

    Args:
        critic: seconds of its training, of the actor's.
    """
    seconds = replace(LESS_MEMORY, critic=critic * LESS_MEMORY.actor)
    without, found = (steady(name, divides=True, seconds=seconds, has_heads=has) for has in (False, True))
    return {"without_s": without["step_s"], "step_s": found["step_s"], "on_path_s": found["path"].get("train_heads", 0)}


def heads_table(results: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    rows = []
    for name, found in results.items():
        cells = [[f"{of['without_s']:.1f} → {of['step_s']:.1f}", f"{of['on_path_s']:.1f}"] for of in found]
        rows.append([f"`{name}`", *cells[0], *cells[1]])
    of_critic = [[f"s/step, critic {critic:g} × the actor", "heads on the path, s"] for critic in CRITICS]
    return markdown(["placement", *of_critic[0], *of_critic[1]], rows)


def side_by_side(name: str) -> dict[str, Any]:
    """Figures of one placement where stages divide over devices, and the seconds of a step where they do not."""
    found = steady(name, divides=True, seconds=LESS_MEMORY, has_heads=False)
    return {**found, "undivided_s": steady(name, divides=False)["step_s"]}


@cache  # placements side by side and the heads beside the first critic have a run in common, asked for alike
def steady(
    name: str, *, divides: bool, steps: int = 6, seconds: Seconds = LESS_MEMORY, has_heads: bool = False
) -> dict[str, Any]:
    """Figures once iterations repeat: the first is left out."""
    placement, costs = placed(PLACEMENTS[name]), seconds.costs()
    if has_heads:
        costs = replace(costs, learning=(*costs.learning, StageCost("train_heads", HEADS, Cost(HEADS_S))))
    costs = on_devices(costs, placement, divides=divides)
    processes = {role: placement.pool(placement.pool_of[role]).num_processes for role in SIZES}
    moves = {role: float(BYTES_PER_GPU_S * num) for role, num in processes.items()}
    outcome = simulated(costs, placement, steps, bytes_per_s=moves)
    began_s, ended_s, num = outcome.ended_s[0], outcome.ended_s[-1], steps - 1
    # What runs ahead of the last step when it ends is no part of it.
    spans = [span for span in outcome.spans if span.end_s <= ended_s]
    path = critical_path(spans, iteration_causes(costs, placement, spans))
    later = [link for link in path if link.span.start_s >= began_s]
    used = sum(
        (min(span.end_s, ended_s) - span.start_s) * placement.pool(placement.pool_of[str(span.role)]).num_processes
        for span in outcome.spans
        if began_s <= span.start_s < ended_s and span.mode is not None
    )
    moves = [span for span in outcome.spans if span.start_s >= began_s and span.name in ("onload", "offload")]
    step_s = (ended_s - began_s) / num
    return {
        "step_s": step_s,
        "busy": used / ((ended_s - began_s) * GPUS),
        "peak_gb": sum(outcome.peak_bytes.values()) / GB,
        "moved_gb": sum(span.nbytes for span in moves) / GB / num,
        "move_s": sum(span.seconds for span in moves) / num,
        "path": {stage: seconds / num for stage, seconds in seconds_on_path(later).items()},
    }


def placements_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, found in results.items():
        path = sorted(found["path"].items(), key=lambda item: -item[1])
        rows.append(
            [
                f"`{name}`",
                f"{found['step_s']:.0f}",
                f"{found['undivided_s']:.0f}",
                f"{found['busy']:.0%}",
                f"{found['peak_gb']:.0f}",
                f"{found['moved_gb']:.0f}",
                f"{found['move_s']:.0f}",
                ", ".join(f"{stage} {seconds:.0f}" for stage, seconds in path if seconds >= 0.5),
            ]
        )
    head = "placement|s/step, divided|undivided|GPUs busy|peak GB|GB moved|s moving|critical path, s"
    return markdown(head.split("|"), rows)


def main() -> None:
    parser = arguments(__doc__, repeats=2)
    parser.add_argument("--parts", nargs="+", default=["study", "placements", "heads"])
    parser.add_argument("--ray", action="store_true", help="also with workers that are Ray processes, one per pool")
    parser.add_argument("--no-real", action="store_true", help="the virtual clock only")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    complaints: list[str] = []
    if "study" in args.parts:
        real_runs = 0 if args.no_real or args.smoke else args.repeats
        ray_runs = real_runs if args.ray else 0
        results["study"] = {case.name: study(case, real_runs=real_runs, ray_runs=ray_runs) for case in CASES}
        print(study_table(results["study"]), end="\n\n")
        for case in CASES:
            figures = [results["study"][case.name].get(clock) for clock in ("virtual_s", "real_s", "ray_s")]
            complaints += [wrong for s in figures if s is not None and (wrong := off_by(case, s)) is not None]
    if "placements" in args.parts:
        results["placements"] = {name: side_by_side(name) for name in PLACEMENTS}
        print(placements_table(results["placements"]), end="\n\n")
    if "heads" in args.parts:
        results["heads"] = {name: [added_by_heads(name, critic=of) for of in CRITICS] for name in PLACEMENTS}
        print(heads_table(results["heads"]), end="\n\n")
    write_results(args, results)
    if complaints:
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
