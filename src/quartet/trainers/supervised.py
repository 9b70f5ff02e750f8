"""Jobs without sampling: SFT, preferences, reward models and process reward models.

``train`` → ``_run_steps`` → ``SupervisedWorker.step`` → ``TrainEngine.train_step``

A worker has model, optimizer and rows, in this process or in several of Ray or torchrun; a trainer has the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from quartet.batch.pictures import keys_in
from quartet.batch.ragged import RaggedBatch
from quartet.cluster import ClusterError, ResourcePool, WorkerDied, WorkerGroup, connect
from quartet.cluster.dispatch import ONE_COPY, RANK_ZERO, CustomDispatch, dispatch
from quartet.cluster.errors import OutOfMemory
from quartet.cluster.group import DeathCount
from quartet.cluster.ranks import LastMessage, TorchrunRanks
from quartet.cluster.worker import num_torchrun_restarts
from quartet.config import Interrupted, UserError
from quartet.config.common import DataConfig, RayCluster
from quartet.config.recipe import RewardModelRecipe, SFTRecipe
from quartet.config.run import SupervisedRecipe
from quartet.data.datasets import PreferenceData, SFTData, TrainingRows, num_steps_for_epochs
from quartet.data.lazy import Prefetcher
from quartet.models.directories import copy_to_meta
from quartet.models.loading import (
    adapter_path,
    load_causal_lm,
    load_saved_model,
    load_scalar_model,
    packed_causal_lm,
    packed_scalar_model,
    save_causal_lm,
    save_scalar_model,
    seen_token_mask,
)
from quartet.models.work import WorkTotals
from quartet.observe.callbacks import Callback
from quartet.observe.health import straggler_metrics
from quartet.observe.progress import Progress
from quartet.schedule.clock import ComputeThread
from quartet.schedule.model_worker import Checkpointed, same_for_all
from quartet.schedule.role_group import ColocatedWorker, LocalGroup, RemoteGroup, RoleGroup, TorchrunGroup
from quartet.text.tokenizer import TextCodec, check_vocabulary
from quartet.train.engine import Objective, TrainEngine
from quartet.train.forward import ForwardNeeds
from quartet.train.objectives import PairwiseObjective, SFTObjective
from quartet.train.parallel.data import shard_model
from quartet.train.parallel.loading import load_shares
from quartet.train.parallel.mesh import Mesh
from quartet.train.state import Shape
from quartet.train.token_budget import TokenBudget
from quartet.trainers import checkpoints
from quartet.trainers.checkpoints import TrainResult
from quartet.trainers.devices import resolve_precision, set_up_worker_process, throughput, worker_device
from quartet.trainers.input_sources import (
    ModelLike,
    TokenizerLike,
    check_budget,
    check_recipe,
    choose_reader,
    connect_pictures,
    context_length,
    feature_store,
    longest_group,
    open_pictures,
    read_data,
    resolve_model,
    resolve_scalar_model,
    resolve_tokenizer,
    vocabulary_size,
    with_names,
)
from quartet.trainers.run import Stopwatch, open_run
from quartet.trainers.run_files import Resume, naming_write_errors, note_budgets, read_json
from quartet.trainers.signals import reclaim_signals, run_async, stop_signals

R = TypeVar("R", bound=SupervisedRecipe)
D = TypeVar("D", bound=TrainingRows)


@dataclass(frozen=True)
class PassedObjects:
    """What Python code passes in place of what a recipe names. Copies of it go to workers in other processes."""

    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None
    rows: Sequence[Any] | None = None
    evaluation_rows: Sequence[Any] | None = None
    reference: PreTrainedModel | None = None


@dataclass(frozen=True)
class SupervisedDescription:
    """What a worker says of its model and its rows.

    Attributes:
        warnings: what was left out or changed, and what memory did not allow, in words.
        num_rows: to train on.
        num_evaluation_rows: held-out ones.
    """

    warnings: tuple[str, ...]
    steps: int
    num_rows: int
    rows_per_step: int
    num_evaluation_rows: int


class SupervisedWorker(Checkpointed, Generic[R, D]):
    """Trains one model on rows. Of several, each reads all rows and computes its share of every update and evaluation.

    A job's class says what it reads, minimises and measures. The model is a causal LM, in place; or, where the recipe
    ``is_scalar``, a scalar head on a causal LM's body, which is copied, or a sequence-classification model with one
    label, in place.

    Args:
        device: where the model goes.
        mesh: the workers that train it together; None for this one alone.

    Raises:
        UserError: the recipe, the data or the objects do not fit together.
    """

    _rows_key: ClassVar[str]
    """Key of the recipe that says how many rows make a step."""

    def __init__(self, recipe: R, given: PassedObjects, device: torch.device, mesh: Mesh | None = None) -> None:
        self.recipe = recipe
        self.device = device
        self.mesh = mesh if mesh is not None and mesh.copy.size > 1 else None
        text = resolve_tokenizer(recipe.model, given.tokenizer)
        found, generation = self._resolve(given.model)
        check_vocabulary(text, vocabulary_size(found))
        pictures = open_pictures(recipe.model, found, given.tokenizer, recipe.pictures)
        self.codec = TextCodec.of(text, generation, pictures)
        self._features = feature_store(self.codec)
        context = context_length(found)
        self.data = self._read("data", recipe.data, given.rows, context)
        self.evaluation: D | None = None
        if recipe.evaluation_data is not None or given.evaluation_rows is not None:
            self.evaluation = self._read("evaluation_data", recipe.evaluation_data, given.evaluation_rows, context)
        self.steps = recipe.steps or num_steps_for_epochs(recipe.epochs, len(self.data), self._rows_per_step)
        train = recipe.train
        with contextlib.ExitStack() as taken:
            # Where something does not fit after all, the model is given back as it was.
            pack: Callable[..., Any] = packed_scalar_model if recipe.is_scalar else packed_causal_lm
            self.packed = pack(
                found if self.mesh is not None else found.to(device),
                precision=resolve_precision(device, train.precision),
                activation_checkpointing=train.activation_checkpointing,
                lora=train.lora,
                seed=recipe.seed,
            )
            taken.callback(self.packed.release)
            connect_pictures(self.packed, self._features)
            check_budget(self._longest(), train.token_budget, "train.token_budget")
            if self.mesh is not None:
                shard_model(self.packed, self.mesh, on_host=recipe.sharding.cpu_offload)
                load_shares(self.packed, self._contents(given.model), device=device, seed=recipe.seed)
            self.engine: TrainEngine[Any] = TrainEngine(self.packed, train, total_steps=self.steps, mesh=mesh)
            self._begin(given)
            taken.pop_all()

    def _begin(self, given: PassedObjects) -> None:
        """Takes what else a job needs, once model and data are there."""

    def release(self) -> None:
        """Gives the models back as they were."""
        self._batches.close()
        self.packed.release()

    @property
    @abstractmethod
    def objective(self) -> Objective:
        """The objective that every update minimises."""

    def _read(self, key: str, config: DataConfig | None, rows: Sequence[Any] | None, context: int) -> D:
        """Reads the rows of ``key`` in the recipe, or those passed, as tokens."""
        return read_data(config, rows, self.codec, context, key, choose_reader(self.recipe))

    @abstractmethod
    def _longest(self) -> int:
        """Returns the most tokens that have to stay in one micro-batch."""

    @abstractmethod
    def _measure(self, data: D) -> dict[str, float]:
        """Returns figures of held-out rows, ``eval/…``; collective."""

    def _batch(self, step: int) -> RaggedBatch:
        """Returns the batch of a step, a pure function of it, so that a resumed run sees the same data."""
        return self._batches.get(step)

    @cached_property
    def _batches(self) -> Prefetcher[Any]:
        """The batches of each step; one is prepared ahead where rows have to be read and tokenised for it, or pictures
        looked at."""
        size, seed, tower = self._rows_per_step, self.recipe.seed, self.packed.tower
        looks = tower is not None and not tower.trains and self.mesh is None

        def make(step: int) -> RaggedBatch | None:
            if step >= self.steps:
                return None
            batch = self.data.batch(step, size, seed)
            if looks and tower is not None:
                tower.features(keys_in(batch.input_ids.tolist()))
            return batch

        return Prefetcher(make, ahead=1 if self.data.unchecked or looks else 0)

    @property
    def _rows_per_step(self) -> int:
        return int(getattr(self.recipe, self._rows_key))

    @property
    def _shares_prompts(self) -> bool:
        """A prompt is computed once for all of its answers."""
        return self.packed.shares_prefixes and self.recipe.train.share_prefixes

    def _resolve(self, model: PreTrainedModel | None) -> tuple[PreTrainedModel, GenerationConfig | None]:
        """Returns the model to train, and the generation config that names its end-of-text ids, where there is one.

        One that is to be cut has no contents yet.
        """
        recipe, empty = self.recipe, self.mesh is not None
        if model is not None and empty:
            model = copy_to_meta([model])[0]
        if recipe.is_scalar:
            return resolve_scalar_model(recipe.model, model, seed=recipe.seed, empty=empty)
        found = resolve_model(recipe.model, model, partial(load_causal_lm, empty=empty), "model")
        return found, found.generation_config

    def _contents(self, model: PreTrainedModel | None) -> str | dict[str, torch.Tensor]:
        """Returns where the weights are that ``_resolve`` has left out."""
        if model is not None:
            return model.state_dict()
        assert self.recipe.model is not None, "it has been resolved"
        return self.recipe.model.path

    def _seen(self) -> torch.Tensor:
        """Returns the tokens that occur in the data, ``[V]`` bool; none where the export does not ask."""
        if not self.recipe.is_scalar:
            return torch.zeros(0, dtype=torch.bool)
        found = (data.seen for data in (self.data, self.evaluation) if data is not None)
        return seen_token_mask(vocabulary_size(self.packed.model), (torch.tensor(sorted(ids)) for ids in found))

    @dispatch(RANK_ZERO)
    def describe(self) -> SupervisedDescription:
        warnings = [f"data: {warning}" for warning in self.data.remarks]
        if self.evaluation is not None:
            warnings += [f"held-out data: {warning}" for warning in self.evaluation.remarks]
        return SupervisedDescription(
            warnings=(*warnings, *self.engine.warnings),
            steps=self.steps,
            num_rows=len(self.data),
            rows_per_step=self._rows_per_step,
            num_evaluation_rows=len(self.evaluation) if self.evaluation is not None else 0,
        )

    @dispatch(CustomDispatch(same_for_all, lambda layout, found: WorkTotals.joined(found)))
    def work(self) -> WorkTotals:
        """Returns what all ranks have computed since the last call."""
        return self.packed.work.take(self.packed.device, self.packed.precision)

    def step(self, step: int) -> dict[str, float]:
        """Makes the update of step ``step``, from 0; returns its figures by the names under which they are logged."""
        engine = self.engine
        batch = self._batch(step)
        found = self._update(batch)
        figures = {name: value for name, value in found.items() if name not in ("lr", "grad_norm", "skipped")}
        return {
            **figures,
            "optim/lr": found["lr"],
            "optim/grad_norm": found["grad_norm"],
            "optim/skipped_steps": float(engine.num_skipped),
            "train/token_budget": float(engine.budget.tokens),
            "train/num_oom": float(engine.num_oom),
            "tokens/useful": float(batch.num_tokens),
        }

    def _update(self, batch: RaggedBatch) -> dict[str, float]:
        return self.engine.train_step(batch, self.objective)

    def evaluate(self) -> dict[str, float]:
        """Returns figures of the held-out rows, as they are logged.

        Raises:
            UserError: there are none.
        """
        if self.evaluation is None:
            raise UserError(
                "there is no evaluation data",
                found="neither evaluation_data nor evaluation_rows",
                remedy="set evaluation_data.path, or pass evaluation_rows",
            )
        return self._measure(self.evaluation)

    @dispatch(ONE_COPY)
    def write_model(self, path: Path) -> str | None:
        """Writes the model and its tokenizer as a Hugging Face directory; returns a warning for its users.

        Raises:
            UserError: it could not be written.
        """
        self.check_sees(path.parent)
        tokenizer, eos_ids = self.codec.tokenizer, self.codec.eos_ids
        with naming_write_errors(path):
            if self.recipe.is_scalar:
                return save_scalar_model(self.packed, tokenizer, path, seen=self._seen(), eos_ids=eos_ids)
            return save_causal_lm(self.packed, tokenizer, path, eos_ids=eos_ids)

    @property
    def budgets(self) -> Sequence[TokenBudget]:
        return self.engine.budget, self.engine.forward_budget

    def checkpoint_state(self) -> dict[str, Any]:
        return self.engine.state()

    def loading(
        self, saved: Mapping[str, Shape], rest: Mapping[str, Any]
    ) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        return self.engine.loading(saved, rest)


class SupervisedProcess(ColocatedWorker):
    """A process of Ray with one worker, ``model``, which loads the model and reads the rows.

    Args:
        kind: of the worker.
        directory: of the driver; paths of the recipe begin there, where a node has it.
    """

    def __init__(
        self, kind: type[SupervisedWorker[Any, Any]], recipe: SupervisedRecipe, given: PassedObjects, directory: str
    ) -> None:
        group = set_up_worker_process(self, recipe.job, recipe, directory, is_group=self.world_size > 1)
        mesh = Mesh.cut(group, recipe.sharding) if group is not None else None
        self.roles = {"model": kind(recipe, given, worker_device(self.device, recipe), mesh)}


W = TypeVar("W", bound=SupervisedWorker[Any, Any])
_PATIENCE_S = 5.0
"""So long a worker may take to say that it lives; one that is busy counts as living."""


class SupervisedTrainer(Generic[R, W]):
    """A job without sampling: trains, evaluates, exports.

    Args:
        recipe: the run. What it leaves out comes as objects:
        model, tokenizer: what is trained, in place (on Ray copies are), and its tokenizer; objects, or paths or hub
            names. An object stays on its device unless the recipe names another.
        rows, evaluation_rows: mappings, with the columns that the job reads from files.
        callbacks: are told of the run's steps, and may end it.
        resume: go on with the run in ``recipe.output_dir``; ``auto``: or start it, without a word.

    Raises:
        UserError: the recipe, the data or the objects do not fit together; nothing has been written then. On Ray
            ``train`` raises it, once workers have loaded them.
    """

    recipe_class: ClassVar[type[SupervisedRecipe]]
    worker_class: ClassVar[type[SupervisedWorker[Any, Any]]]
    _evaluation_metric: ClassVar[str] = "eval/accuracy"
    """Shown beside the progress bar."""
    _reference: PreTrainedModel | None = None
    """To compare with, where the job does."""

    def __init__(
        self,
        recipe: R,
        *,
        model: ModelLike | None = None,
        tokenizer: TokenizerLike | None = None,
        rows: Sequence[Any] | None = None,
        evaluation_rows: Sequence[Any] | None = None,
        callbacks: Sequence[Callback] = (),
        resume: Resume = False,
        progress: Progress | None = None,
    ) -> None:
        check_recipe(recipe, self.recipe_class)
        recipe, passed, own = with_names(recipe, model, tokenizer)
        if recipe.cluster.type == "torchrun" and recipe.output_dir is not None and num_torchrun_restarts():
            resume = resume or "auto"
        self.run, self.progress, device = open_run(recipe, resume, progress, passed, callbacks)
        self.recipe = recipe = self.run.pin(recipe)
        self.path = self.run.path
        # A worker in another process may be in another directory itself.
        self._path_of_workers = self.path if recipe.cluster.type == "local" else self.path.absolute()
        self._given = PassedObjects(passed, own, rows, evaluation_rows, self._reference)
        self._worker: W | None = None
        self._processes: WorkerGroup | None = None
        self._joined: TorchrunRanks | None = None
        if recipe.cluster.type == "ray":
            self._backend = connect(recipe.cluster.address)
            self._count = DeathCount(recipe.cluster.max_restarts)
            reclaim_signals()
        elif recipe.cluster.type == "local":
            self._worker = cast(W, self.worker_class(recipe, self._given, device))
            # The worker gives them back; kept here, too, they would stay in memory to the end.
            self._given = PassedObjects()

    @property
    def worker(self) -> W:
        """The worker that trains, where that is this process.

        Raises:
            UserError: it is in processes of Ray.
        """
        if self._worker is None:
            raise UserError(
                "the model and the rows of this run are in its workers",
                found=f"cluster.type: {self.recipe.cluster.type}",
                remedy="set cluster.type: local, or read what the run writes: metrics.jsonl, model/",
            )
        return self._worker

    def evaluate(self) -> dict[str, float]:
        """Returns figures of the held-out rows, as they are logged.

        Raises:
            UserError: there are none, or they are in processes of Ray.
        """
        return self.worker.evaluate()

    def train(self) -> TrainResult:
        """Runs to the last step; ``model/`` is then a plain Hugging Face directory.

        Raises:
            Interrupted: Ctrl-C, SIGTERM or SIGUSR1; saved, and resumable.
            UserError: workers died too often, the disk is full, …; ``resume`` goes on from the last checkpoint.
            SystemExit: in a process of torchrun's that is not rank 0, where that fails.
        """
        try:
            return self._run()
        except OutOfMemory as error:  # on this rank of torchrun's, which may start all ranks again
            note_budgets(self.path, [error.smaller])
            raise

    def _run(self) -> TrainResult:
        watch = Stopwatch()
        if self.recipe.cluster.type == "torchrun" and (ranks := self._ranks()).rank:
            return self._serve(ranks)
        with contextlib.ExitStack() as started:
            group = self._start(started)
            about = run_async(group.call(SupervisedWorker.describe))
            self.run.check_length(about.steps)
            for warning in about.warnings:
                self.progress.print(warning)
            with self.run.stoppable(), self.run:
                summary = run_async(self._train(group, about, watch))
        return TrainResult(self.path, summary, self._trained)

    def _start(self, started: contextlib.ExitStack) -> RoleGroup[W]:
        """Starts the workers, until ``started`` closes; on Ray and under torchrun one process per device, each with a
        copy of the model or its share of one.

        Raises:
            UserError: the cluster has no room, or a worker refused the recipe, the data or the objects.
            WorkerError, WorkerDied: a worker failed while it was made.
        """
        recipe, cluster = self.recipe, self.recipe.cluster
        if self._worker is not None:
            compute = ComputeThread()
            started.callback(self._worker.release)
            started.callback(compute.close)
            return LocalGroup(self._worker, compute)
        kind = cast(type[W], self.worker_class)
        if self.recipe.cluster.type == "torchrun":
            compute = ComputeThread()
            started.callback(compute.close)
            ranks = self._ranks()
            group = TorchrunGroup(ranks, self._process(), "model", kind, compute, sharding=recipe.sharding)
            started.push(partial(_end, ranks, self.path.absolute()))
            return group
        assert isinstance(cluster, RayCluster)
        started.callback(self._backend.close)
        self.progress.print(f"starting {recipe.processes * recipe.nodes} workers")
        cpus, gpus = cluster.cpus_per_process, cluster.gpus_per_process
        pool = ResourcePool([recipe.processes] * recipe.nodes, cpus=cpus, gpus=gpus, strategy=cluster.strategy)
        start = partial(
            WorkerGroup,
            pool,
            SupervisedProcess,
            self.worker_class,
            recipe,
            self._given,
            os.getcwd(),
            name=recipe.job,
            backend=self._backend,
            start_timeout_s=cluster.start_timeout_s,
        )
        self._processes = run_async(asyncio.to_thread(start))
        return RemoteGroup(self._processes, "model", kind, sharding=recipe.sharding)

    def _ranks(self) -> TorchrunRanks:
        """Returns the processes of torchrun.

        Raises:
            UserError: they are not those of the recipe.
        """
        if self._joined is None:
            recipe, launched = self.recipe, os.environ.get("WORLD_SIZE", "none")
            if launched != str(recipe.processes * recipe.nodes):
                raise UserError(
                    "the recipe is for other processes than torchrun has started",
                    found=f"{recipe.processes} × {recipe.nodes} in the recipe, {launched} started by torchrun",
                    remedy="start it as `torchrun … -m quartet` with equally many processes on each node",
                )
            same = recipe.model_copy(update={"output_dir": None}).model_dump(mode="json")
            self._joined = TorchrunRanks(recipe.job, "gloo" if recipe.device == "cpu" else None, same)
        return self._joined

    def _process(self) -> SupervisedProcess:
        given, self._given = self._given, PassedObjects()
        return SupervisedProcess(self.worker_class, self.recipe, given, os.getcwd())

    def _serve(self, ranks: TorchrunRanks) -> TrainResult:
        """Does what every rank but the first does: its part of each call."""
        with stop_signals() as signals:
            process = self._process()
            try:
                with signals.graceful():
                    end = ranks.serve(partial(process.run_role, "model"), lambda: signals.first)
            except WorkerDied as error:
                raise self._explained(error) from error
        if end.status:
            sys.exit(end.status)
        self.path = end.value
        return TrainResult(self.path, read_json(self.path / "summary.json"), self._trained)

    async def _train(self, group: RoleGroup[W], about: SupervisedDescription, watch: Stopwatch) -> dict[str, Any]:
        failure: ClusterError | None = None
        while True:
            try:
                if failure is not None:
                    await self._start_again(failure)
                await checkpoints.check_storage(self.run, {"model": group})
                await checkpoints.lower_budgets(self.path, {"model": group})
                await self._prepare(group)
                metrics = await self._run_steps(group, about)
                warning = await group.call(SupervisedWorker.write_model, self._path_of_workers / "model")
                written = self.path / "model", adapter_path(self.path / "model")
                await checkpoints.bring_to_driver(self.run, group, *written)
                about = await group.call(SupervisedWorker.describe)  # with what was left out of rows as they were drawn
                break
            except ClusterError as error:
                if error is failure or self._processes is None:
                    raise self._explained(error) from error
                failure = error
        return self.run.finish(
            {
                "stages": [{"name": self._stage, "seconds": round(watch.seconds, 3), "metrics": metrics}],
                "notes": [*about.warnings, *self.run.warnings, *([warning] if warning else [])],
            }
        )

    async def _start_again(self, error: ClusterError) -> None:
        """Starts the processes of Ray again, where one of them died; the steps since the last checkpoint are done
        again.

        Raises:
            ClusterError: ``error``, where none died.
            UserError: they died too often.
        """
        assert self._processes is not None, "torchrun starts its ranks itself"
        self.run.check_stop(None)  # a signal that went to all processes ended them
        if not (deaths := self._processes.dead(_PATIENCE_S)):
            raise error
        self._count.note(deaths, deaths[0].report(), error)
        note_budgets(self.path, [death.smaller for death in deaths if death.smaller])
        await asyncio.to_thread(self._processes.restart)
        self.run.warning(f"{deaths[0].report()}; started anew")

    async def _prepare(self, group: RoleGroup[W]) -> None:
        """Does what goes before the first step, with the model as given, also where a checkpoint then replaces it."""

    async def _run_steps(self, group: RoleGroup[W], about: SupervisedDescription) -> dict[str, float]:
        """Trains from the newest checkpoint (or the start) to the last step; returns the last metrics."""
        run, saved, name = self.run, {"engine": group}, self._stage
        shown = {"loss": f"loss/{name}", "accuracy": f"{name}/accuracy", "held-out": self._evaluation_metric}
        step, last = 0, dict[str, float]()
        found = run.latest(list(saved), counters=("metrics",))
        if found is not None:  # a run killed between its last checkpoint and its summary has nothing left to train
            await checkpoints.load_states(saved, found)
            step, last = found.step, dict(found.info["metrics"])
        run.rewind(step)
        with self.progress.stage(name, about.steps) as bar:
            bar.advance(step)
            while step < about.steps and not run.has_stopped:
                metrics = await self._step(step, group, about)
                step += 1
                run.callbacks(Callback.on_step_end, step, metrics)
                is_last = run.is_last(step, about.steps)
                if about.num_evaluation_rows and (step % self.recipe.evaluate_every_steps == 0 or is_last):
                    with run.recorder.span("evaluate", step=step - 1):
                        held_out = await group.call(SupervisedWorker.evaluate)
                    metrics.update(held_out)
                    run.callbacks(Callback.on_evaluate, step, held_out)
                run.log(step, metrics)
                run.recorder.drop_through(step)
                last.update(metrics)
                bar.advance(1, **{label: round(last[key], 4) for label, key in shown.items() if key in last})
                if run.due(step, about.steps):
                    await checkpoints.save_checkpoint(run, saved, step, {"metrics": last})
                if run.export_is_due(step):
                    draft = run.begin_export(step)
                    await group.call(SupervisedWorker.write_model, draft / "model")
                    await checkpoints.bring_to_driver(run, group, draft)
                    run.complete_export(draft, step)
                run.check_stop(step)
        return last

    async def _step(self, step: int, group: RoleGroup[W], about: SupervisedDescription) -> dict[str, float]:
        watch = Stopwatch()
        with self.run.recorder.span("update", step=step, role=self._stage, mode="train") as span:
            metrics = await group.call(SupervisedWorker.step, step)
            span.tokens = int(metrics["tokens/useful"])
        metrics |= straggler_metrics([span])
        metrics["time/step_s"] = seconds = watch.seconds
        work = await group.call(SupervisedWorker.work)
        cluster, rows, tokens = self.recipe.cluster, about.rows_per_step, int(metrics["tokens/useful"])
        devices = 1 if cluster.type == "local" else self.recipe.processes * self.recipe.nodes
        metrics |= throughput(seconds, samples=rows, tokens=tokens, devices=devices, works={"model": work})
        metrics["data/epoch"] = (step + 1) * about.rows_per_step / about.num_rows
        return metrics

    def _explained(self, error: ClusterError) -> Exception:
        """Returns ``error``, or where a rank of torchrun's died which one that was, and how to go on."""
        if self._joined is None or not isinstance(error, WorkerDied):
            return error
        return UserError(
            "a worker of the run died",
            found=error.death.report(),
            remedy="mend what kills it, and go on from the last checkpoint with --resume",
        )

    @property
    def _stage(self) -> str:
        """The job's name in metrics and spans."""
        return self.recipe.job.replace("-", "_")

    def _trained(self) -> PreTrainedModel:
        if self._worker is not None:
            found: PreTrainedModel = self._worker.packed.model
            return found
        trust = self.recipe.model is not None and self.recipe.model.trust_remote_code
        load = load_scalar_model if self.recipe.is_scalar else load_causal_lm
        return load_saved_model(self.path / "model", partial(load, trust_remote_code=trust))


