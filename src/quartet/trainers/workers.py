"""Where an RL run computes: its placement, the workers of all roles (here or on Ray), and what replaces dead ones.

The rollout role's worker of a recipe: around the native engine in its process, or around engines elsewhere.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import cast

import torch

from quartet.batch.pictures import keys_in
from quartet.cluster import ResourcePool, WorkerGroup, connect
from quartet.cluster.errors import SmallerBudget
from quartet.cluster.group import DeathCount
from quartet.config import UserError
from quartet.config.algorithms import reads_reference
from quartet.config.common import RayCluster
from quartet.config.engines import VLLMEngineConfig, is_served
from quartet.config.placement import (
    HEADS,
    VISION,
    AsynchronousPlacement,
    ResolvedPlacement,
    ResolvedPool,
    Role,
    check_devices,
    resolve_placement,
)
from quartet.config.recipe import RLRecipe
from quartet.config.rewards import BaseModelReward
from quartet.data.datasets import PromptItem
from quartet.models.packed_model import PackedCausalLM, PackedModel
from quartet.observe.spans import BACKGROUND, SpanRecorder
from quartet.rollout.drafter import DrafterModel, load_drafter_model
from quartet.rollout.engine import copy_packed_model
from quartet.rollout.staging import StagedWeights
from quartet.schedule.clock import ComputeThread
from quartet.schedule.leases import LeaseMode, default_placement
from quartet.schedule.model_worker import ModelWorker, Offloadable, RolloutWriter, ScoreWorker, TrainWorker
from quartet.schedule.role_group import ColocatedWorker, LocalGroup, RemoteGroup, RoleGroup
from quartet.schedule.rollout_worker import NativeRolloutWorker, RolloutWorker, ServedRolloutWorker
from quartet.schedule.weight_sync import open_weight_sync, sync_weights
from quartet.text.examples import PromptText
from quartet.text.tokenizer import TextCodec
from quartet.trainers.devices import META, resolve_precision, set_up_worker_process, worker_device
from quartet.trainers.engines import (
    EnginePolicy,
    engine_model_directory,
    has_model_directory,
    native_engine,
    open_engine,
    run_pictures,
    trusts_remote_code,
    vllm_dtype,
)
from quartet.trainers.input_sources import reads_pictures
from quartet.trainers.model_loader import ModelLoader, PTXData, UserObjects, passed_reward_models
from quartet.trainers.roles import RLRoles, reference_refresh_steps
from quartet.trainers.sharded_models import TRAINED_ROLES, RoleMeshes, ShardedModels, role_shardings

_log = logging.getLogger(__name__)
AnyRolloutWorker = NativeRolloutWorker | ServedRolloutWorker


def engine_shares_actor(recipe: RLRecipe, placement: ResolvedPlacement) -> bool:
    """Tells whether the engine uses the actor's weights without a copy: both share a pool, and nothing is offloaded."""
    pool = placement.pool(placement.pool_of["rollout"])
    is_alone = pool.slots == 1 and pool.budget_bytes is None and pool.num_processes == 1
    ahead = isinstance(recipe.placement, AsynchronousPlacement)
    return placement.pool_of["actor"] == pool.name and is_alone and not ahead and not is_served(recipe.rollout.engine)


def rollout_worker(
    recipe: RLRecipe,
    placement: ResolvedPlacement,
    actor: PackedCausalLM,
    codec: TextCodec,
    device: torch.device,
    *,
    drafter_model: DrafterModel | None,
    is_own: bool = False,
) -> AnyRolloutWorker:
    """Makes the rollout worker around an engine in this process, or engines elsewhere, which are started now and wait
    for weights.

    Args:
        actor: the model that a native engine computes with, itself or a copy; of served engines its names and shapes
            count, contents only where the recipe names no directory with it.
        drafter_model: that learns along with it; names and shapes count.
        device: of this process.
        is_own: ``actor`` is the engine's alone.

    Raises:
        UserError, EngineFailed: they cannot be had, or do not fit the recipe.
    """
    if is_served(recipe.rollout.engine):
        return _served_rollout_worker(recipe, placement, actor, codec, device, drafter_model)
    shares = engine_shares_actor(recipe, placement) and not is_own
    engine = native_engine(
        actor if shares or is_own else copy_packed_model(actor),
        recipe.rollout.engine,
        codec.decode_completion,
        owns_weights=not shares,
        speculation=recipe.rollout.speculation,
        model=drafter_model if shares else None,
    )
    return NativeRolloutWorker(engine, codec)


