"""The run directory: what is in it, which process owns it, how it is resumed.

::

    run.json          job, name, date, status (running, interrupted, failed, done), versions
    recipe.yaml       the resolved recipe
    metrics.jsonl     one line per step            tensorboard/, wandb/, trackers/   what trackers keep
    spans.jsonl       when each stage ran          rollouts/      every token of every response
    checkpoints/      step_00000050/, atomic       summary.json   at the end
    exports/          step_00000050/model, if asked for
    model/, critic/   Hugging Face directories, at the end
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch
from transformers import PreTrainedModel

from quartet.cluster.group import WorkerGroup
from quartet.config import Interrupted, UserError
from quartet.config.load import dump_recipe
from quartet.config.plugins import storage_for
from quartet.config.recipe import Recipe
from quartet.config.run import TrainingRecipe
from quartet.config.strict import is_url
from quartet.observe import memory
from quartet.observe import rollouts as rollout_store
from quartet.observe.background import BackgroundWriter
from quartet.observe.callbacks import Callback, Callbacks, RunControl, build_callbacks
from quartet.observe.files import ENDED, LOCK, FileTail, replace_atomically
from quartet.observe.files import truncate_after as truncate_rows_after
from quartet.observe.health import examine_health
from quartet.observe.process import set_up_logging
from quartet.observe.progress import Progress
from quartet.observe.spans import BACKGROUND, SpanRecorder
from quartet.observe.trackers import (
    BackgroundTracker,
    JsonlTracker,
    RunInfo,
    build_trackers,
    metrics_from_row,
)
from quartet.text.loading import OLDER_MODEL
from quartet.train.checkpoint import (
    Checkpoint,
    Shares,
    checkpoint_path,
    claimed_steps,
    newest_checkpoint,
    prune_checkpoints,
    set_aside_checkpoints_after,
)
from quartet.trainers.devices import compute_device, resolved_settings, use_threads
from quartet.trainers.run_files import (
    OTHER_LENGTH,
    Resume,
    check_resumable,
    inspect_run,
    lock_run,
    naming_write_errors,
    output_path,
    pin_hub_names,
    recipe_job,
    software_versions,
    untested_torch,
    write_cards,
    write_json,
    write_models,
)
from quartet.trainers.signals import StopSignals, stop_signals

R = TypeVar("R", bound=Recipe)
CHECKPOINT, WRITER = "checkpoint", "writer"

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
"""Errors of the disk, not of the code that was writing."""
_log = logging.getLogger(__name__)


class LocalRunStorage:
    """What a run does for a store where its ``output_dir`` is a directory: nothing."""

    def check(self, resume: bool) -> dict[str, Any] | None:
        """Returns ``run.json`` of the run that is at the URL, empty where there is none; None: the directory here
        decides.

        Raises:
            UserError: the URL holds another run, or cannot be read.
        """
        return None

    def restore(self, resume: bool) -> None:
        """Brings what a run needs to go on to this machine; the run's lock is held."""

    def claim(self) -> None:
        """Makes this process the one that may write there, and begins to upload."""

    def saved(self) -> None:
        """Takes note of a new checkpoint, or of a stage that has ended. Raises UserError where another process has gone
        on."""

    def finish(self, failure: BaseException | None) -> BaseException | None:
        """Waits until everything is uploaded. Returns ``failure``, the run's own, or else what is wrong with that."""
        return failure

    # For machines that do not see the run's directory; files come from there and go there through the store.

    def join(self, groups: Sequence[WorkerGroup]) -> None:
        """Takes notice of the machines of these groups, in the place of former ones."""

    def begin(self, draft: Path) -> Path:
        """Makes the driver's new directory ``draft`` on every machine, and returns it."""
        return draft

    def gather(self, draft: Path, shares: Shares) -> None:
        """Brings what workers have written into ``draft`` here. Raises UserError where it is not what they wrote."""

    def give(self, checkpoint: Path) -> None:
        """Brings the checkpoint to every machine."""

    def bring(self, node: str, paths: Sequence[Path]) -> None:
        """Brings finished files and directories from the machine ``node`` here."""


