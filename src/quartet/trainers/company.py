"""The company of a run: the hosts of all roles, wherever they are, started, moved, replaced when they die."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

from quartet.cluster import Death, ResourcePool, WorkerGroup, connect
from quartet.config import UserError
from quartet.config.algorithms import OnlineDPO
from quartet.config.cluster import RayCluster
from quartet.config.placement import ResolvedPlacement, ResolvedPool, check_devices
from quartet.config.recipe import RLRecipe
from quartet.observe.spans import SpanRecorder
from quartet.schedule.compute_thread import ComputeThread
from quartet.schedule.leases import Mode
from quartet.schedule.model_worker import ModelWorker, ScoreWorker, TrainWorker
from quartet.schedule.movable import Movable
from quartet.schedule.role_group import LocalGroup, RemoteGroup, RoleGroup
from quartet.schedule.rollout_worker import NativeRolloutWorker
from quartet.schedule.weight_sync import open_weight_sync, sync_weights
from quartet.schedule.writer import Writer
from quartet.trainers.cast import Cast
from quartet.trainers.loader import Passed
from quartet.trainers.placing import shares_actor, shares_reference
from quartet.trainers.pool_worker import TRAINED, WRITER, Part, PoolWorker, rollout_worker
from quartet.trainers.ptx import PTX

_PATIENCE_S = 5.0
"""So long a worker may take to say that it lives; one that is busy counts as living."""
Sizes = dict[str, dict[Mode, int]]


@dataclass(frozen=True)
class Loss:
    """What a death cost: in words, and whether the states of the roles that train are to be restored."""

    text: str
    states: bool


class Company:
    """
    Attributes:
        compute: this process's compute thread: of the workers that are here, and of the advantages.
        models: role → its group.
        writer: of token ids, in the process of the actor's first worker.
        engines: a group of each engine.
    """

    def __init__(self, recipe: RLRecipe, placement: ResolvedPlacement) -> None:
        self.recipe = recipe
        self.placement = placement
        self.shares_actor = shares_actor(recipe, placement)
        self.compute = ComputeThread()
        self.models: dict[str, RoleGroup[ModelWorker]] = {}
        self.engines: list[RoleGroup[NativeRolloutWorker]] = []
        self.writer: RoleGroup[Writer]

    def senders(self) -> list[tuple[RoleGroup[TrainWorker], Sequence[RoleGroup[NativeRolloutWorker]]]]:
        """Whose weights come to which engines."""
        return [(cast(RoleGroup[TrainWorker], self.models["actor"]), self.engines)]

    async def link(self) -> None:
        """Opens the way of the weights from the actor to its engines; again, after workers were replaced."""
        sync = self.recipe.weight_sync
        for trainer, engines in [] if self.shares_actor else self.senders():
            await open_weight_sync(trainer, engines, sync.transport, timeout_s=sync.timeout_s)

    async def deliver(self, version: int) -> int:
        """The actor's weights of ``version`` into all engines; returns the bytes that moved."""
        if self.shares_actor:
            for engine in self.engines:
                await engine.call(NativeRolloutWorker.share, version)
            return 0
        timeout_s = self.recipe.weight_sync.timeout_s
        ways = [sync_weights(trainer, engines, version, timeout_s=timeout_s) for trainer, engines in self.senders()]
        return sum(await asyncio.gather(*ways))

    async def sizes(self) -> Sizes:
        """Role → mode → bytes that must be on its pool's devices, over all its processes."""
        found: Sizes = {}
        for role in [*self.models, "rollout"]:
            num = self.placement.pool(self.placement.pool_of[role]).num_processes
            sizes = await self.groups_of(role)[0].call(Movable.sizes)
            found[role] = {mode: num * size for mode, size in sizes.items()}
        return found

    def describe(self) -> str:
        """What is about to be started, in words; nothing where it is this process alone."""
        return ""

    def start(self, ptx: PTX | None = None) -> None:
        """Starts what computes; ``models`` and ``engines`` reach it afterwards. An actor elsewhere gets ``ptx``."""

    def close(self) -> None:
        """Ends it."""

    async def clear(self) -> None:
        """Moves everything out of pools with a budget: the arbiter brings in what is asked for."""
        for role in self.moving():
            for group in self.groups_of(role):
                await group.call(Movable.offload)

    def groups_of(self, role: str) -> Sequence[RoleGroup[Movable]]:
        return self.engines if role == "rollout" else [self.models[role]]

    def replace_dead(self, error: Exception, is_learning: bool) -> Loss:
        """New workers in the place of dead ones.

        Args:
            error: what the run ended with.
            is_learning: updates of the step under way had begun.

        Raises:
            Exception: ``error``, where nobody died.
            UserError: workers died more often than is allowed.
        """
        raise error

    def moving(self) -> set[str]:
        """Roles whose parts leave their devices for others."""
        limited = {pool.name for pool in self.placement.pools if pool.budget_bytes is not None}
        return {role for role, pool in self.placement.pool_of.items() if pool in limited}


