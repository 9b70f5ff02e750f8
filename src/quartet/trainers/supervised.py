"""The loop that all training without sampling shares: updates by step, evaluation, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quartet.observe.progress import Progress
from quartet.schedule.role_group import RoleGroup
from quartet.trainers import checkpoints
from quartet.trainers.run import RunDirectory, Stopwatch
from quartet.trainers.supervised_worker import SupervisedDescription, SupervisedWorker


@dataclass(frozen=True)
class SupervisedLoop:
    """One supervised stage.

    Args:
        group: the workers that train.
        about: what they say of their model and rows.
        figures: metric names shown beside the progress bar, by label.
    """

    name: str
    group: RoleGroup[SupervisedWorker[Any, Any, Any]]
    about: SupervisedDescription
    evaluate_every: int
    figures: Mapping[str, str]

    async def run(self, run: RunDirectory, progress: Progress) -> dict[str, float]:
        """Trains from the newest checkpoint (or the start) to the last step; returns the last metrics."""
        about = self.about
        step, saved = await self._restore(run)
        run.start(step)
        last: dict[str, float] = {}
        with progress.stage(self.name, about.steps) as bar:
            bar.advance(step)
            while step < about.steps:
                metrics = await self._step(step, run)
                step += 1
                if about.has_evaluation and (step % self.evaluate_every == 0 or step == about.steps):
                    with run.recorder.span("evaluate", step=step - 1):
                        metrics.update(await self.group.call(SupervisedWorker.evaluate))
                run.tracker.log(step, metrics)
                run.recorder.drop_through(step)
                last.update(metrics)
                bar.advance(1, **{k: round(last[v], 4) for k, v in self.figures.items() if v in last})
                if run.due(step, about.steps):
                    await checkpoints.save(run, self._saved, step, {}, {"metrics": last})
                run.check_stop(step)
        # A run killed between its last checkpoint and its summary has nothing left to train.
        return last or saved

    async def _step(self, step: int, run: RunDirectory) -> dict[str, float]:
        watch = Stopwatch()
        with run.recorder.span("update", step=step, role=self.name, mode="train") as span:
            metrics = await self.group.call(SupervisedWorker.step, step)
            span.tokens = int(metrics["tokens/useful"])
        metrics["time/step_s"] = watch.seconds
        metrics["data/epoch"] = (step + 1) * self.about.rows_per_step / self.about.num_rows
        return metrics

    async def _restore(self, run: RunDirectory) -> tuple[int, dict[str, float]]:
        """Complete steps, and their last metrics."""
        found = run.latest(list(self._saved), counters=("metrics",))
        if found is None:
            return 0, {}
        await checkpoints.load(self._saved, found)
        return found.step, dict(found.info["metrics"])

    @property
    def _saved(self) -> checkpoints.Workers:
        return {"engine": self.group}
