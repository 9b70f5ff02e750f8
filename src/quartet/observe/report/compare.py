"""Several runs on one page, made of the report's parts: recipes, figures, curves and answers beside each other."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from quartet.config.errors import UserError
from quartet.config.schema import flatten
from quartet.config.yamls import parse_yaml
from quartet.observe.report.build import write_page
from quartet.observe.report.collect import TELLING, collect_run
from quartet.observe.report.samples import ReportLimits

MAX_RUNS = 10
"""As many as there are colours."""
_NO_DIFFERENCE = ("output_dir",)


def build_comparison(run_dirs: Sequence[Path], out: Path | None = None) -> Path:
    """Writes the page of several runs and returns its path (default: ``comparison.html`` in the current directory).

    Raises:
        UserError: fewer than two runs, or more than ten, or one is none; or the page cannot be written.
    """
    data = collect_comparison(run_dirs, ReportLimits())
    return write_page(data, out if out is not None else Path("comparison.html"))


def collect_comparison(run_dirs: Sequence[Path], limits: ReportLimits) -> dict[str, Any]:
    """What the page shows, as JSON data; errors as of :func:`build_comparison`."""
    distinct = {path.resolve(): path for path in run_dirs}
    if len(distinct) < len(run_dirs) or not 2 <= len(run_dirs) <= MAX_RUNS:
        raise UserError(
            f"a comparison needs 2 to {MAX_RUNS} different runs",
            found=", ".join(map(str, run_dirs)) or "none",
            remedy="name the directories of the runs: quartet compare RUN RUN",
        )
    share = replace(limits, tokens=limits.tokens * 2 // len(run_dirs), scanned_steps=0)
    notes: list[str] = []
    explained: dict[str, Any] = {}
    runs: list[dict[str, Any]] = []
    recipes: list[dict[str, Any] | None] = []
    for path, name in zip(run_dirs, _names(list(distinct)), strict=True):
        data = collect_run(path, share)
        explained |= data["explained"]
        notes += [f"{name}: {note}" for note in data["notes"]]
        recipes.append(_recipe(data["recipe"]))
        for stage in data["stages"]:
            if stage["id"] == path.name:
                stage["id"] = data["run"].get("job") or "run"  # the same in every run, whatever its directory's name
        runs.append({**data["run"], "name": name, "stages": data["stages"]})
    return {
        "run": {"name": " and ".join(run["name"] for run in runs)},
        "runs": runs,
        "differences": _differences([recipe for recipe in recipes if recipe is not None]) if all(recipes) else None,
        "explained": dict(sorted(explained.items())),
        "telling": TELLING,
        "notes": notes,
    }


def _names(paths: Sequence[Path]) -> list[str]:
    """The ends of the paths that tell them apart."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = [os.path.join(*path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("different paths have different names")


def _recipe(text: str | None) -> dict[str, Any] | None:
    try:
        found = parse_yaml(text) if text is not None else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    return flatten(found) if isinstance(found, Mapping) else None


def _differences(recipes: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str | None]]]:
    """Keys whose values are not the same in all recipes, with the value in each; None where it has no such key, as if
    it were null."""
    found = []
    for key in dict.fromkeys(key for recipe in recipes for key in recipe):
        values = [json.dumps(recipe[key], ensure_ascii=False) if key in recipe else None for recipe in recipes]
        if len({value or "null" for value in values}) > 1 and key not in _NO_DIFFERENCE:
            found.append((key, values))
    return found