class RunDirectory:
    """One job's directory: checked when made, owned and written to only inside ``with``.

    Args:
        path: where.
        recipe: the resolved recipe.
        resume: go on with the run that is there (start it when there is none, which ``auto`` takes for granted).
        tell: shows the user a warning (a damaged checkpoint that was passed over).
        resolved: what the run has in the place of the recipe's ``auto``; see ``devices.resolved``.
        callbacks: are told of the run's steps.

    Attributes:
        tracker, recorder: of metrics and of spans, once ``start`` was called.
        writer: writes in the background, and before a checkpoint all that it is to have.
        has_stopped: a callback has ended the run before its last step.
        remote: of the store, where ``output_dir`` is a URL.

    Raises:
        UserError: the directory holds another run (or other files), is in use, or the recipe has changed.
    """

    def __init__(
        self,
        path: Path,
        recipe: Recipe,
        *,
        resume: Resume = False,
        tell: Callable[[str], object] = lambda text: None,
        resolved: Mapping[str, str] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.path = path
        self.recipe = recipe
        self.job = recipe_job(recipe)
        self.name = path.name
        self.warnings: list[str] = []
        self._tell = tell
        self._resume = resume
        self._resolved = dict(resolved or {})
        self._lock: TextIO | None = None
        self._records = contextlib.ExitStack()
        self.writer = BackgroundWriter({CHECKPOINT: 1})
        self.callbacks = Callbacks(callbacks, RunControl(recipe, path))
        self.has_stopped = self._has_failed = False
        self._trackers: list[BackgroundTracker] = []
        self._signals = StopSignals()
        self._info: dict[str, Any] = {}
        self._pinned, self._commits = recipe, dict[str, str]()
        self.remote = LocalRunStorage()
        if is_url(url := recipe.output_dir):
            keep, timeout_s = recipe.checkpoint.keep, recipe.checkpoint.upload_timeout_s
            self.remote = storage_for(str(url)).remote_run(path, tell, keep=keep, timeout_s=timeout_s)
        noted = self.remote.check(bool(resume))
        self._found = (self._inspect() or {}) if noted is None else noted

    def pin(self, recipe: R) -> R:
        """Returns the recipe of the run, as ``pin_hub_names`` gives it: what is loaded, and noted in ``run.json``."""
        found, self._commits = pin_hub_names(recipe, self._found.get("commits"), self.warning)
        self._pinned = found
        return found

    # Ownership -------------------------------------------------------------------------------------------

    def _claim(self) -> None:
        with naming_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_run(self.path / LOCK)
        self.remote.restore(bool(self._resume))
        # Looked at again: another process may have come between.
        found = self._inspect()
        self.remote.claim()
        former = found or {}
        self._info = {
            "job": self.job,
            "name": self.name,
            "created": former.get("created") or datetime.now().isoformat(timespec="seconds"),
            "status": "running",
            "versions": software_versions(),
            "resolved": self._resolved,
            "processor": memory.describe_processor(),
            **({"remarks": former["remarks"]} if isinstance(former.get("remarks"), list) else {}),
            **({"commits": self._commits} if self._commits else {}),
            **({OLDER_MODEL: True} if former.get(OTHER_LENGTH) or former.get(OLDER_MODEL) else {}),
        }
        if found is None or found[OTHER_LENGTH]:
            with naming_write_errors(self.path / "recipe.yaml"):
                replace_atomically(self.path / "recipe.yaml", dump_recipe(self.recipe).encode("utf-8"))
        write_json(self.path / "run.json", self._info)
        if found is not None and found["status"] == "running":
            self.warning(f"the process that ran it before {ENDED}: its status was still running")
        elif found is None and self._resume is True:
            self._tell(f"{self.path} holds nothing to resume: a new run starts")
        if (remark := untested_torch()) is not None and remark not in self._info.get("remarks", ()):
            self.warning(remark)
        self.remote.saved()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _inspect(self) -> dict[str, Any] | None:
        """Returns what is there: None for nothing; errors for what must not be touched."""
        found = inspect_run(self.path, self.recipe, resume=bool(self._resume))
        if found is not None:
            check_resumable(self.path, found, self._resolved)
        return found

    def warning(self, text: str) -> None:
        """Tells the user, and keeps it in ``run.json``."""
        self._tell(text)
        self.warnings.append(text)
        if self._lock is not None:
            self._info["remarks"] = [*self._info.get("remarks", ()), text]
            write_json(self.path / "run.json", self._info)

    def __enter__(self) -> RunDirectory:
        try:
            self._claim()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        failure = error
        self._has_failed = error is not None
        try:
            if error is not None:
                self.callbacks.fail(error)
            try:
                with naming_write_errors(self.path):
                    self._close_records(abandon=kind is not None and issubclass(kind, KeyboardInterrupt))
            except UserError as refused:
                # The error on its way out matters more than records that a full disk refuses.
                failure = error or refused
            except KeyboardInterrupt as stop:
                failure = stop  # a second Ctrl-C, while what was handed over is written
            self._info["status"] = (
                "done"
                if failure is None
                else "interrupted"
                if isinstance(failure, (Interrupted, KeyboardInterrupt))
                else "failed"
            )
            if failure is None:
                self._info.pop(OLDER_MODEL, None)
            with contextlib.suppress(UserError) if failure else contextlib.nullcontext():
                write_json(self.path / "run.json", self._info)
            failure = self.remote.finish(failure)
        finally:
            self._release()
        if isinstance(failure, OSError) and failure.errno in _DISK:
            with naming_write_errors(self.path):
                raise failure
        if failure is not None and failure is not error:
            raise failure

    def _close_records(self, *, abandon: bool) -> None:
        with contextlib.ExitStack() as trackers, self._records:
            for tracker in self._trackers:
                trackers.callback(tracker.close, failed=self._has_failed)
            # First: it may still have spans to record.
            try:
                self.writer.close(abandon=abandon)
            except KeyboardInterrupt:
                self.writer.close(abandon=True)
                raise

    # Records ---------------------------------------------------------------------------------------------

    def start(self, step: int) -> None:
        """Opens the records; what was written after ``step`` complete steps (those of the checkpoint) is dropped.

        Metrics and rollouts count complete steps; spans carry the index of the step they belong to, from 0. Without a
        checkpoint everything is written again, the figures from before the first step too.
        """
        with naming_write_errors(self.path):
            set_aside_checkpoints_after(self.checkpoints, step)
            prune_checkpoints(self.checkpoints, self.recipe.checkpoint.keep)
            for exported in filter(lambda exported: exported > step, claimed_steps(self.exports)):
                shutil.rmtree(checkpoint_path(self.exports, exported), ignore_errors=True)
            truncate_rows_after(self.path / "metrics.jsonl", step or -1)
            truncate_rows_after(self.path / "spans.jsonl", step - 1)
            rollout_store.truncate_rollouts_after(self.path / "rollouts", step)
            if not self._trackers:  # they stay when workers are replaced
                path = self.path.absolute()
                about = RunInfo(path.name, path, self.recipe.model_dump(mode="json"), step)
                self._trackers = build_trackers(self.recipe.log, about, self._tell, self.warning)
            self.tracker = JsonlTracker(self.path / "metrics.jsonl", self._trackers)
            self._records.callback(self.tracker.close)
            self._health = examine_health(FileTail(self.path / "metrics.jsonl", metrics_from_row).poll())
            self.recorder = SpanRecorder(self.path / "spans.jsonl")
            self._records.callback(self.recorder.close)
        self.callbacks.begin()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of ``step`` everywhere, with what they say about the run's health."""
        found = self._health.note(step, metrics)
        metrics = {**metrics, **self._health.metrics()}
        self.tracker.log(step, metrics)
        for finding in found:
            self.warning(finding.text)
            self.callbacks(Callback.on_health, step, finding)
        self.callbacks(Callback.on_log, step, metrics)

    def rewind(self, step: int) -> None:
        """Goes back to where ``step`` steps were complete: what was recorded after them is dropped."""
        self.drain()
        self._records.close()
        self.start(step)

    def finish(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Writes ``summary.json``, after all that is being written, and returns what it holds: job, seed, versions and
        ``results``. The run counts as finished from here on."""
        self.drain()
        summary = {"job": self.job, "seed": self.recipe.seed, "versions": software_versions(), **results}
        self.callbacks.tell_saved()
        with naming_write_errors(self.path):
            write_models(self.path)
            write_cards(self.path, self.recipe, self._pinned, summary)  # which its users may edit
        write_json(self.path / "summary.json", summary)
        self.callbacks(Callback.on_train_end)
        return summary

    # Checkpoints -----------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def latest(self, shares: Collection[str] = (), counters: Collection[str] = ()) -> Checkpoint | None:
        """Returns the newest good checkpoint; what is newer and damaged is told.

        Args:
            shares, counters: names that it must have; shares are left to workers to read.

        Raises:
            UserError: there are checkpoints, but no good one.
        """
        self.drain()

        def misfit(found: Collection[str], info: Mapping[str, Any]) -> str | None:
            if lacking := [name for name in shares if name not in found]:
                return f"it has no {', '.join(lacking)}"
            if lacking := [name for name in counters if name not in info]:
                return f"info.json does not say {', '.join(lacking)}"
            return None

        found = newest_checkpoint(self.checkpoints, misfit)
        if found is None:
            return None
        for text in found.warnings:
            self.warning(text)
        self.remote.give(found.path)
        return found

    def saved_steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, damaged or not, ascending; one that is being written is waited
        for."""
        self.drain()
        return claimed_steps(self.checkpoints)

    def check_length(self, steps: int) -> None:
        """Checks that the run has not made more steps than it is to have.

        Args:
            steps: that the run is to have.

        Raises:
            UserError: it has made more already.
        """
        done = max(claimed_steps(self.checkpoints), default=0)
        if done > steps and (newest := newest_checkpoint(self.checkpoints)) is not None:
            done = newest.step  # what is damaged or has another's name does not count
        if done > steps:
            raise UserError(
                f"{self.path} has made more steps than it is to have",
                found=f"{done} steps are saved, {steps} asked for",
                remedy=f"set steps to {done} or more, or choose another output_dir",
            )

    # Exports ---------------------------------------------------------------------------------------------

    @property
    def exports(self) -> Path:
        return self.path / "exports"

    def export_is_due(self, step: int) -> bool:
        """Tells whether the model is to be written after ``step`` complete steps."""
        every = self.recipe.checkpoint.export_every
        return every is not None and step % every == 0

    def begin_export(self, step: int) -> Path:
        """Makes a new directory for the model after ``step`` steps; it does not count until ``complete_export``."""
        draft = self.exports.absolute() / f".draft_{step:08d}"
        with naming_write_errors(draft):
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        return self.remote.begin(draft)

    def complete_export(self, draft: Path, step: int) -> None:
        """Gives an export its name."""
        final = checkpoint_path(self.exports, step)
        with naming_write_errors(final):
            write_models(draft)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(draft, final)

    def write_later(self, name: str, step: int, work: Callable[[], object]) -> None:
        """Does ``work``, which writes something after ``step`` complete steps, in the background and in order.

        With ``checkpoint.background: false`` at once.

        Args:
            name: of its span.
            work: may read only what does not change any more.

        Raises:
            as ``save``; an error of ``work`` comes out as it is.
        """
        background = self.recipe.checkpoint.background

        def timed() -> None:
            mode = BACKGROUND if background else None
            with self.recorder.span(name, step=step - 1, role=WRITER, mode=mode):
                work()

        if background:
            self.writer.submit(name, timed)
        else:
            timed()

    def drain(self) -> None:
        """Returns once everything is written that was to be written later; errors as in ``save``."""
        self.writer.drain()

    def due(self, step: int, total_steps: int) -> bool:
        """Tells whether a checkpoint is due after ``step`` steps: on its cadence, at the end, or because a signal
        came."""
        self._signals.check()
        is_last = self.is_last(step, total_steps)
        return self._signals.requested or is_last or step % self.recipe.checkpoint.every_steps == 0

    def is_last(self, step: int, total_steps: int) -> bool:
        """Tells whether ``step`` is the last one, or a callback makes it that."""
        if self.callbacks.control.should_stop and step < total_steps and not self.has_stopped:
            self.has_stopped = True
            self.warning(f"{self.callbacks.stopped_by} ended the run after step {step} of {total_steps}")
        return step == total_steps or self.has_stopped

    def check_stop(self, step: int | None) -> None:
        """Raises ``Interrupted`` when a signal came, once the checkpoint is written; call after ``save``.

        Args:
            step: complete steps that are saved; None for those of the last checkpoint.
        """
        self._signals.check()
        if self._signals.first is not None:
            self.drain()
            self.callbacks.tell_saved()
            raise Interrupted(self.path, step, self._signals.first)

        self.callbacks.tell_saved()

    @property
    def is_stopped_at_once(self) -> bool:
        """Tells whether a second Ctrl-C came: nothing more is to be saved."""
        return self._signals.at_once

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Handles signals inside the block: the first one lets the step end and be saved, a second Ctrl-C stops at once
        (``signals``)."""
        with stop_signals() as self._signals, self._signals.graceful():
            yield


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start


def open_run(
    recipe: Recipe,
    resume: Resume,
    progress: Progress | None,
    passed: PreTrainedModel | None = None,
    callbacks: Sequence[Callback] = (),
) -> tuple[RunDirectory, Progress, torch.device]:
    """Returns the directory of a job that is about to run, what shows its progress, and the device of its models.

    Args:
        passed: the object that is trained or evaluated.
        callbacks: beside those that the recipe names.

    Raises:
        UserError: as ``RunDirectory``, or there is no such device, or a tracker or callback cannot be had.
    """
    set_up_logging(recipe.log.level, "driver")
    use_threads(recipe)
    progress = progress if progress is not None else Progress()
    path, device = output_path(recipe.output_dir, recipe_job(recipe), resume), compute_device(recipe, passed)
    for section in recipe.log.chosen_trackers:
        section.check()
    told = build_callbacks(callbacks, recipe.callbacks if isinstance(recipe, TrainingRecipe) else ())
    options: dict[str, Any] = {"tell": progress.print, "resolved": resolved_settings(recipe, device), "callbacks": told}
    return RunDirectory(path, recipe, resume=resume, **options), progress, device