class LocalCompany(Company):
    """Everybody in this process."""

    def __init__(self, recipe: RLRecipe, placement: ResolvedPlacement, cast: Cast) -> None:
        super().__init__(recipe, placement)
        engine = rollout_worker(recipe, cast.actor.packed, cast.codec, shares_actor=self.shares_actor, is_own=False)
        workers: dict[str, Movable] = {**cast.workers, "rollout": engine}
        for role in self.moving():
            workers[role].make_movable(recipe.offload)
        self.models = {name: LocalGroup(worker, self.compute) for name, worker in cast.workers.items()}
        self.engines = [LocalGroup(engine, self.compute)]
        self.writer = LocalGroup(Writer(cast.codec), self.compute)
        self._workers = list(cast.workers.values())

    def close(self) -> None:
        """Models that a run was given are as usable after it as before."""
        self.compute.close()
        for worker in self._workers:
            worker.stay()


class RayCompany(Company):
    """A group of workers for every pool. Pools are granted when this is made, before any model is loaded.

    Args:
        passed: models from Python, which nothing here takes over; copies go to the workers.
    """

    def __init__(self, recipe: RLRecipe, placement: ResolvedPlacement, passed: Passed) -> None:
        super().__init__(recipe, placement)
        assert isinstance(recipe.cluster, RayCluster)
        self.cluster = recipe.cluster
        self._passed = passed.without_functions()
        self._groups: dict[str, WorkerGroup] = {}
        self._num_deaths = 0
        refreshes = isinstance(recipe.algorithm, OnlineDPO) and recipe.algorithm.refresh_steps is not None
        self._changing = {*TRAINED, "reference"} if refreshes else {*TRAINED}
        self._backend = connect("ray", address=self.cluster.address)
        try:
            self._check_room()
            self._pools = {pool.name: self._granted(pool) for pool in placement.pools}
        except BaseException:
            self._backend.close()
            raise

    def describe(self) -> str:
        of_pool = [
            f"{pool.name} ({pool.num_processes} × {', '.join(self._part(pool.name).roles)})"
            for pool in self.placement.pools
        ]
        return f"placement {self.placement.type}: starting workers for {'; '.join(of_pool)}"

    def start(self, ptx: PTX | None = None) -> None:
        """Starts all workers side by side; each loads what it plays.

        Raises:
            UserError, WorkerError, WorkerDied: of the first pool that failed.
        """
        with ThreadPoolExecutor(len(self._pools)) as starting:
            groups = {name: starting.submit(self._started, name, ptx) for name in self._pools}
        self._groups = {name: group.result() for name, group in groups.items()}
        self._reach()

    def replace_dead(self, error: Exception, is_learning: bool) -> Loss:
        """A pool with a dead worker starts anew. Where weights were lost, or are between two steps, the pools of all
        roles whose weights change do: they go back to one consistent point together."""
        deaths = {name: found[0] for name, group in self._groups.items() if (found := group.dead(_PATIENCE_S))}
        if not deaths:
            raise error
        changing = {home for role, home in self.placement.pool_of.items() if role in self._changing}
        states = is_learning or bool(changing & deaths.keys())
        who = "; ".join(self._obituary(pool, death) for pool, death in deaths.items())
        self._num_deaths += 1
        if self._num_deaths > self.cluster.max_restarts:
            raise UserError(
                "workers died more often than the run replaces them",
                found=f"death {self._num_deaths}, cluster.max_restarts is {self.cluster.max_restarts}; {who}",
                remedy="mend what kills them (the last error is above) and go on with --resume",
            ) from error
        # Engines that have newer weights already do not take older ones.
        going_back = changing | {self.placement.pool_of["rollout"]} if states else set()
        anew = sorted(deaths.keys() | going_back)
        with ThreadPoolExecutor(len(anew)) as starting:
            for restarted in [starting.submit(self._groups[name].restart) for name in anew]:
                restarted.result()
        return Loss(f"{who}; started anew: {', '.join(anew)}", states)

    def _obituary(self, pool: str, death: Death) -> str:
        roles = ", ".join(self._part(pool).roles)
        return f"{death.brief()}: {death.last_error or 'it left no error, so it was killed from outside'} ({roles})"

    def close(self) -> None:
        self.compute.close()
        self._backend.close()

    def senders(self) -> list[tuple[RoleGroup[TrainWorker], Sequence[RoleGroup[NativeRolloutWorker]]]]:
        # Replicas of the actor are equal: the first sends, or in a common pool each to the engine beside it.
        home = self.placement.pool_of
        actors = [
            RemoteGroup(self._groups[home["actor"]], "actor", TrainWorker, rank) for rank in range(len(self.engines))
        ]
        if home["actor"] == home["rollout"]:
            return [(actor, [engine]) for actor, engine in zip(actors, self.engines, strict=True)]
        return [(actors[0], self.engines)]

    def _started(self, pool: str, ptx: PTX | None) -> WorkerGroup:
        part = self._part(pool)
        return WorkerGroup(
            self._pools[pool],
            PoolWorker,
            self.recipe,
            self._passed,
            part,
            ptx if "actor" in part.roles else None,
            name=pool,
            backend=self._backend,
            max_restarts=2**31,
            start_timeout_s=self.cluster.start_timeout_s,
        )

    def _part(self, pool: str) -> Part:
        roles = tuple(role for role, home in self.placement.pool_of.items() if home == pool)
        moves = self.placement.pool(pool).budget_bytes is not None
        return Part(roles, self.shares_actor, shares_reference(self.placement), moves, os.getcwd())

    def _reach(self) -> None:
        home = self.placement.pool_of
        for role in home:
            if role != "rollout":
                kind: type[ModelWorker] = TrainWorker if role in TRAINED else ScoreWorker
                self.models[role] = RemoteGroup(self._groups[home[role]], role, kind)
        self.writer = RemoteGroup(self._groups[home["actor"]], WRITER, Writer, 0)
        group = self._groups[home["rollout"]]
        self.engines = [RemoteGroup(group, "rollout", NativeRolloutWorker, rank) for rank in range(group.world_size)]

    def _check_room(self) -> None:
        """All pools at once, before any is granted."""
        needs = self._resources([1]).needs
        if not needs:
            return
        room = [node.holds(needs, node.total) for node in self._backend.nodes()]
        try:
            check_devices(self.placement, room)
        except UserError as error:
            asked = " and ".join(f"{amount:g} {name}" for name, amount in needs.items())
            raise UserError(
                error.problem,
                found=f"{error.found}; a device is {asked} here",
                remedy=f"{error.remedy}; or ask for less per process (cluster.cpus_per_process, gpus_per_process)",
            ) from error

    def _granted(self, pool: ResolvedPool) -> ResourcePool:
        granted = self._resources(pool.processes_per_node)
        try:
            self._backend.grant(granted, self.cluster.start_timeout_s)
        except UserError as error:
            raise UserError(
                f"placement: pool {pool.name!r} cannot be had; {error.problem}",
                found=error.found,
                remedy=f"{error.remedy} (cluster.cpus_per_process, placement)",
            ) from error
        return granted

    def _resources(self, processes: Sequence[int]) -> ResourcePool:
        cpus, gpus = self.cluster.cpus_per_process, self.cluster.gpus_per_process
        return ResourcePool(processes, cpus=cpus, gpus=gpus, strategy=self.cluster.strategy)


