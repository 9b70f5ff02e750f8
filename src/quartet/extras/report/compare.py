"""Several runs on one page, made of the report's parts; and a kept trajectory token by token, as lines of text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from quartet.config.errors import UserError
from quartet.config.strict import flatten
from quartet.config.yamls import parse_yaml
from quartet.extras.report.build import TELLING, ReportLimits, check_run, collect_run, stage_dirs, write_page
from quartet.observe.rollouts import RolloutRecord, list_rollout_steps, read_rollout_step

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
    if len({path.resolve() for path in run_dirs}) < len(run_dirs) or not 2 <= len(run_dirs) <= MAX_RUNS:
        raise UserError(
            f"a comparison needs 2 to {MAX_RUNS} different runs",
            found=", ".join(map(str, run_dirs)) or "none",
            remedy="name the directories of the runs: quartet compare RUN RUN",
        )
    share = replace(limits, tokens=limits.tokens * 2 // len(run_dirs))
    notes: list[str] = []
    explained: dict[str, Any] = {}
    runs: list[dict[str, Any]] = []
    recipes: list[dict[str, Any] | None] = []
    for path in run_dirs:
        name, data = str(path), collect_run(path, share)
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


def _recipe(text: str | None) -> dict[str, Any] | None:
    try:
        found = parse_yaml(text) if text is not None else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _differences(recipes: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str | None]]]:
    """Returns the keys whose values are not the same in all recipes, with the value in each; None where it has no such
    key, as if it were null.
    """
    found, flat = [], [flatten(recipe) for recipe in recipes]
    for key in dict.fromkeys(key for recipe in flat for key in recipe):
        values = [json.dumps(recipe[key], ensure_ascii=False) if key in recipe else None for recipe in flat]
        if len({value or "null" for value in values}) > 1 and key not in _NO_DIFFERENCE:
            found.append((key, values))
    return found


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


def kept_trajectory(run_dir: Path, step: int | None, sample: int) -> list[RolloutRecord]:
    """Reads the sequences of one trajectory in their order: one, or several where an environment rewrote the state. Of
    a run of several stages it is the last that has kept any.

    Args:
        step: None for the newest that was kept.
        sample: place among the step's trajectories, from 0.

    Raises:
        UserError: there is no such run, step or sample, or its file is damaged.
    """
    check_run(run_dir)
    kept = [path / "rollouts" for path in stage_dirs(run_dir) if list_rollout_steps(path / "rollouts")]
    if not kept:
        raise UserError(
            "the run has kept no rollouts",
            found=f"{run_dir}: no rollouts/ with a step in it",
            remedy="RL keeps those of every log.rollouts_every-th step",
        )
    directory = kept[-1]
    records = read_rollout_step(directory, list_rollout_steps(directory)[-1] if step is None else step)
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
