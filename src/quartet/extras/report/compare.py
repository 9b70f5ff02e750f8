"""Several runs on one page, made of the report's parts; and a kept trajectory token by token, as lines of text."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from quartet.config.errors import UserError
from quartet.config.plugins import recipes
from quartet.config.strict import chosen_member, flatten, item_annotation
from quartet.config.yamls import parse_yaml
from quartet.extras.report.build import TELLING, ReportLimits, check_run, collect_run, stage_dirs, write_page
from quartet.observe.rollouts import RolloutRecord, list_steps, read_step

MAX_RUNS = 10
"""As many as there are colours."""
_NO_DIFFERENCE = ("output_dir",)
_SEED = "seed"


def build_comparison(run_dirs: Sequence[Path], out: Path | None = None) -> Path:
    """Writes the page of several runs and returns its path (default: ``comparison.html`` in the current directory).

    Raises:
        UserError: fewer than two runs, or more than ten, or one is none; or the page cannot be written.
    """
    data = collect_comparison(run_dirs, ReportLimits())
    return write_page(data, out if out is not None else Path("comparison.html"))


def collect_comparison(run_dirs: Sequence[Path], limits: ReportLimits) -> dict[str, Any]:
    """Returns what the page shows, as JSON data; errors as of :func:`build_comparison`."""
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
        "seeds": _seeds(recipes),
        "explained": dict(sorted(explained.items())),
        "telling": TELLING,
        "notes": notes,
    }


def _names(paths: Sequence[Path]) -> list[str]:
    """Returns the ends of the paths that tell them apart."""
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
    return found if isinstance(found, dict) else None


def _differences(recipes: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str | None]]]:
    """Returns the keys that were set in one recipe and are not the same in all, with the value in each; None where it
    has no such key, as if it were null. A value that is the default of its place (of the section, or of the choice) was
    not set; of a section that has nothing else the name alone is told.
    """
    found, flat = [], [flatten(recipe) for recipe in recipes]
    unset = [_defaults(recipe) for recipe in recipes]
    for key in dict.fromkeys(key for recipe in flat for key in recipe):
        values = [json.dumps(recipe[key], ensure_ascii=False) if key in recipe else None for recipe in flat]
        is_set = any(key in recipe and key not in default for recipe, default in zip(flat, unset, strict=True))
        if len({value or "null" for value in values}) > 1 and key not in _NO_DIFFERENCE and is_set:
            found.append((key, values))
    for key in dict.fromkeys(key for recipe in flat for key, value in recipe.items() if value is None):
        has = [any(other.startswith(f"{key}.") for other in recipe) for recipe in flat]
        if any(has) and not any(other.startswith(f"{key}.") for other, _ in found):
            found.append((key, ["its defaults" if there else None for there in has]))
    return found


def _defaults(recipe: Mapping[str, Any]) -> set[str]:
    """Returns the dotted keys of a recipe whose values are the defaults of their places; none where its job
    is unknown.
    """
    model = recipes().get(str(recipe.get("job")))
    found = set(_default_keys(model, recipe, None, "")) if model is not None else set()
    # What evaluation leaves out is as in training.
    flat, own = flatten(recipe), "evaluation.sampling."
    training = {key: flat.get(key.replace("evaluation", "rollout", 1)) for key in flat if key.startswith(own)}
    return {key for key in found if key not in training} | {
        key for key, value in training.items() if flat[key] == value
    }


def _default_keys(
    model: type[BaseModel], values: Mapping[str, Any], place: BaseModel | None, prefix: str
) -> Iterator[str]:
    """Yields the keys whose values are the defaults of their ``place``: the section as it is where nothing is said of
    it; None: as its class makes it.
    """
    for name, field in model.model_fields.items():
        if name not in values:
            continue
        if len(get_args(field.annotation)) == 1:  # which choice it is: said by its default, or by the recipe
            yield from [prefix + name] if place is not None else []
            continue
        is_derived = field.is_required() or field.default_factory_takes_validated_data
        default = getattr(place, name) if place is not None else None
        if place is None and not is_derived:
            default = field.get_default(call_default_factory=True)
        key, value, inner = prefix + name, values[name], item_annotation(field.annotation)
        for number, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, dict) and (held := chosen_member(inner, item)) is not None:
                yield from _default_keys(held, item, None, f"{key}.{number}.")
        if isinstance(value, dict) and (held := chosen_member(field.annotation, value)) is not None:
            yield from _default_keys(held, value, default if type(default) is held else None, f"{key}.")
        elif not is_derived and value == to_jsonable_python(default):
            yield from flatten(value, key)


def _seeds(recipes: Sequence[Mapping[str, Any] | None]) -> list[dict[str, Any]]:
    """Returns runs of the same recipe with several seeds: their places, and what tells their recipe from
    the others'.
    """
    groups: dict[str, list[int]] = {}
    for place, recipe in enumerate(recipes):
        if recipe is not None:
            rest = {key: value for key, value in recipe.items() if key not in (*_NO_DIFFERENCE, _SEED)}
            groups.setdefault(json.dumps(rest, sort_keys=True, default=str), []).append(place)
    firsts = [recipes[places[0]] or {} for places in groups.values()]
    told = _differences([{**recipe, _SEED: None} for recipe in firsts])
    return [
        {"runs": places, "name": ", ".join(f"{key}={values[i]}" for key, values in told)}
        for i, places in enumerate(groups.values())
        if len(places) > 1
    ]


_COLUMNS = (("log-prob.", ("rollout_logprobs", "old_logprobs")), ("reward", ("token_rewards",)))
_MORE = (("advantage", ("advantages",)), ("value", ("values",)))
_WIDTH = 24


def kept_trajectory(run_dir: Path, step: int | None, sample: int, stage: str | None = None) -> list[RolloutRecord]:
    """Reads the sequences of one trajectory in their order: one, or several where an environment rewrote the state.

    Args:
        step: None for the newest that was kept.
        sample: place among the step's trajectories, from 0.
        stage: of a run of several, the directory; None for the only one that has kept rollouts, or the last.

    Raises:
        UserError: there is no such run, stage, step or sample, or its file is damaged.
    """
    check_run(run_dir)
    kept = {path.name: path / "rollouts" for path in stage_dirs(run_dir) if list_steps(path / "rollouts")}
    if not kept or (stage is not None and stage not in kept):
        raise UserError(
            "the run has kept no rollouts" if not kept else f"no stage {stage!r} has kept rollouts",
            found=f"{run_dir}: " + (", ".join(kept) or "no rollouts/ with a step in it"),
            remedy="name one of these with --stage" if kept else "RL keeps those of every log.rollouts_every-th step",
        )
    directory = kept[stage] if stage is not None else list(kept.values())[-1]
    records = read_step(directory, list_steps(directory)[-1] if step is None else step)
    names = list(dict.fromkeys(record.trajectory_id for record in records))
    if not 0 <= sample < len(names):
        raise UserError(
            f"no sample {sample} at this step",
            found=f"{len(names)} trajectories" + (f", 0 to {len(names) - 1}" if names else ""),
            remedy="choose one of them with --sample",
        )
    return sorted((r for r in records if r.trajectory_id == names[sample]), key=lambda record: record.part)


def replay_lines(trajectory: Sequence[RolloutRecord]) -> Iterator[str]:
    """Yields the prompt, a line per token of the response, and the sums; token texts are in quotes, as JSON
    has them.
    """
    total = 0.0
    for record in trajectory:
        several = f" (sequence {record.part + 1} of {len(trajectory)})" if len(trajectory) > 1 else ""
        yield f"prompt{several}: {record.prompt_text}"
        columns = [(name, found) for name, names in (*_COLUMNS, *_MORE) if (found := _first(record, names)) is not None]
        yield f"{'token':>6}  {'text':{_WIDTH}}" + "".join(f"{name:>11}" for name, _ in columns) + "   probability"
        observed = record.columns.get("observation_mask")
        for i, text in enumerate(record.response_tokens):
            head = f"{i + 1:6}  {json.dumps(text, ensure_ascii=False):{_WIDTH}}"
            if observed is not None and observed[i]:
                yield f"{head}  read, not sampled"
                continue
            values = dict(columns)
            total += values["reward"][i] if "reward" in values and math.isfinite(values["reward"][i]) else 0.0
            bar = "█" * round(12 * math.exp(min(values["log-prob."][i], 0.0))) if "log-prob." in values else ""
            yield head + "".join(f"{column[i]:11.4g}" for _, column in columns) + f"   {bar}"
        version = f"policy version {record.policy_version}"
        yield f"ended by {record.finish_reason} after {len(record.response_ids)} tokens, {version}"
    last = trajectory[-1]
    rewards = ", ".join(f"{name} {value:.4g}" for name, value in last.rewards.items() if value is not None)
    score = "none" if last.score is None else f"{last.score:.4g}"
    yield f"score {score}" + (f" ({rewards})" if rewards else "") + f"; rewards of the tokens together {total:.4g}"


def _first(record: RolloutRecord, names: Sequence[str]) -> list[float] | None:
    return next((record.columns[name] for name in names if name in record.columns), None)