def _end(
    ranks: TorchrunRanks,
    path: Path,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Ends the other processes of torchrun as this one ends; one that is stopped at once is gone by itself."""
    if error is None or isinstance(error, Exception):
        failed = 2 if isinstance(error, UserError) else 1
        status = 0 if error is None else error.exit_status if isinstance(error, Interrupted) else failed
        ranks.end(LastMessage(status, path))


_ROWS_PER_PASS = 256


class SFTWorker(SupervisedWorker[SFTRecipe, SFTData]):
    """Trains a causal LM to imitate demonstrations."""

    objective = SFTObjective()
    _rows_key = "examples_per_step"

    def _longest(self) -> int:
        return int(self.data.lengths.max())

    def _measure(self, data: SFTData) -> dict[str, float]:
        total = count = 0.0
        rows = _ROWS_PER_PASS * self.engine.num_ranks
        forward = partial(self.engine.forward, needs=ForwardNeeds(logprobs=True))
        for batch, found in self.engine.in_shares(data.in_parts(rows), forward):
            mask, logprobs = batch.token["loss_mask"], found.token["logprobs"]
            total -= float(logprobs[mask].to(torch.float64).sum())
            count += float(mask.sum())
        return {"eval/loss": total / count, "sft/perplexity": math.exp(min(50.0, total / count))}


class SFTTrainer(SupervisedTrainer[SFTRecipe, SFTWorker]):
    """Trains a causal LM to imitate demonstrations; only the demonstrator's tokens carry loss.

    Arguments as for ``SupervisedTrainer``; rows have ``prompt`` and ``completion``, ``messages``, ``text`` or
    ``input_ids``. Held-out figures: ``eval/loss`` in nats per token, and its exponential, ``sft/perplexity``.
    """

    recipe_class = SFTRecipe
    worker_class = SFTWorker
    _evaluation_metric = "eval/loss"


_PAIRS_PER_PASS = 128


class RewardModelWorker(SupervisedWorker[RewardModelRecipe, PreferenceData]):
    """Trains a scalar head to prefer chosen over rejected answers."""

    _rows_key = "pairs_per_step"

    @property
    def objective(self) -> PairwiseObjective:
        return PairwiseObjective(self.recipe.centring, self.recipe.margin_scale)

    def _longest(self) -> int:
        return longest_group(self.data, share=self._shares_prompts)

    def _measure(self, data: PreferenceData) -> dict[str, float]:
        chosen, rejected = score_pairs(self.engine, data)
        return {
            "eval/accuracy": float((chosen > rejected).double().mean()),
            "eval/longer_answer_accuracy": longer_answer_accuracy(data),
            "eval/margin": float((chosen - rejected).double().mean()),
            "eval/offset": float(torch.cat([chosen, rejected]).double().mean()),
        }


class RewardModelTrainer(SupervisedTrainer[RewardModelRecipe, RewardModelWorker]):
    """Trains a scalar head on a causal LM's body (or goes on with a reward model) to prefer chosen over rejected.

    Arguments as for ``SupervisedTrainer``; rows have ``prompt``, ``chosen``, ``rejected`` and, if they have one,
    ``margin``. Held-out figures: ``eval/accuracy``, the share of pairs whose chosen side scores strictly higher;
    beside it ``eval/longer_answer_accuracy``, what
    one would get by calling the answer of more tokens the better one; ``eval/margin``, the mean difference;
    ``eval/offset``, the mean score of both sides, which centring keeps near 0.
    """

    recipe_class = RewardModelRecipe
    worker_class = RewardModelWorker


def longer_answer_accuracy(data: PreferenceData) -> float:
    """Returns the share of pairs whose chosen answer has more tokens; equal lengths count half."""
    chosen_P, rejected_P = data.lengths[:, 1], data.lengths[:, 2]
    return float((chosen_P > rejected_P).sum() + 0.5 * (chosen_P == rejected_P).sum()) / len(data)


def score_pairs(engine: TrainEngine[Any], data: PreferenceData) -> tuple[Tensor, Tensor]:
    """Returns the scores ``[P]`` of the chosen and the rejected sides; collective."""
    batches = data.in_parts(_PAIRS_PER_PASS * engine.num_ranks)
    scored = engine.in_shares(batches, partial(engine.forward, needs=ForwardNeeds(scores=True)))
    both = torch.cat([found.sequence["scores"] for _, found in scored]).view(-1, 2)
    return both[:, 0], both[:, 1]
