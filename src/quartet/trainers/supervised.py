"""The loop that all training without sampling shares: batches by step, updates, evaluation, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from quartet.batch.ragged import RaggedBatch
from quartet.observe.progress import Progress
from quartet.schedule.checkpointed import Checkpointed
from quartet.schedule.model_worker import TrainWorker
from quartet.schedule.role_group import LocalGroup, RoleGroup
from quartet.train.engine import Objective, TrainEngine
from quartet.trainers import checkpoints
from quartet.trainers.event_loop import run_async
from quartet.trainers.run import RunDirectory, Stopwatch, software_versions, writing


@dataclass(frozen=True)
class SupervisedLoop:
    """One supervised stage.

    Args:
        batch: ``step → batch``, a pure function, so a resumed run sees the same data.
        evaluate: held-out metrics, or None without held-out data.
        figures: metric names shown beside the progress bar, by label.
        prepare: what has to be done before the first step, while the model is still as it was given, also where a
            checkpoint then takes its place.
    """

    name: str
    engine: TrainEngine[Any]
    objective: Objective
    batch: Callable[[int], RaggedBatch]
    steps: int
    evaluate: Callable[[], Mapping[str, float]] | None
    evaluate_every: int
    num_rows: int
    rows_per_step: int
    figures: Mapping[str, str]
    prepare: Callable[[RunDirectory, Progress], None] | None = None

    def run(self, run: RunDirectory, progress: Progress) -> dict[str, float]:
        """Trains from the newest checkpoint (or the start) to the last step; returns the last metrics."""
        if self.prepare is not None:
            self.prepare(run, progress)
        step, saved = self._restore(run)
        run.start(step)
        last: dict[str, float] = {}
        with progress.stage(self.name, self.steps) as bar:
            bar.advance(step)
            while step < self.steps:
                metrics = self._step(step, run)
                step += 1
                if self.evaluate is not None and (step % self.evaluate_every == 0 or step == self.steps):
                    with run.recorder.span("evaluate", step=step - 1):
                        metrics.update(self.evaluate())
                run.tracker.log(step, metrics)
                run.recorder.drop_through(step)
                last.update(metrics)
                bar.advance(1, **{k: round(last[v], 4) for k, v in self.figures.items() if v in last})
                if run.due(step, self.steps):
                    run_async(checkpoints.save(run, self._workers, step, {}, {"metrics": last}))
                run.check_stop(step)
        # A run killed between its last checkpoint and its summary has nothing left to train.
        return last or saved

    def _step(self, step: int, run: RunDirectory) -> dict[str, float]:
        watch = Stopwatch()
        batch = self.batch(step)
        with run.recorder.span("update", step=step, role=self.name, mode="train", tokens=batch.num_tokens):
            found = self.engine.train_step(batch, self.objective)
        metrics = {name: value for name, value in found.items() if name not in ("lr", "grad_norm", "skipped")}
        metrics.update(
            {
                "optim/lr": found["lr"],
                "optim/grad_norm": found["grad_norm"],
                "optim/skipped_steps": float(self.engine.num_skipped),
                "train/token_budget": float(self.engine.budget.tokens),
                "train/num_oom": float(self.engine.num_oom),
                "tokens/useful": float(batch.num_tokens),
                "time/step_s": watch.seconds,
                "data/epoch": (step + 1) * self.rows_per_step / self.num_rows,
            }
        )
        return metrics

    def _restore(self, run: RunDirectory) -> tuple[int, dict[str, float]]:
        """Complete steps, and their last metrics."""
        found = run.latest(list(self._workers), counters=("metrics",))
        if found is None:
            return 0, {}
        run_async(checkpoints.load(self._workers, found))
        return found.step, dict(found.info["metrics"])

    @cached_property
    def _workers(self) -> dict[str, RoleGroup[Checkpointed]]:
        return {"engine": LocalGroup(TrainWorker(self.engine))}


def run_supervised(
    loop: SupervisedLoop,
    run: RunDirectory,
    progress: Progress,
    remarks: Sequence[str],
    export: Callable[[Path], str | None],
) -> dict[str, Any]:
    """The whole of a supervised job: loop, export to ``model/``, summary. The model is given back however it ends.

    Args:
        remarks: what was left out of the data or converted, printed first and kept as notes.
        export: writes the model directory; returns a warning or None.

    Returns:
        What ``summary.json`` holds.
    """
    watch = Stopwatch()
    notes = [*remarks, *loop.engine.remarks]
    for note in notes:
        progress.print(note)
    with run.stoppable(), run:
        try:
            metrics = loop.run(run, progress)
            with writing(run.path / "model"):
                warning = export(run.path / "model")
        finally:
            loop.engine.packed.release()
        summary = {
            "job": run.job,
            "seed": run.recipe.seed,
            "versions": software_versions(),
            "stages": [{"name": loop.name, "seconds": round(watch.seconds, 3), "metrics": metrics}],
            "notes": notes + run.remarks + ([warning] if warning else []),
        }
        run.finish(summary)
    return summary
