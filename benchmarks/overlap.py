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
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from common import arguments, markdown, write_results
from pydantic import TypeAdapter

from quartet.batch.ragged import ColumnSet
from quartet.cluster import BROADCAST, ResourcePool, Worker, WorkerGroup, connect, dispatch
from quartet.config.placement import HEADS, PlacementConfig, ResolvedPlacement, Role, resolve
from quartet.extras.simulation.simulation import (
    Cost,
    CostModel,
    GenerationCost,
    Simulation,
    SimulationResult,
    Sleep,
    StageCost,
    critical_path,
    iteration_causes,
    run_virtual,
    seconds_on_path,
    sleep_here,
)
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
    return resolve(TypeAdapter(PlacementConfig).validate_python(fragment), KINDS)


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


def simulated(
    costs: CostModel,
    placement: ResolvedPlacement,
    steps: int = 1,
    *,
    after: Mapping[str, str] | None = None,
    run: Callable[[Coroutine[Any, Any, SimulationResult]], SimulationResult] = run_virtual,
    sleep: Sleep = sleep_here,
) -> SimulationResult:
    """A run on the virtual clock, or with ``asyncio.run`` on the real one."""

    async def main() -> SimulationResult:
        simulation = Simulation(costs, placement, prompts_per_step=SAMPLES, chunk_size=CHUNK, sleep=sleep)
        names = [stage.stage for stage in costs.scoring]
        held = {name: Waiting(scorer) for name, scorer in zip(names, simulation.stages.scorers, strict=True)}
        for name, earlier in (after or {}).items():
            held[name].after = held[earlier]
        simulation.stages = replace(simulation.stages, scorers=[*held.values()]) if after else simulation.stages
        return await simulation.run(steps)

    return run(main())


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
    found = {"virtual_s": simulated(costs, placement, after=case.after).step_s[0]}
    faster = costs.times(1 / REAL_SPEED)
    if real_runs:
        seconds = [simulated(faster, placement, after=case.after, run=asyncio.run).step_s[0] for _ in range(real_runs)]
        found["real_s"] = min(seconds) * REAL_SPEED
    if ray_runs:
        with ray_workers(placement) as sleep:
            seconds = [
                simulated(faster, placement, after=case.after, run=asyncio.run, sleep=sleep).step_s[0]
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
        return tuple(replace(stage, cost=stage.cost.times(share(stage.role))) for stage in given)

    generation = replace(costs.generation, step=costs.generation.step.times(share("rollout")))
    return replace(
        costs,
        generation=generation,
        scoring=stages(costs.scoring),
        learning=stages(costs.learning),
        resident_bytes=SIZES,
        move_bytes_per_s={role: float(BYTES_PER_GPU_S * processes(role)) for role in SIZES},
    )


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
    outcome = simulated(costs, placement, steps)
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
