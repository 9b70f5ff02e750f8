"""What the jobs without sampling share: a run from its recipe to its summary.

``train`` → ``SupervisedLoop.run`` → ``SupervisedWorker.step`` → ``TrainEngine.train_step``
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

from transformers import PreTrainedModel

from quartet.cluster import ClusterError
from quartet.config import UserError
from quartet.config.supervised import SupervisedRecipe
from quartet.models.loading import load_trained
from quartet.observe.progress import Progress
from quartet.schedule.compute_thread import ComputeThread
from quartet.schedule.role_group import LocalGroup, RoleGroup
from quartet.trainers import checkpoints
from quartet.trainers.devices import compute_device, resolved
from quartet.trainers.event_loop import run_async
from quartet.trainers.run import RunDirectory, Stopwatch, software_versions, use_threads
from quartet.trainers.run_files import Resume, output_path
from quartet.trainers.sources import ModelLike, TokenizerLike, check_recipe, with_names
from quartet.trainers.supervised import SupervisedLoop
from quartet.trainers.supervised_processes import SupervisedProcesses
from quartet.trainers.supervised_worker import Given, SupervisedDescription, SupervisedWorker

R = TypeVar("R", bound=SupervisedRecipe)
W = TypeVar("W", bound=SupervisedWorker[Any, Any, Any])


class SupervisedResult:
    """Where the run is, and what ``summary.json`` holds.

    Args:
        trained: gives the trained model.
    """

    def __init__(self, path: Path, summary: dict[str, Any], trained: Callable[[], PreTrainedModel]) -> None:
        self.path = path
        self.summary = summary
        self._trained = trained

    @cached_property
    def model(self) -> PreTrainedModel:
        """The trained model: the object trained in this process, or what a worker wrote, loaded when first asked for.

        Raises:
            UserError: what a worker wrote is not there any more, or only its adapters were saved.
        """
        return self._trained()


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
    _held_out_figure: ClassVar[str] = "eval/accuracy"
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
        use_threads(recipe.threads)
        recipe, passed, own = with_names(recipe, model, tokenizer)
        self.recipe = recipe
        self.path = output_path(recipe.output_dir, recipe.job, resume)
        self.progress = progress if progress is not None else Progress()
        device = compute_device(recipe, passed)
        record = resolved(recipe, device)
        self.run = RunDirectory(self.path, recipe, resume=resume, tell=self.progress.print, resolved=record)
        given = Given(passed, own, rows, evaluation_rows, self._reference)
        self._worker: W | None = None
        self._processes: SupervisedProcesses | None = None
        if recipe.cluster.type == "ray":
            self._processes = SupervisedProcesses(self.worker_class, recipe, given)
        else:
            self._worker = cast(W, self.worker_class(recipe, given, device))

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

    # The run -----------------------------------------------------------------------------------------------

    def train(self) -> SupervisedResult:
        """Runs to the last step; ``model/`` is then a plain Hugging Face directory.

        Raises:
            Interrupted: Ctrl-C, SIGTERM or SIGUSR1; saved, and resumable.
            UserError: a worker died, the disk is full, …; ``resume`` goes on from the last checkpoint.
        """
        watch = Stopwatch()
        with contextlib.ExitStack() as started:
            group = self._start(started)
            about = run_async(group.call(SupervisedWorker.describe))
            for remark in about.remarks:
                self.progress.print(remark)
            with self.run.stoppable(), self.run:
                summary = run_async(self._train(group, about, watch))
        return SupervisedResult(self.path, summary, self._trained)

    def _start(self, started: contextlib.ExitStack) -> RoleGroup[W]:
        """The workers, until ``started`` closes."""
        if self._processes is None:
            compute = ComputeThread()
            started.callback(self.worker.release)
            started.callback(compute.close)
            return LocalGroup(self.worker, compute)
        started.callback(self._processes.close)
        self.progress.print(f"starting {self.recipe.processes * self.recipe.nodes} workers")
        return run_async(asyncio.to_thread(self._processes.start))

    async def _train(self, group: RoleGroup[W], about: SupervisedDescription, watch: Stopwatch) -> dict[str, Any]:
        name = self.recipe.job.replace("-", "_")
        figures = {"loss": f"loss/{name}", "accuracy": f"{name}/accuracy", "held-out": self._held_out_figure}
        loop = SupervisedLoop(name, group, about, self.recipe.evaluate_every_steps, figures)
        try:
            await checkpoints.check_storage(self.run, {"model": group})
            await self._prepare(group)
            metrics = await loop.run(self.run, self.progress)
            warning = await group.call(SupervisedWorker.write_model, self._path_of_workers / "model")
        except ClusterError as error:
            self.run.check_stop(None)  # a signal that went to all processes ended them
            assert self._processes is not None
            raise self._processes.explained(error) from error
        summary = {
            "job": self.run.job,
            "seed": self.recipe.seed,
            "versions": software_versions(),
            "stages": [{"name": name, "seconds": round(watch.seconds, 3), "metrics": metrics}],
            "notes": [*about.remarks, *self.run.remarks, *([warning] if warning else [])],
        }
        self.run.finish(summary)
        return summary

    async def _prepare(self, group: RoleGroup[W]) -> None:
        """Does what goes before the first step, while the model is still as it was given, also where a checkpoint then
        takes its place."""

    @property
    def _path_of_workers(self) -> Path:
        """The run's directory; one in another process may be in another directory itself."""
        return self.path if self._worker is not None else self.path.absolute()

    def _trained(self) -> PreTrainedModel:
        if self._worker is not None:
            found: PreTrainedModel = self._worker.packed.model
            return found
        return load_trained(self.path / "model", self.worker_class.load_written)