def _served_rollout_worker(
    recipe: RLRecipe,
    placement: ResolvedPlacement,
    actor: PackedCausalLM,
    codec: TextCodec,
    device: torch.device,
    drafter_model: DrafterModel | None,
) -> ServedRolloutWorker:
    config, pool = recipe.rollout.engine, placement.pool(placement.pool_of["rollout"])
    speculation = recipe.rollout.speculation
    if drafter_model is None and isinstance(config, VLLMEngineConfig):
        load_drafter_model(speculation, actor)  # which refuses another policy's
    precision = resolve_precision(device, recipe.actor.train.precision)
    dtype = getattr(torch, vllm_dtype(config, precision)) if isinstance(config, VLLMEngineConfig) else None
    adapters, num_engines = actor.adapters, config.engines if isinstance(config, VLLMEngineConfig) else 1
    named = actor.model.named_parameters(remove_duplicate=False) if adapters is None else adapters.trained.items()
    with ExitStack() as made:
        folder = made.enter_context(engine_model_directory(recipe.actor.model, actor, codec))
        staging = StagedWeights(chain(named, drafter_model.weights() if drafter_model is not None else ()), dtype)
        made.callback(staging.close)
        policy = EnginePolicy(
            folder,
            actor.vocab_size,
            codec.decode_completion,
            precision,
            recipe.numerics,
            recipe.actor.train.lora,
            recipe.seed,
            device,
            staging,
            pool.budget_bytes is not None,
            speculation,
            trusts_remote_code(recipe.actor.model, actor),
            run_pictures(codec),
        )
        router = open_engine(config, policy)
        made.callback(router.close)
        worker = ServedRolloutWorker(
            router,
            codec,
            weight_bytes=num_engines * sum(p.numel() * (dtype or p.dtype).itemsize for p in actor.model.parameters()),
            shares_devices=[*placement.pool_of.values()].count(pool.name) > 1,
            sleep_level=getattr(config, "sleep_level", 1),
            close=made.pop_all().close,
        )
        return worker


WRITER_ROLE = "writer of rollouts"
"""Among the roles of a process; no reward model can be called that, as their names have no spaces."""
_PATIENCE_S = 5.0
"""So long a worker may take to say that it lives; one that is busy counts as living."""
Sizes = dict[str, dict[LeaseMode, int]]


# Placement -----------------------------------------------------------------------------------------------


def run_placement(recipe: RLRecipe, objects: UserObjects) -> ResolvedPlacement:
    """
    Raises:
        UserError: a placement that cannot work, with the numbers and what would.
    """
    kinds: dict[str, Role] = {"actor": "actor", "rollout": "rollout"}
    if recipe.algorithm.name == "ppo":
        kinds["critic"] = "critic"
    if reads_reference(recipe.algorithm):
        kinds["reference"] = "reference"
    if recipe.rollout.speculation is not None and recipe.rollout.speculation.learns:
        kinds[HEADS] = HEADS
    if recipe.actor.train.freeze_projector and reads_pictures(recipe.actor.model, objects.model):
        kinds[VISION] = VISION
    only = recipe.held_out.rewards
    for configs, rewards in ((recipe.rewards, objects.rewards), (only, objects.evaluation_rewards)):
        named = [config.name for config in configs if isinstance(config, BaseModelReward)]
        kinds |= dict.fromkeys([*named, *passed_reward_models(configs, rewards)], "reward")
    if recipe.placement is None:
        return default_placement(kinds)
    placement = resolve_placement(recipe.placement, kinds)
    crowded = [pool for pool in placement.pools if pool.num_processes > 1]
    if crowded and recipe.cluster.type == "local":
        raise UserError(
            "the placement needs more processes than there are",
            found=f"pool {crowded[0].name!r} with {crowded[0].num_processes} processes; cluster.type local has one "
            "for all pools",
            remedy="set cluster.type: ray, or leave processes and nodes out",
        )
    return placement


def roles_in(placement: ResolvedPlacement, pool: str) -> list[str]:
    """Returns the names of the roles that are placed in a pool, ``rollout`` and ``heads`` among them."""
    return [role for role, home in placement.pool_of.items() if home == pool]


def shares_reference(placement: ResolvedPlacement) -> bool:
    """Tells whether a LoRA actor's reference may be that actor without its adapters: where both lie, and nothing
    moves."""
    if "reference" not in placement.pool_of:
        return True
    pool = placement.pool(placement.pool_of["reference"])
    return placement.pool_of["actor"] == pool.name and pool.budget_bytes is None


