"""Where a job's output goes, and whether it goes on with a run that is there.

==================  =====================  ==============================  ==================================
``output_dir``      ``resume=False``       ``resume=True``                 ``resume="auto"``
==================  =====================  ==============================  ==================================
not set             a new dated directory  refused                         refused
holds no run        starts                 starts, and says so             starts
holds one           refused                goes on                         goes on
holds a done one    refused                writes its model once more      the command only reports it
==================  =====================  ==============================  ==================================
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from quartet.config import UserError
from quartet.config.recipe import Recipe
from quartet.trainers.run_files import inspect, read_json

Resume = bool | Literal["auto"]


def default_output_dir(job: str) -> Path:
    return Path("runs") / f"{job}-{datetime.now():%Y%m%d-%H%M%S}"


def output_path(output_dir: str | None, job: str, resume: Resume) -> Path:
    """``output_dir``, or a dated directory where it is not set.

    Raises:
        UserError: a run is to be resumed, and nothing says where it is.
    """
    if output_dir:
        return Path(output_dir)
    if resume:
        raise UserError(
            "nothing says which run to go on with",
            found=f"{'--resume=auto' if resume == 'auto' else '--resume'}, and output_dir is not set: every start "
            f"would have a directory of its own ({default_output_dir(job)})",
            remedy="set output_dir, in the recipe or as output_dir=DIR",
        )
    return default_output_dir(job)


def finished(recipe: Recipe, resume: Resume) -> tuple[Path, dict[str, Any]] | None:
    """Under ``auto``: the directory and ``summary.json`` of this very run, where it is done.

    Raises:
        UserError: the directory holds another run.
    """
    if resume != "auto":
        return None
    job = str(getattr(recipe, "job", "run"))
    path = output_path(recipe.output_dir, job, resume)
    marker = inspect(path, recipe, job, resume=True)
    if marker is None or marker["status"] != "done":
        return None
    return found_summary(path)


def found_summary(path: Path) -> tuple[Path, dict[str, Any]] | None:
    """The directory and its ``summary.json``; None where that is not there or damaged, and so must be made again."""
    try:
        summary = read_json(path / "summary.json")
    except (UserError, ValueError):
        return None
    return (path, summary) if isinstance(summary, dict) and "stages" in summary else None
