"""Reads a run directory into the plain data that the report embeds.

A part that is missing is None, a part that cannot be read is None with a note; only a directory without any
part of a run is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from quartet.config.errors import UserError, read_error, read_file
from quartet.config.nearest import made_by
from quartet.extras.report.samples import ReportLimits, collect_rollouts, compact, evenly
from quartet.extras.report.timing import show_timing
from quartet.observe.follow import Tail
from quartet.observe.hacking_alarm import alarm_of_row
from quartet.observe.health import Health, examine
from quartet.observe.metrics import find_metric
from quartet.observe.rollouts import list_steps
from quartet.observe.run_status import ENDED, true_status
from quartet.observe.spans import span_of_row
from quartet.observe.trackers import metrics_of_row

MAX_METRIC_ROWS = 1_000

T = TypeVar("T")

TELLING = (
    "eval/exact_match",
    "reward/score_mean",
    "kl/ref",
    "policy/entropy",
    "groups/zero_variance",
    "rollout/truncated_frac",
    "rollout/length_mean",
    "critic/explained_variance",
    "policy/approx_kl",
    "rollout/repetition_frac",
    "agreement/logprob_diff_max",
    "eval/score_mean",
    "policy/clip_frac",
    "language/change",
    "loss/value",
    "loss/sft",
    "eval/loss",
    "eval/accuracy",
    "sft/perplexity",
    "loss/reward_model",
    "reward_model/accuracy",
    "reward_model/margin",
    "loss/preference",
    "preference/accuracy",
    "preference/margin",
    "optim/lr",
    "throughput/tokens_per_s_per_device",
    "rollout/tokens_per_s",
)
"""Metrics that say most about a run, those first that say most."""
_MANY_ROWS = 5
"""With fewer a curve that does not move says nothing."""

_RUN_FILES = ("run.json", "recipe.yaml", "metrics.jsonl", "spans.jsonl", "summary.json")


def collect_run(run_dir: Path, limits: ReportLimits) -> dict[str, Any]:
    """Everything the page shows, as JSON data.

    Raises:
        UserError: ``run_dir`` is not a directory, cannot be read, or holds no part of a run.
    """
    check_run(run_dir)
    notes: list[str] = []
    with _reading(run_dir):
        stages = [collect_stage(path, limits, notes) for path in stage_dirs(run_dir)]
        head = collect_head(run_dir, notes)
    stages.sort(key=lambda stage: (stage["started_s"] is None, stage["started_s"] or 0.0))
    names = sorted({name for stage in stages if stage["metrics"] for name in stage["metrics"]["series"]})
    return {**head, "explained": explain(names), "telling": TELLING, "stages": stages, "notes": notes}


@contextmanager
def _reading(run_dir: Path) -> Iterator[None]:
    """Makes a ``UserError`` of an error of the system: files come and go, or may not be read."""
    try:
        yield
    except OSError as error:
        raise read_error(Path(error.filename or run_dir), error) from error


def check_run(run_dir: Path) -> None:
    """
    Raises:
        UserError: ``run_dir`` is not a directory, cannot be read, or holds no part of a run.
    """
    with _reading(run_dir):
        if not run_dir.is_dir():
            raise UserError(
                "no such run",
                found=f"{run_dir} is " + ("a file" if run_dir.exists() else "missing"),
                remedy=made_by(run_dir) or "name the directory a run has written",
            )
        has_files = any((run_dir / name).exists() for name in _RUN_FILES)
        if not has_files and (runs := sorted(str(marker.parent) for marker in run_dir.glob("*/run.json"))):
            raise UserError(
                "the directory holds runs, and is none itself",
                found=", ".join(runs[:5]) + (f" and {len(runs) - 5} more" if len(runs) > 5 else ""),
                remedy="name one of them",
            )
        if not has_files and not stage_dirs(run_dir):
            raise UserError(
                "the directory holds no run",
                found=f"none of {', '.join(_RUN_FILES)}, rollouts/ in {run_dir}",
                remedy="name the directory a run has written (the one with run.json)",
            )


def collect_head(run_dir: Path, notes: list[str]) -> dict[str, Any]:
    """What belongs to the run as a whole: ``run`` (with its true status), ``recipe``, ``summary``."""
    return {
        "run": read_run(run_dir, notes),
        "recipe": _read_text(run_dir / "recipe.yaml", notes.append),
        "summary": _read_json(run_dir / "summary.json", notes.append),
    }


def read_run(run_dir: Path, notes: list[str]) -> dict[str, Any]:
    """``run.json`` with the true status, where it says one."""
    found = _read_info(run_dir / "run.json", notes.append)
    status = true_status(run_dir, found)
    if status == ENDED:
        notes.append("run.json says running, and no process has the run's lock: --resume goes on with it")
    return {"name": run_dir.resolve().name, **found, **({"status": status} if "status" in found else {})}


def stage_dirs(run_dir: Path) -> list[Path]:
    """The run itself where it has figures, and those of its direct sub-directories which have."""
    children = sorted(path for path in run_dir.iterdir() if path.is_dir() and path.name != "rollouts")
    figures = ("metrics.jsonl", "spans.jsonl")
    return [
        path
        for path in (run_dir, *children)
        if any((path / name).exists() for name in figures) or list_steps(path / "rollouts")
    ]


def collect_stage(path: Path, limits: ReportLimits, notes: list[str]) -> dict[str, Any]:
    """What the page shows of one stage."""
    warn = notes.append
    run = _read_info(path / "run.json", warn)
    rows = _rows(path / "metrics.jsonl", metrics_of_row, warn)
    spans = _rows(path / "spans.jsonl", span_of_row, warn)
    columns, health = metric_columns(rows), examine(rows)
    starts = [row["time_s"] for row in rows[:1]] + [span.start_s for span in spans[:1]]
    return {
        "id": path.name,
        "job": run.get("job"),
        "started_s": min(starts, default=None),
        "metrics": columns,
        "health": show_health(health),
        "telling": telling(columns["series"] if columns else {}, health),
        "timing": show_timing(spans),
        "alarms": collect_alarms(path, limits, warn),
        "rollouts": collect_rollouts(path / "rollouts", limits, warn),
    }


def _read_or_warn(path: Path, read: Callable[[Path], T], warn: Callable[[str], None]) -> T | None:
    if not path.exists():
        return None
    try:
        return read(path)
    except UserError as error:
        warn(f"{error.problem}: {error.found}")
        return None


def _rows(path: Path, build: Callable[[dict[str, Any]], T], warn: Callable[[str], None]) -> list[T]:
    tail = Tail(path, build)
    rows = tail.poll()
    if tail.trouble is not None:
        warn(tail.trouble)
    return rows


def _read_text(path: Path, warn: Callable[[str], None]) -> str | None:
    data = _read_or_warn(path, read_file, warn)
    return None if data is None else data.decode("utf-8", errors="replace")


def _read_json(path: Path, warn: Callable[[str], None]) -> dict[str, Any] | None:
    text = _read_text(path, warn)
    if text is None:
        return None
    try:
        value = json.loads(text, parse_constant=str, parse_float=_as_json)
    except (ValueError, RecursionError) as error:
        warn(f"{path} cannot be read: {error}")
        return None
    if not isinstance(value, dict):
        warn(f"{path} cannot be read: it is not an object")
        return None
    return value


def _read_info(path: Path, warn: Callable[[str], None]) -> dict[str, Any]:
    """``run.json`` without the values that are no text where text must be."""
    found = _read_json(path, warn) or {}
    wrong = [name for name in ("name", "job", "created", "status") if not isinstance(found.get(name, ""), str)]
    if not isinstance(found.get("versions", {}), dict):
        wrong.append("versions")
    if wrong:
        warn(f"{path} cannot be read: {', '.join(wrong)}")
    return {name: value for name, value in found.items() if name not in wrong}


def _as_json(number: str) -> float | str:
    """A number that is too large for one is shown as it stands there."""
    value = float(number)
    return value if math.isfinite(value) else number


def explain(names: Iterable[str]) -> dict[str, dict[str, str] | None]:
    """``explain_metric`` of each, by name."""
    return {name: explain_metric(name) for name in names}


def explain_metric(name: str) -> dict[str, str] | None:
    """The row of the table of metrics; None where that has none."""
    try:
        metric = find_metric(name)
    except ValueError:
        return None  # written by another version; the page says so
    return {"unit": metric.unit, "meaning": metric.meaning, "bad": metric.bad}


def metric_columns(rows: list[dict[str, float]]) -> dict[str, Any] | None:
    """Rows as columns: ``steps``, and one list per metric with None for gaps."""
    if not rows:
        return None
    merged: dict[int, dict[str, float]] = {}
    for row in rows:
        merged.setdefault(int(row["step"]), {}).update(row)
    steps = evenly(sorted(merged), MAX_METRIC_ROWS)
    names = sorted({name for row in rows for name in row if name not in ("step", "time_s")})
    note = f"{len(steps):,} of {len(merged):,} logged steps, evenly spaced." if len(steps) < len(merged) else None
    return {
        "steps": steps,
        "series": {name: [compact(merged[step].get(name), 6) for step in steps] for name in names},
        "note": note,
    }


# Health -----------------------------------------------------------------------------------------------------


def show_health(health: Health) -> list[dict[str, Any]] | None:
    """What the checks have found, as JSON data; None where they have found nothing."""
    found = [
        {
            "title": finding.check.title,
            "since": finding.since,
            "until": None if name in health.present else finding.until,
            "meaning": finding.check.meaning,
            "remedy": finding.check.remedy,
            "values": {m: compact(v) for m, v in zip(finding.check.needs, finding.values, strict=True)},
        }
        for name, finding in health.findings.items()
    ]
    return found or None


def telling(series: Mapping[str, Sequence[float | str | None]], health: Health) -> list[str]:
    """``TELLING`` for one run: first what its health is judged by where that is bad, last what never moves."""
    bad = [name for finding in health.findings.values() for name in finding.check.needs]
    known = {name: [value for value in values if value is not None] for name, values in series.items()}
    still = [name for name in TELLING if len(found := known.get(name, [])) >= _MANY_ROWS and len(set(found)) == 1]
    return list(dict.fromkeys([*bad, *(name for name in TELLING if name not in still), *still]))


# Alarms -----------------------------------------------------------------------------------------------------


def collect_alarms(path: Path, limits: ReportLimits, warn: Callable[[str], None]) -> dict[str, Any] | None:
    """The alarms of a stage; None without any."""
    rows = _rows(path / "alarms.jsonl", alarm_of_row, warn)
    if not rows:
        return None
    last = rows[-1]
    return {
        "text": str(last["text"]),
        "steps": [int(row["step"]) for row in rows],
        "examples": [
            {name: v[: limits.echo_characters] if isinstance(v, str) else compact(v) for name, v in example.items()}
            for example in last["examples"]
        ],
    }