# Workers -------------------------------------------------------------------------------------------------


class VisionWorker:
    """Computes features of pictures before the prompts that have them are answered, for all roles to come."""

    def __init__(self, packed: PackedModel, codec: TextCodec) -> None:
        assert packed.tower is not None, "a run without pictures has no such role"
        self._tower = packed.tower
        # Not every tokenizer may be used by two threads at a time.
        self._codec = replace(codec, tokenizer=copy.deepcopy(codec.tokenizer))

    def look(self, prompt: PromptText) -> None:
        self._tower.features(keys_in(self._codec.encode_prompt(prompt)))


class LookAhead:
    """Has pictures of prompts to come looked at beside all else.

    Args:
        groups: the workers that look.
        item: stream index → prompt.
        step_size: prompts of a step.
    """

    def __init__(
        self,
        groups: Sequence[RoleGroup[VisionWorker]],
        item: Callable[[int], PromptItem],
        step_size: int,
        recorder: SpanRecorder,
    ) -> None:
        self._groups, self._item, self._step_size, self._recorder = groups, item, step_size, recorder
        self._tasks: set[asyncio.Task[None]] = set()

    def begun(self, index: int) -> None:
        """Notes that the prompt at ``index`` of the stream is being answered: its place in the next step is next."""
        task = asyncio.get_running_loop().create_task(self._look(index + self._step_size))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look(self, index: int) -> None:
        group, step = self._groups[index % len(self._groups)], index // self._step_size - 1
        span = self._recorder.span("look_ahead", step=step, role=VISION, mode=BACKGROUND)
        try:
            with span:
                await group.call(VisionWorker.look, self._item(index).prompt)
        except Exception as error:  # where the picture is needed it is one, too, and ends the run
            _log.warning("a picture could not be looked at ahead: %s: %s", type(error).__name__, error)


class PoolWorker(ColocatedWorker):
    """A process of a pool: the workers of all roles that are placed there. Loads only their models (and, for a moment,
    what a critic starts from).

    Args:
        pool: its name in ``placement``.
        directory: of the driver; paths of the recipe begin there, where a node has it.
        ptx: the demonstrations, for the actor if it is placed here.
    """

    def __init__(
        self,
        recipe: RLRecipe,
        objects: UserObjects,
        placement: ResolvedPlacement,
        pool: str,
        directory: str,
        ptx: PTXData | None = None,
    ) -> None:
        names = roles_in(placement, pool)
        device, shares = worker_device(self.device, recipe), shares_reference(placement)
        of_role = role_shardings(recipe, shares_reference=shares)
        cut_roles = {role for role, sharding in of_role.items() if sharding.copy_size > 1}
        is_group = self.world_size > 1 and not cut_roles.union(TRAINED_ROLES).isdisjoint(names)
        meshes = RoleMeshes(set_up_worker_process(self, "+".join(names), recipe, directory, is_group=is_group), of_role)
        loader = ModelLoader(
            recipe, objects, device=device, moves_user_models=True, shares_reference=shares, meshes=meshes
        )
        cut = ShardedModels(recipe, objects, device, meshes, shares_reference=shares)
        if ptx is not None:
            ptx.read_with(loader.codec)
        self.roles: dict[str, ModelWorker | AnyRolloutWorker | RolloutWriter | VisionWorker] = {}

        # Each leaves before the next one comes; those that others start from come last: a critic may start as a copy
        # of a reward model, everything else as one of the actor.
        order = {"critic": 0, "reference": 1, "rollout": 3, "actor": 4}  # reward models are in the middle
        own = (name for name in names if name not in (HEADS, VISION))  # they are the actor's worker's
        for role in sorted(own, key=lambda name: order.get(name, 2)):
            worker: ModelWorker | AnyRolloutWorker
            if role == "rollout":
                is_own = "actor" not in names or "actor" in cut_roles
                served = is_served(recipe.rollout.engine)
                source = self._names_only(recipe, objects, device) if served else loader
                actor, codec = source.actor, loader.codec
                model = source.drafter_model if served or not is_own else None
                worker = rollout_worker(recipe, placement, actor, codec, device, drafter_model=model, is_own=is_own)
            else:
                worker = (cut if role in cut_roles else loader).worker(role, ptx)
            if isinstance(worker, TrainWorker) and "rollout" in names:
                worker.sends_everywhere = True
            if placement.pool(pool).budget_bytes is not None:
                worker.make_offloadable(recipe.offload)
                worker.offload()
            self.roles[role] = worker
        if "actor" in names:
            self.roles[WRITER_ROLE] = RolloutWriter(loader.codec)
        if VISION in names and "rollout" not in names:
            self.roles[VISION] = VisionWorker(loader.actor, loader.codec)

    @staticmethod
    def _names_only(recipe: RLRecipe, objects: UserObjects, device: torch.device) -> ModelLoader:
        """Makes a loader of the actor without contents, where a directory has them for the engines."""
        if not has_model_directory(recipe.actor.model):
            # A model from Python may be the actor's, too, which is taken over for itself.
            return ModelLoader(recipe, replace(objects, model=copy.deepcopy(objects.model)))
        return ModelLoader(recipe, objects, device=META, computes=device)


