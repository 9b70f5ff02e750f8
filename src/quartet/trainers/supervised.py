"""Jobs without sampling: SFT, preferences, reward models and process reward models.

``train`` → ``_run_steps`` → ``SupervisedWorker.step`` → ``TrainEngine.train_step``. The worker has model, optimizer and
rows, in this process or in several of Ray::

    SupervisedWorker ─┬─ CausalWorker ─┬─ SFTWorker
                      │                └─ PreferenceWorker
                      └─ ScalarWorker ─┬─ RewardModelWorker
                                       └─ ProcessRewardWorker
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from quartet.batch.ragged import RaggedBatch
from quartet.cluster import ClusterError, ResourcePool, WorkerGroup, connect
from quartet.cluster.dispatch import RANK_ZERO, dispatch
from quartet.config import UserError
from quartet.config.cluster import RayCluster
from quartet.config.common import DataConfig
from quartet.config.supervised import SupervisedRecipe
from quartet.data.datasets import Batches
from quartet.data.order import steps_for
from quartet.models.loading import (
    load_causal_lm,
    load_scalar_model,
    load_trained,
    packed_causal_lm,
    packed_scalar_model,
    seen_tokens,
)
from quartet.models.packed_model import PackedCausalLM, PackedModel, PackedScalarModel
from quartet.observe.progress import Progress
from quartet.schedule.compute_thread import ComputeThread
from quartet.schedule.model_worker import Described, TrainWorker
from quartet.schedule.role_group import LocalGroup, RemoteGroup, RoleGroup, RolesWorker
from quartet.text.tokenizer import TextCodec, check_vocabulary
from quartet.train.data_parallel import DataParallelGroup
from quartet.train.engine import Objective, TrainEngine
from quartet.trainers import checkpoints
from quartet.trainers.devices import enter_process, precision_on, worker_device
from quartet.trainers.event_loop import run_async
from quartet.trainers.run import Stopwatch, TrainResult, open_run
from quartet.trainers.run_files import Resume
from quartet.trainers.signals import take_back_signals
from quartet.trainers.sources import (
    ModelLike,
    Reader,
    TokenizerLike,
    check_budget,
    check_recipe,
    context_length,
    read_data,
    resolve_model,
    resolve_scalar_model,
    resolve_tokenizer,
    vocabulary_size,
    with_names,
)

R = TypeVar("R", bound=SupervisedRecipe)
D = TypeVar("D", bound=Batches)
P = TypeVar("P", bound=PackedModel)
W = TypeVar("W", bound="SupervisedWorker[Any, Any, Any]")
_PATIENCE_S = 5.0
"""So long a worker may take to say that it lives; one that is busy counts as living."""


@dataclass(frozen=True)
class Given:
    """What Python code passes in place of what a recipe names. Copies of it go to workers in other processes."""

    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    rows: Sequence[Any] | None = None
    evaluation_rows: Sequence[Any] | None = None
    reference: PreTrainedModel | None = None


@dataclass(frozen=True)
class SupervisedDescription(Described):
    """What a worker says of its model and its rows.

    Attributes:
        num_rows: to train on.
        has_evaluation: there are held-out rows.
    """

    steps: int
    num_rows: int
    rows_per_step: int
    has_evaluation: bool


class SupervisedWorker(TrainWorker, Generic[R, D, P]):
    """Trains one model on rows. Of several, each reads all rows and computes its share of every update.

    A job's class says what it reads, minimises and measures; ``CausalWorker`` and ``ScalarWorker`` say which kind of
    model it trains.

    Args:
        device: where the model goes.
        dp_group: the workers that train it together; None for this one alone.

    Raises:
        UserError: the recipe, the data or the objects do not fit together.
    """

    packed: P
    load_written: ClassVar[Callable[..., PreTrainedModel]]
    """Loads what ``write_model`` has written."""
    _pack: ClassVar[Callable[..., Any]]
    """Takes a model over for packed runs."""
    _rows_key: ClassVar[str]
    """Key of the recipe that says how many rows make a step."""

    def __init__(
        self, recipe: R, given: Given, device: torch.device, dp_group: DataParallelGroup | None = None
    ) -> None:
        self.recipe = recipe
        self.device = device
        text = resolve_tokenizer(recipe.model, given.tokenizer)
        found, generation = self._resolve(given.model)
        check_vocabulary(text, vocabulary_size(found))
        self.codec = TextCodec.of(text, generation)
        context = context_length(found)
        self.data = self._read("data", recipe.data, given.rows, context)
        self.evaluation: D | None = None
        if recipe.evaluation_data is not None or given.evaluation_rows is not None:
            self.evaluation = self._read("evaluation_data", recipe.evaluation_data, given.evaluation_rows, context)
        self.steps = recipe.steps or steps_for(recipe.epochs, len(self.data), self._rows_per_step)
        train = recipe.train
        with contextlib.ExitStack() as taken:
            # Where something does not fit after all, the model is given back as it was.
            self.packed = self._pack(
                found.to(device),
                precision=precision_on(device, train.precision),
                activation_checkpointing=train.activation_checkpointing,
                lora=train.lora,
                seed=recipe.seed,
            )
            taken.callback(self.packed.release)
            check_budget(self._longest(), train.token_budget, "train.token_budget")
            super().__init__(TrainEngine(self.packed, train, total_steps=self.steps, dp_group=dp_group))
            self._begin(given)
            taken.pop_all()

    def _begin(self, given: Given) -> None:
        """Takes what else a job needs, once model and data are there."""

    def release(self) -> None:
        """Gives the models back as they were."""
        self.packed.release()

    @property
    @abstractmethod
    def objective(self) -> Objective:
        """What every update minimises."""

    @property
    @abstractmethod
    def reader(self) -> Reader[D]:
        """Of the job's kind of rows."""

    def _read(self, key: str, config: DataConfig | None, rows: Sequence[Any] | None, context: int) -> D:
        """The rows of ``key`` in the recipe, or those passed, as tokens."""
        return read_data(config, rows, self.codec, context, key, self.reader)

    @abstractmethod
    def _longest(self) -> int:
        """Most tokens that have to stay in one micro-batch."""

    @abstractmethod
    def _measure(self, data: D) -> dict[str, float]:
        """Figures of held-out rows, ``eval/…``."""

    def _batch(self, step: int) -> RaggedBatch:
        """The batch of a step, a pure function of it, so that a resumed run sees the same data."""
        return self.data.batch(step, self._rows_per_step, self.recipe.seed)

    @property
    def _rows_per_step(self) -> int:
        return int(getattr(self.recipe, self._rows_key))

    @property
    def _shares_prompts(self) -> bool:
        """A prompt is computed once for all of its answers."""
        return self.packed.shares_prefixes and self.recipe.train.share_prefixes

    @abstractmethod
    def _resolve(self, model: PreTrainedModel | None) -> tuple[PreTrainedModel, GenerationConfig | None]:
        """The model to train, and the generation config that names its end-of-text ids, where there is one."""

    def _seen(self) -> torch.Tensor:
        """``[V]`` bool: the tokens that occur in the data; none where the export does not ask."""
        return torch.zeros(0, dtype=torch.bool)

    @dispatch(RANK_ZERO)
    def describe(self) -> SupervisedDescription:
        warnings = [f"data: {warning}" for warning in self.data.warnings]
        if self.evaluation is not None:
            warnings += [f"held-out data: {warning}" for warning in self.evaluation.warnings]
        model = super().describe()
        return SupervisedDescription(
            warnings=(*warnings, *model.warnings),
            shares_prefixes=model.shares_prefixes,
            steps=self.steps,
            num_rows=len(self.data),
            rows_per_step=self._rows_per_step,
            has_evaluation=self.evaluation is not None,
        )

    def step(self, step: int) -> dict[str, float]:
        """Makes the update of step ``step``, from 0; returns its figures by the names under which they are logged."""
        engine = self.engine
        with engine.reporting_failures():
            batch = self._batch(step)
        found = engine.train_step(batch, self.objective)
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

    @dispatch(RANK_ZERO)
    def evaluate(self) -> dict[str, float]:
        """Figures of the held-out rows, as they are logged.

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

    @dispatch(RANK_ZERO)
    def write_model(self, path: Path) -> str | None:
        """As ``export``, with the tokenizer that the job has."""
        return self.export(path, self.codec.tokenizer, self._seen(), self.codec.eos_ids)


class CausalWorker(SupervisedWorker[R, D, PackedCausalLM]):
    """Trains a causal LM, in place."""

    load_written = staticmethod(load_causal_lm)
    _pack = staticmethod(packed_causal_lm)

    def _resolve(self, model: PreTrainedModel | None) -> tuple[PreTrainedModel, GenerationConfig | None]:
        found = resolve_model(self.recipe.model, model, load_causal_lm, "model")
        return found, found.generation_config


class ScalarWorker(SupervisedWorker[R, D, PackedScalarModel]):
    """Trains a scalar head on a causal LM's body, which is copied, or goes on with a sequence-classification model with
    one label, in place.
    """

    load_written = staticmethod(load_scalar_model)
    _pack = staticmethod(packed_scalar_model)

    def _resolve(self, model: PreTrainedModel | None) -> tuple[PreTrainedModel, GenerationConfig | None]:
        return resolve_scalar_model(self.recipe.model, model, seed=self.recipe.seed)

    def _seen(self) -> torch.Tensor:
        items = [*self.data.items, *(self.evaluation.items if self.evaluation is not None else ())]
        ids = (torch.tensor(ids) for item in items for ids in item.parts)
        return seen_tokens(vocabulary_size(self.packed.model), ids)


class SupervisedProcess(RolesWorker):
    """A process of Ray with one worker, ``model``, which loads the model and reads the rows.

    Args:
        kind: of the worker.
        directory: of the driver; paths of the recipe begin there, where a node has it.
    """

    def __init__(
        self, kind: type[SupervisedWorker[Any, Any, Any]], recipe: SupervisedRecipe, given: Given, directory: str
    ) -> None:
        dp_group = enter_process(self, recipe, directory, is_group=self.world_size > 1)
        self.roles = {"model": kind(recipe, given, worker_device(self.device, recipe), dp_group)}


class SupervisedTrainer(Generic[R, W]):
    """A job without sampling: trains, evaluates, exports.

    Args:
        recipe: the run. What it leaves out comes as objects:
        model, tokenizer: what is trained, in place (on Ray copies are), and its tokenizer; objects, or paths or hub
            names. An object stays on its device unless the recipe names another.
        rows, evaluation_rows: mappings, with the columns that the job reads from files.
        resume: go on with the run in ``recipe.output_dir``; ``auto``: or start it, without a word.

    Raises:
        UserError: the recipe, the data or the objects do not fit together; nothing has been written then. On Ray
            ``train`` raises it, once workers have loaded them.
    """

    recipe_class: ClassVar[type[SupervisedRecipe]]
    worker_class: ClassVar[type[SupervisedWorker[Any, Any, Any]]]
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
        resume: Resume = False,
        progress: Progress | None = None,
    ) -> None:
        check_recipe(recipe, self.recipe_class)
        recipe, passed, own = with_names(recipe, model, tokenizer)
        self.recipe = recipe
        self.run, self.progress, device = open_run(recipe, resume, progress, passed)
        self.path = self.run.path
        # A worker in another process may be in another directory itself.
        self._path_of_workers = self.path if recipe.cluster.type == "local" else self.path.absolute()
        self._given = Given(passed, own, rows, evaluation_rows, self._reference)
        self._worker: W | None = None
        self._processes: WorkerGroup | None = None
        if recipe.cluster.type == "ray":
            self._backend = connect("ray", address=recipe.cluster.address)
            take_back_signals()
        else:
            self._worker = cast(W, self.worker_class(recipe, self._given, device))
            self._given = Given()  # the worker gives them back; kept here, too, they would stay in memory to the end

    @property
    def worker(self) -> W:
        """What trains, where that is this process.

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
        """Figures of the held-out rows, as they are logged.

        Raises:
            UserError: there are none, or they are in processes of Ray.
        """
        return self.worker.evaluate()

    def train(self) -> TrainResult:
        """Runs to the last step; ``model/`` is then a plain Hugging Face directory.

        Raises:
            Interrupted: Ctrl-C, SIGTERM or SIGUSR1; saved, and resumable.
            UserError: a worker died, the disk is full, …; ``resume`` goes on from the last checkpoint.
        """
        watch = Stopwatch()
        with contextlib.ExitStack() as started:
            group = self._start(started)
            about = run_async(group.call(SupervisedWorker.describe))
            for warning in about.warnings:
                self.progress.print(warning)
            with self.run.stoppable(), self.run:
                summary = run_async(self._train(group, about, watch))
        return TrainResult(self.path, summary, self._trained)

    def _start(self, started: contextlib.ExitStack) -> RoleGroup[W]:
        """The workers, until ``started`` closes; on Ray one process per device, each with a copy of the model.

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
        assert isinstance(cluster, RayCluster)
        started.callback(self._backend.close)
        self.progress.print(f"starting {recipe.processes * recipe.nodes} workers")
        cpus, gpus = cluster.cpus_per_process, cluster.gpus_per_process
        pool = ResourcePool([recipe.processes] * recipe.nodes, cpus=cpus, gpus=gpus, strategy=cluster.strategy)
        start = partial(
            WorkerGroup,
            *(pool, SupervisedProcess, self.worker_class, recipe, self._given, os.getcwd()),
            name=recipe.job,
            backend=self._backend,
            start_timeout_s=cluster.start_timeout_s,
        )
        self._processes = run_async(asyncio.to_thread(start))
        return RemoteGroup(self._processes, "model", cast(type[W], self.worker_class))

    async def _train(self, group: RoleGroup[W], about: SupervisedDescription, watch: Stopwatch) -> dict[str, Any]:
        try:
            await checkpoints.check_storage(self.run, {"model": group})
            await self._prepare(group)
            metrics = await self._run_steps(group, about)
            warning = await group.call(SupervisedWorker.write_model, self._path_of_workers / "model")
        except ClusterError as error:
            self.run.check_stop(None)  # a signal that went to all processes ended them
            raise self._explained(error) from error
        return self.run.finish(
            {
                "stages": [{"name": self._stage, "seconds": round(watch.seconds, 3), "metrics": metrics}],
                "notes": [*about.warnings, *self.run.warnings, *([warning] if warning else [])],
            }
        )

    async def _prepare(self, group: RoleGroup[W]) -> None:
        """Does what goes before the first step, with the model as given, also where a checkpoint then replaces it."""

    async def _run_steps(self, group: RoleGroup[W], about: SupervisedDescription) -> dict[str, float]:
        """Trains from the newest checkpoint (or the start) to the last step; returns the last metrics."""
        run, saved, name = self.run, {"engine": group}, self._stage
        shown = {"loss": f"loss/{name}", "accuracy": f"{name}/accuracy", "held-out": self._evaluation_metric}
        step, last = 0, dict[str, float]()
        found = run.latest(list(saved), counters=("metrics",))
        if found is not None:  # a run killed between its last checkpoint and its summary has nothing left to train
            await checkpoints.load(saved, found)
            step, last = found.step, dict(found.info["metrics"])
        run.start(step)
        with self.progress.stage(name, about.steps) as bar:
            bar.advance(step)
            while step < about.steps:
                metrics = await self._step(step, group, about)
                step += 1
                if about.has_evaluation and (step % self.recipe.evaluate_every_steps == 0 or step == about.steps):
                    with run.recorder.span("evaluate", step=step - 1):
                        metrics.update(await group.call(SupervisedWorker.evaluate))
                run.tracker.log(step, metrics)
                run.recorder.drop_through(step)
                last.update(metrics)
                bar.advance(1, **{label: round(last[key], 4) for label, key in shown.items() if key in last})
                if run.due(step, about.steps):
                    await checkpoints.save(run, saved, step, {}, {"metrics": last})
                run.check_stop(step)
        return last

    async def _step(self, step: int, group: RoleGroup[W], about: SupervisedDescription) -> dict[str, float]:
        watch = Stopwatch()
        with self.run.recorder.span("update", step=step, role=self._stage, mode="train") as span:
            metrics = await group.call(SupervisedWorker.step, step)
            span.tokens = int(metrics["tokens/useful"])
        metrics["time/step_s"] = watch.seconds
        metrics["data/epoch"] = (step + 1) * about.rows_per_step / about.num_rows
        return metrics

    def _explained(self, error: ClusterError) -> Exception:
        """``error``, or where a worker died which one that was and of what, and how to go on."""
        deaths = self._processes.dead(_PATIENCE_S) if self._processes is not None else []
        if not deaths:
            return error
        last = deaths[0].last_error or "it left no error, so it was killed from outside"
        return UserError(
            "a worker of the run died",
            found=f"{deaths[0].brief()}: {last}",
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
        return load_trained(self.path / "model", self.worker_class.load_written)
