"""Opens the run of a job: everything that can be refused before a byte is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from quartet.config import UserError
from quartet.config.common import TrainingRecipe
from quartet.config.recipe import Recipe
from quartet.observe.callbacks import Callback, as_callbacks
from quartet.observe.logs import set_up_logging
from quartet.observe.metrics import find_metric
from quartet.observe.notify import Notifier
from quartet.observe.progress import Progress
from quartet.observe.tracker_kinds import check_trackers
from quartet.trainers.devices import check_torch, compute_device, resolved, use_threads
from quartet.trainers.run import RunDirectory
from quartet.trainers.run_files import Resume, job_of, output_path


def open_run(
    recipe: Recipe,
    resume: Resume,
    progress: Progress | None,
    passed: PreTrainedModel | None = None,
    callbacks: Sequence[Callback] = (),
) -> tuple[RunDirectory, Progress, torch.device]:
    """The directory of a job that is about to run, what shows its progress, and the device of its models.

    Args:
        passed: the object that is trained or evaluated.
        callbacks: beside those that the recipe names.

    Raises:
        UserError: as ``RunDirectory``, or there is no such device, or a tracker, message or callback cannot be had.
    """
    check_torch()
    set_up_logging(recipe.log.level, "driver")
    use_threads(recipe)
    progress = progress if progress is not None else Progress()
    path, device = output_path(recipe.output_dir, job_of(recipe), resume), compute_device(recipe, passed)
    check_trackers(recipe.log)
    if (metric := recipe.checkpoint.metric_for_best_model) is not None:
        try:
            find_metric(metric)
        except ValueError as error:
            raise UserError(
                "checkpoint.metric_for_best_model is no metric", found=str(error), remedy="name one of docs/metrics.md"
            ) from None
    told = as_callbacks(callbacks, recipe.callbacks if isinstance(recipe, TrainingRecipe) else ())
    if recipe.log.notify is not None:
        told.append(Notifier(recipe.log.notify, progress.print))
    options: dict[str, Any] = {"tell": progress.print, "resolved": resolved(recipe, device), "callbacks": told}
    return RunDirectory(path, recipe, resume=resume, **options), progress, device