class RunWorkers:
    """
    Attributes:
        compute: this process's compute thread: of the workers that are here, and of the advantages.
        models: role → its group.
        writer: of token ids, in the process of the actor's first worker.
        engines: a group of each engine.
        vision: a group of each worker that looks at pictures ahead.
    """

    def __init__(self, recipe: RLRecipe, placement: ResolvedPlacement) -> None:
        self.recipe = recipe
        self.placement = placement
        self.shares_actor = engine_shares_actor(recipe, placement)
        self.compute = ComputeThread()
        self.models: dict[str, RoleGroup[ModelWorker]] = {}
        self.engines: list[RoleGroup[AnyRolloutWorker]] = []
        self.vision: list[RoleGroup[VisionWorker]] = []
        self.writer: RoleGroup[RolloutWriter]

    def drafting(self) -> Sequence[RoleGroup[NativeRolloutWorker]]:
        """Returns the engines that later drafts depend on; one in a process of its own keeps nothing."""
        if self.recipe.rollout.speculation is None or is_served(self.recipe.rollout.engine):
            return []
        return cast(list[RoleGroup[NativeRolloutWorker]], self.engines)

    def senders(self) -> list[tuple[RoleGroup[TrainWorker], Sequence[RoleGroup[AnyRolloutWorker]]]]:
        """Tells whose weights come to which engines."""
        return [(cast(RoleGroup[TrainWorker], self.models["actor"]), self.engines)]

    async def connect_engines(self) -> None:
        """Opens the way of the weights from the actor to its engines; again, after workers were replaced."""
        sync = self.recipe.weight_sync
        for trainer, engines in [] if self.shares_actor else self.senders():
            await open_weight_sync(trainer, engines, timeout_s=sync.timeout_s)

    async def update_engine_weights(self, version: int) -> int:
        """Brings the actor's weights of ``version`` into all engines; returns the bytes that these received
        together."""
        if self.shares_actor:
            for engine in self.engines:
                await engine.call(RolloutWorker.share, version)
            return 0
        timeout_s = self.recipe.weight_sync.timeout_s
        senders = self.senders()
        ways = [sync_weights(trainer, engines, version, timeout_s=timeout_s) for trainer, engines in senders]
        to_each = await asyncio.gather(*ways)
        return sum(len(engines) * sent for (_, engines), sent in zip(senders, to_each, strict=True))

    async def sizes(self) -> Sizes:
        """Returns role → mode → bytes that must be on its pool's devices, over all its processes."""
        found: Sizes = {}
        for role in [*self.models, "rollout"]:
            num = self.placement.pool(self.placement.pool_of[role]).num_processes
            sizes = await self.groups_of(role)[0].call(Offloadable.sizes)
            found[role] = {mode: num * size for mode, size in sizes.items()}
        return found

    def start(self, ptx: PTXData | None = None) -> None:
        """Starts what computes; ``models`` and ``engines`` reach it afterwards. An actor elsewhere gets ``ptx``."""

    def close(self) -> None:
        """Ends it."""

    async def clear(self) -> None:
        """Moves everything out of pools with a budget: the arbiter brings in what is asked for."""
        for role in self.offloaded_roles():
            for group in self.groups_of(role):
                await group.call(Offloadable.offload)

    def groups_of(self, role: str) -> Sequence[RoleGroup[Offloadable]]:
        return self.engines if role == "rollout" else [self.models[role]]

    def replace_dead(self, error: Exception, is_learning: bool) -> tuple[str, bool, list[SmallerBudget]]:
        """Puts new workers in the place of dead ones.

        Args:
            error: what the run ended with.
            is_learning: updates of the step under way had begun.

        Returns:
            What happened, in words; whether the states of the roles that train are to be restored; and what memory has
            lowered.

        Raises:
            Exception: ``error``, where no worker died.
            UserError: workers died more often than is allowed.
        """
        raise error

    def offloaded_roles(self) -> set[str]:
        """Returns the roles whose parts leave their devices for others."""
        limited = {pool.name for pool in self.placement.pools if pool.budget_bytes is not None}
        found = {role for role, pool in self.placement.pool_of.items() if pool in limited}
        return found - {HEADS, VISION}


