"""Jobs without sampling: SFT, preferences, reward models and process reward models.

``train`` → ``_run_steps`` → ``SupervisedWorker.step`` (``supervised_worker.py``) → ``TrainEngine.train_step``
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Generic, TypeVar, cast

from transformers import PreTrainedModel

from quartet.cluster import ClusterError, ResourcePool, WorkerDied, WorkerGroup, connect
from quartet.cluster.ranks import End, Ranks
from quartet.config import Interrupted, UserError
from quartet.config.cluster import RayCluster
from quartet.config.supervised import SupervisedRecipe
from quartet.models.directories import on_meta
from quartet.models.loading import adapter_path, load_trained, outlined
from quartet.models.packed_model import PackedCausalLM, PackedScalarModel
from quartet.observe.callbacks import Callback
from quartet.observe.health import straggler_metrics
from quartet.observe.progress import Progress
from quartet.schedule.compute_thread import ComputeThread
from quartet.schedule.role_group import LocalGroup, RankGroup, RemoteGroup, RoleGroup
from quartet.train.parallel.layer_plan import check_cut
from quartet.trainers import checkpoints
from quartet.trainers.event_loop import run_async
from quartet.trainers.input_sources import (
    ModelLike,
    TokenizerLike,
    check_recipe,
    with_names,
)
from quartet.trainers.results import TrainResult
from quartet.trainers.run import Stopwatch, open_run
from quartet.trainers.run_files import Resume, read_json
from quartet.trainers.signals import stop_signals, take_back_signals
from quartet.trainers.supervised_worker import Given, SupervisedDescription, SupervisedProcess, SupervisedWorker
from quartet.trainers.throughput import throughput

R = TypeVar("R", bound=SupervisedRecipe)
W = TypeVar("W", bound=SupervisedWorker[Any, Any, Any])
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
        callbacks: Sequence[Callback] = (),
        resume: Resume = False,
        progress: Progress | None = None,
    ) -> None:
        check_recipe(recipe, self.recipe_class)
        recipe, passed, own = with_names(recipe, model, tokenizer)
        self.run, self.progress, device = open_run(recipe, resume, progress, passed, callbacks)
        self.recipe = recipe = self.run.pin(recipe)
        self.path = self.run.path
        # A worker in another process may be in another directory itself.
        self._path_of_workers = self.path if recipe.cluster.type == "local" else self.path.absolute()
        self._given = Given(passed, own, rows, evaluation_rows, self._reference)
        self._worker: W | None = None
        self._processes: WorkerGroup | None = None
        self._joined: Ranks | None = None
        if recipe.cluster.type == "ray":
            self._check_cuts()
            self._backend = connect(recipe.cluster.address)
            take_back_signals()
        elif recipe.cluster.type == "local":
            self._worker = cast(W, self.worker_class(recipe, self._given, device))
            self._given = Given()  # the worker gives them back; kept here, too, they would stay in memory to the end

    def _check_cuts(self) -> None:
        """Before any process starts; of models that other machines alone have, the workers do it.

        Raises:
            UserError: a model cannot be cut as the recipe says.
        """
        recipe = self.recipe
        for config, passed in self._models() if recipe.sharding.copy_size > recipe.sharding.shard else ():
            path, trust = (config.path, config.trust_remote_code) if config is not None else (None, False)
            if passed is None and (path is None or not os.path.isdir(os.path.expanduser(path))):
                continue
            model = on_meta([passed])[0] if passed is not None else outlined(str(path), trust_remote_code=trust)
            kind = PackedScalarModel if getattr(model, "score", None) is not None else PackedCausalLM
            check_cut(kind(model), **recipe.sharding.peers)

    def _models(self) -> list[tuple[Any, PreTrainedModel | None]]:
        """Section or object of each model that processes hold between them."""
        return [(self.recipe.model, self._given.model)]

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
            SystemExit: in a process of torchrun's that is not rank 0, where that fails.
        """
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
        """The workers, until ``started`` closes; on Ray and under torchrun one process per device, each with a copy of
        the model or its share of one.

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
            group = RankGroup(ranks, self._process(), "model", kind, compute, sharding=recipe.sharding)
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

    def _ranks(self) -> Ranks:
        """The processes of torchrun.

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
            self._joined = Ranks(recipe.job, "gloo" if recipe.device == "cpu" else None, same)
        return self._joined

    def _process(self) -> SupervisedProcess:
        given, self._given = self._given, Given()
        return SupervisedProcess(self.worker_class, self.recipe, given, os.getcwd())

    def _serve(self, ranks: Ranks) -> TrainResult:
        """What every rank but the first does: its part of each call."""
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
        try:
            await checkpoints.check_storage(self.run, {"model": group})
            await self._prepare(group)
            metrics = await self._run_steps(group, about)
            warning = await group.call(SupervisedWorker.write_model, self._path_of_workers / "model")
            await checkpoints.bring(self.run, group, self.path / "model", adapter_path(self.path / "model"))
            about = await group.call(SupervisedWorker.describe)  # with what was left out of rows as they were drawn
        except ClusterError as error:
            if self._joined is None:  # torchrun has sent the signal, since a rank died
                self.run.check_stop(None)  # a signal that went to all processes ended them
            raise self._explained(error) from error
        return self.run.finish(
            {
                "stages": [{"name": self._stage, "seconds": round(watch.seconds, 3), "metrics": metrics}],
                "notes": [*about.warnings, *self.run.warnings, *([warning] if warning else [])],
                "rows": {"data": about.num_rows, "evaluation_data": about.num_evaluation_rows},
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
                skipped = int(metrics["optim/skipped_steps"])
                stuck = run.stuck(step, {"model": (step - skipped, skipped)})  # one update per step
                if run.due(step, about.steps) or stuck is not None:
                    await checkpoints.save(run, saved, step, {"metrics": last})
                if run.export_is_due(step):
                    draft = run.begin_export(step)
                    await group.call(SupervisedWorker.write_model, draft / "model")
                    await checkpoints.bring(run, group, draft)
                    run.complete_export(draft, step)
                run.check_stop(step)
                if stuck is not None:
                    run.drain()
                    raise stuck
        return last

    async def _step(self, step: int, group: RoleGroup[W], about: SupervisedDescription) -> dict[str, float]:
        watch = Stopwatch()
        with self.run.recorder.span("update", step=step, role=self._stage, mode="train") as span:
            metrics = await group.call(SupervisedWorker.step, step)
            span.tokens = int(metrics["tokens/useful"])
        metrics |= straggler_metrics([span])
        metrics["time/step_s"] = seconds = watch.seconds
        stats = await group.call(SupervisedWorker.stats)
        cluster, rows, tokens = self.recipe.cluster, about.rows_per_step, int(metrics["tokens/useful"])
        devices = 1 if cluster.type == "local" else self.recipe.processes * self.recipe.nodes
        metrics |= throughput(seconds, samples=rows, tokens=tokens, devices=devices, works={"model": stats.work})
        metrics["data/epoch"] = (step + 1) * about.rows_per_step / about.num_rows
        return metrics

    def _explained(self, error: ClusterError) -> Exception:
        """``error``, or where a worker died which one that was and of what, and how to go on."""
        deaths = self._processes.dead(_PATIENCE_S) if self._processes is not None else []
        if isinstance(error, WorkerDied) and self._joined is not None:
            deaths = [error.death]
        if not deaths:
            return error
        return UserError(
            "a worker of the run died",
            found=deaths[0].report(),
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
        return load_trained(self.path / "model", partial(self.worker_class.load_written, trust_remote_code=trust))


def _end(
    ranks: Ranks, path: Path, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """Ends the other processes of torchrun as this one ends; one that is stopped at once is gone by itself."""
    if error is None or isinstance(error, Exception):
        failed = 2 if isinstance(error, UserError) else 1
        status = 0 if error is None else error.exit_status if isinstance(error, Interrupted) else failed
        ranks.end(End(status, path))