class PartsMover:
    """Moves parts of roles for the arbiter, and notes what was measured.

    ``freed_bytes`` and ``seconds`` are totals by role since the last ``take_metrics``.
    """

    def __init__(self, company: Company, recorder: SpanRecorder) -> None:
        self._company = company
        self._recorder = recorder
        self._totals: dict[str, float] = {}

    async def onload(self, role: str, mode: Mode) -> None:
        await self._move(role, mode)

    async def offload(self, role: str) -> None:
        await self._move(role, None)

    async def _move(self, role: str, mode: Mode | None) -> None:
        if role not in self._company.moving():
            return
        is_leaving = mode is None
        with self._recorder.span("onload" if mode else "offload", role=role) as span:
            for group in self._company.groups_of(role):
                moved = await (group.call(Movable.onload, mode) if mode else group.call(Movable.offload))
                span.nbytes = (span.nbytes or 0) + moved.num_bytes
                self._add("handover/offload_bytes" if is_leaving else "handover/onload_bytes", moved.num_bytes)
                self._add("handover/offload_s" if is_leaving else "handover/onload_s", moved.seconds)
                if is_leaving:
                    self._add("handover/freed_bytes", moved.freed_bytes)

    def _add(self, metric: str, value: float) -> None:
        self._totals[metric] = self._totals.get(metric, 0.0) + value

    def take_metrics(self) -> dict[str, float]:
        taken, self._totals = self._totals, {}
        return taken