class LocalRunWorkers(RunWorkers):
    """All workers in this process."""

    def __init__(self, recipe: RLRecipe, placement: ResolvedPlacement, roles: RLRoles) -> None:
        super().__init__(recipe, placement)
        actor, engine_thread = roles.actor.packed, self.compute
        model = cast(TrainWorker, roles.workers["actor"]).drafter_model
        with ExitStack() as made:
            engine = rollout_worker(recipe, placement, actor, roles.codec, actor.device, drafter_model=model)
            if isinstance(engine, ServedRolloutWorker):
                made.callback(engine.close)
                # It waits for engines while others compute.
                engine_thread = ComputeThread(is_exclusive=False)
                made.callback(engine_thread.close)
            workers: dict[str, Offloadable] = {**roles.workers, "rollout": engine}
            for role in self.offloaded_roles():
                workers[role].make_offloadable(recipe.offload)
            self._closing = made.pop_all()
        self.models = {name: LocalGroup(worker, self.compute) for name, worker in roles.workers.items()}
        self.engines = [LocalGroup(engine, engine_thread)]
        self.writer = LocalGroup(RolloutWriter(roles.codec), self.compute)
        if VISION in placement.pool_of and not self.offloaded_roles():
            # Beside all else: it waits for nobody, and what it computes with stays as it is.
            thread = ComputeThread(is_exclusive=False)
            self._closing.callback(thread.close)
            self.vision = [LocalGroup(VisionWorker(actor, roles.codec), thread)]
        self._workers = list(roles.workers.values())

    def close(self) -> None:
        """Closes the workers; models that a run was given are as usable after it as before."""
        self._closing.close()
        self.compute.close()
        for worker in self._workers:
            worker.stop_offloading()


class RayRunWorkers(RunWorkers):
    """A group of workers for every pool. Pools are granted when this is made, before any model is loaded.

    Args:
        objects: models from Python, which nothing here takes over; copies go to the workers.
    """

    def __init__(self, recipe: RLRecipe, placement: ResolvedPlacement, objects: UserObjects) -> None:
        super().__init__(recipe, placement)
        assert isinstance(recipe.cluster, RayCluster)
        self.cluster = recipe.cluster
        self._objects = objects.models_only()
        self._groups: dict[str, WorkerGroup] = {}
        self._count = DeathCount(self.cluster.max_restarts)
        is_refreshed = reference_refresh_steps(recipe) is not None
        self._changing = {*TRAINED_ROLES, *(["reference"] if is_refreshed else [])}
        self._backend = connect(self.cluster.address)
        try:
            self._check_room()
            self._pools = {pool.name: self._granted(pool) for pool in placement.pools}
        except BaseException:
            self._backend.close()
            raise

    def start(self, ptx: PTXData | None = None) -> None:
        """Starts all workers side by side; each loads the models of its roles.

        Raises:
            UserError, WorkerError, WorkerDied: of the first pool that failed.
        """
        with ThreadPoolExecutor(len(self._pools)) as starting:
            groups = {name: starting.submit(self._started, name, ptx) for name in self._pools}
        self._groups = {name: group.result() for name, group in groups.items()}
        self._connect()

    def replace_dead(self, error: Exception, is_learning: bool) -> tuple[str, bool, list[SmallerBudget]]:
        """Starts a pool with a dead worker anew. Where weights were lost, or are between two steps, the pools of all
        roles whose weights change do: they go back to one consistent point together."""
        deaths = {name: found[0] for name, group in self._groups.items() if (found := group.dead(_PATIENCE_S))}
        if not deaths:
            raise error
        changing = {home for role, home in self.placement.pool_of.items() if role in self._changing}
        states = is_learning or bool(changing & deaths.keys())
        who = "; ".join(
            f"{death.report()} ({', '.join(roles_in(self.placement, pool))})" for pool, death in deaths.items()
        )
        self._count.note([*deaths.values()], who, error)
        # Engines that have newer weights already do not take older ones.
        going_back = changing | {self.placement.pool_of["rollout"]} if states else set()
        anew = sorted(deaths.keys() | going_back)
        with ThreadPoolExecutor(len(anew)) as starting:
            for restarted in [starting.submit(self._groups[name].restart) for name in anew]:
                restarted.result()
        lowered = [death.smaller for death in deaths.values() if death.smaller]
        return f"{who}; started anew: {', '.join(anew)}", states, lowered

    def close(self) -> None:
        self.compute.close()
        self._backend.close()

    def senders(self) -> list[tuple[RoleGroup[TrainWorker], Sequence[RoleGroup[AnyRolloutWorker]]]]:
        # Replicas of the actor are equal: the first copy sends, or in a common pool each worker to the engine beside.
        home = self.placement.pool_of
        if home["actor"] != home["rollout"]:
            return [(cast(RoleGroup[TrainWorker], self.models["actor"]), self.engines)]
        group = self._groups[home["actor"]]
        return [(RemoteGroup(group, "actor", TrainWorker, rank), [engine]) for rank, engine in enumerate(self.engines)]

    def _started(self, pool: str, ptx: PTXData | None) -> WorkerGroup:
        return WorkerGroup(
            self._pools[pool],
            PoolWorker,
            self.recipe,
            self._objects,
            self.placement,
            pool,
            os.getcwd(),
            ptx if self.placement.pool_of["actor"] == pool else None,
            name=pool,
            backend=self._backend,
            start_timeout_s=self.cluster.start_timeout_s,
        )

    def _connect(self) -> None:
        home = self.placement.pool_of
        of_role = role_shardings(self.recipe, shares_reference=shares_reference(self.placement))
        for role in home:
            if role not in ("rollout", HEADS, VISION):
                kind: type[ModelWorker] = TrainWorker if role in TRAINED_ROLES else ScoreWorker
                self.models[role] = RemoteGroup(self._groups[home[role]], role, kind, sharding=of_role.get(role))
        self.writer = RemoteGroup(self._groups[home["actor"]], WRITER_ROLE, RolloutWriter, 0)
        group = self._groups[home["rollout"]]
        self.engines = [RemoteGroup(group, "rollout", NativeRolloutWorker, rank) for rank in range(group.world_size)]
        if home.get(VISION, home["rollout"]) != home["rollout"]:
            looking = self._groups[home[VISION]]
            self.vision = [RemoteGroup(looking, VISION, VisionWorker, rank) for rank in range(looking.world_size)]

    def _check_room(self) -> None:
        """Checks all pools at once, before any is granted."""
        if needs := self._resources([1]).needs:
            check_devices(self.placement, [node.holds(needs, node.total) for node in self._backend.nodes()])

    def _granted(self, pool: ResolvedPool) -> ResourcePool:
        granted = self._resources(pool.processes_per_node)
        self._backend.grant(granted, self.cluster.start_timeout_s)
        return granted

    def _resources(self, processes: Sequence[int]) -> ResourcePool:
        cpus, gpus = self.cluster.cpus_per_process, self.cluster.gpus_per_process
        return ResourcePool(processes, cpus=cpus, gpus=gpus, strategy=self.cluster.strategy)


class RoleOffloader:
    """Moves parts of roles for the arbiter, and adds up what was measured."""

    def __init__(self, workers: RunWorkers, recorder: SpanRecorder) -> None:
        self._workers = workers
        self._recorder = recorder
        self._totals: defaultdict[str, float] = defaultdict(float)

    async def onload(self, role: str, mode: LeaseMode) -> None:
        await self._move(role, mode)

    async def offload(self, role: str) -> None:
        await self._move(role, None)

    async def _move(self, role: str, mode: LeaseMode | None) -> None:
        if role not in self._workers.offloaded_roles():
            return
        name, num_bytes, seconds = "onload", "handover/onload_bytes", "handover/onload_s"
        if mode is None:
            name, num_bytes, seconds = "offload", "handover/offload_bytes", "handover/offload_s"
        with self._recorder.span(name, role=role) as span:
            for group in self._workers.groups_of(role):
                moved = await (group.call(Offloadable.onload, mode) if mode else group.call(Offloadable.offload))
                span.nbytes = (span.nbytes or 0) + moved.num_bytes
                self._totals[num_bytes] += moved.num_bytes
                self._totals[seconds] += moved.seconds
                if mode is None:
                    self._totals["handover/freed_bytes"] += moved.freed_bytes

    def take_metrics(self) -> dict[str, float]:
        """Returns the totals over all roles since the last call."""
        taken, self._totals = dict(self._totals), defaultdict(float)
        return taken
