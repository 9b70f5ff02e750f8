"""Reads a run's directory into plain data, and puts these, style and script into one HTML page.

A part that is missing is None, a part that cannot be read is None with a note; only a directory without any part of a
run is an error. A run can hold millions of tokens, a page cannot: steps are taken evenly, first and last always; within
a step whole groups are taken, those first whose prompt was also seen at other chosen steps. A note says what is left
out.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

from quartet.batch.pictures import is_later_row, is_picture, key_of
from quartet.config.errors import UserError, escape_control, read_file
from quartet.observe.files import ENDED, FileTail, replace_atomically, run_status
from quartet.observe.health import HealthMonitor, alarm_from_row, examine_health, measure_repetition, worker_table
from quartet.observe.metrics import find_metric
from quartet.observe.rollouts import RolloutRecord, list_rollout_steps, policy_token_ids, read_rollout_step
from quartet.observe.spans import BACKGROUND, Span, merge_intervals, span_from_row
from quartet.observe.trackers import metrics_from_row
from quartet.text.pictures import PictureStore

Item = TypeVar("Item")


@dataclass(frozen=True)
class ReportLimits:
    """How much of a run goes into the page."""

    steps: int = 12
    tokens: int = 120_000
    tokens_per_response: int = 1_024
    pictures: int = 400
    responses_per_group: int = 8
    groups_per_step: int = 12
    example_characters: int = 600


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Picks ``count`` of ``items`` at even distances, first and last among them; all when there are fewer."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def compact(value: float | None, digits: int = 5) -> float | int | str | None:
    """Returns a number with ``digits`` significant digits, the text ``nan``, ``inf`` or ``-inf``, or None."""
    if value is None:
        return None
    if not math.isfinite(value):
        return str(float(value))
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def collect_rollouts(
    directory: Path, limits: ReportLimits, warn: Callable[[str], None], only: Sequence[int] | None = None
) -> dict[str, Any] | None:
    """Returns what the token viewer shows, as plain JSON data; None where the run kept no rollouts.

    ``warn`` is told of files that cannot be read; the report does without them. ``only``: of these steps alone.
    """
    steps = list_rollout_steps(directory) if only is None else list(only)
    chosen = evenly(steps, limits.steps)
    by_step = {step: records for step in chosen if (records := _read(directory, step, warn))}
    if not by_step:
        return None
    prompts: dict[str, Any] = {}
    samples: dict[str, list[Any]] = {}
    pictures: dict[str, str | None] = {}
    embedded = cut = 0
    recurrence = Counter(p for records in by_step.values() for p in {r.prompt_id for r in records})
    for step, records in by_step.items():
        groups = _choose_groups(records, recurrence, limits, limits.tokens // len(by_step))
        taken = [record for group in groups for record in group]
        for record in taken:
            prompts.setdefault(_prompt_key(record), _prompt(record, limits))
        samples[str(step)] = [_sample(record, limits) for record in taken]
        for key in (key for record in taken for key in record.pictures if key not in pictures):
            pictures[key] = (
                _thumbnail(directory.with_name("pictures"), key) if len(pictures) < limits.pictures else None
            )
        cut += sum(sample["length"] > limits.tokens_per_response for sample in samples[str(step)])
        embedded += num_trajectories(taken)
    total = sum(num_trajectories(records) for records in by_step.values())
    shown = f"{len(by_step)} of {len(steps)} steps, {embedded:,} of the {total:,} responses of these"
    note = f"This page holds {shown}, {cut} of them cut after {limits.tokens_per_response:,} tokens."
    return {
        "steps": list(by_step),
        "prompts": prompts,
        "samples": samples,
        "pictures": pictures,
        "counts": {str(step): num_trajectories(records) for step, records in by_step.items()},
        "note": note if len(by_step) < len(steps) or embedded < total or cut else None,
    }


def num_trajectories(records: Iterable[RolloutRecord]) -> int:
    return len({record.trajectory_id for record in records})


def _prompt_key(record: RolloutRecord) -> str:
    """Returns the prompt's id on the page: an environment gives a row several states, each a prompt of its own."""
    return f"{record.prompt_id}-{crc32(str(record.prompt_ids).encode()):08x}"


def _read(directory: Path, step: int, warn: Callable[[str], None]) -> list[RolloutRecord]:
    try:
        return read_rollout_step(directory, step)
    except UserError as error:
        warn(f"{error.problem}: {error.found}")
        return []


def _choose_groups(
    records: Iterable[RolloutRecord], recurrence: Counter[str], limits: ReportLimits, token_budget: int
) -> list[list[RolloutRecord]]:
    """Chooses groups in the order of the step, as many as fit the budget, at least one."""
    groups: dict[str, list[RolloutRecord]] = {}
    for record in records:
        groups.setdefault(record.group, []).append(record)
    order = list(groups)
    chosen: list[str] = []
    spent = 0
    for name in sorted(order, key=lambda name: -recurrence[groups[name][0].prompt_id]):
        kept = list(dict.fromkeys(r.trajectory_id for r in groups[name]))[: limits.responses_per_group]
        members = groups[name] = [r for r in groups[name] if r.trajectory_id in kept]
        cost = sum(min(len(r.response_ids), limits.tokens_per_response) for r in members)
        if chosen and (spent + cost > token_budget or len(chosen) == limits.groups_per_step):
            break
        chosen.append(name)
        spent += cost
    return [groups[name] for name in order if name in chosen]


_THUMBNAIL = 160
"""Pixels of a thumbnail's longer side."""


def _thumbnail(directory: Path, key: str) -> str | None:
    """Returns a small picture as a data URL; None where the run's picture is gone or cannot be read."""
    try:
        image = PictureStore(directory).get(int(key, 16)).decode()
    except UserError:
        return None
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    image.save(file := io.BytesIO(), "JPEG", quality=85, subsampling=0)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def _shown(ids: Sequence[int]) -> list[int]:
    """Returns the places of the tokens that are shown: of a picture the first."""
    return [i for i, token in enumerate(ids) if not is_later_row(token)]


def _names(ids: Sequence[int], places: Sequence[int]) -> list[int | str]:
    """Returns the ids at ``places``, a picture's as its key."""
    return [f"{key_of(ids[i]):012x}" if is_picture(ids[i]) else ids[i] for i in places]


def _sample(record: RolloutRecord, limits: ReportLimits) -> dict[str, Any]:
    shown = _shown(record.response_ids)
    places = shown[: limits.tokens_per_response]
    return {
        "id": record.sequence_id,
        "trajectory": record.trajectory_id,
        "part": record.part,
        "prompt": _prompt_key(record),
        "index": record.response_index,
        "group": record.group,
        "version": record.policy_version,
        "finish": record.finish_reason,
        "score": compact(record.score),
        "rewards": {name: compact(value) for name, value in record.rewards.items()},
        "length": len(shown),
        "repetition": compact(measure_repetition(policy_token_ids(record))[0], 3),
        "ids": _names(record.response_ids, places),
        "tokens": [record.response_tokens[i] for i in places],
        "columns": {name: _column([values[i] for i in places]) for name, values in record.columns.items()},
    }


def _column(values: list[float]) -> Any:
    """Returns a list of short numbers; a single number where all are the same (masks mostly are)."""
    short = [compact(value) for value in values]
    return short[0] if len(short) > 1 and len(set(map(str, short))) == 1 else short


def _prompt(record: RolloutRecord, limits: ReportLimits) -> dict[str, Any]:
    # the end of a long prompt is what the response answers
    places = _shown(record.prompt_ids)[-limits.tokens_per_response :]
    return {
        "text": record.prompt_text[-4000:],
        "tokens": [record.prompt_tokens[i] for i in places],
        "length": len(record.prompt_ids),
        **({"ids": _names(record.prompt_ids, places)} if record.pictures else {}),
    }


MAX_TIMED_STEPS = 400
MAX_DETAILED_STEPS = 16
MAX_SPANS_PER_STEP = 800


def show_timing(spans: Sequence[Span]) -> dict[str, Any] | None:
    """Shows where the seconds of steps went; None without spans. A step lasts from its first span to its last, those
    aside that write in the background.
    """
    if not spans:
        return None
    by_step: dict[int | None, list[Span]] = {}
    for span in with_steps(spans):
        by_step.setdefault(span.step, []).append(span)
    ordered = sorted(by_step, key=lambda step: (step is not None, step or 0))
    steps = evenly(ordered, MAX_TIMED_STEPS)
    detailed = evenly(steps, MAX_DETAILED_STEPS)
    names = list(dict.fromkeys(span.name for span in sorted(spans, key=lambda span: span.start_s)))
    intervals = [merge_intervals(_own(by_step[step])) for step in steps]
    return {
        "steps": steps,
        "names": names,
        "seconds": {name: [_total(by_step[s], name, "seconds") for s in steps] for name in names},
        "tokens": {name: [_total(by_step[s], name, "tokens") for s in steps] for name in names},
        "wall_s": [compact(busy[-1][1] - busy[0][0]) for busy in intervals],
        "busy_s": [compact(sum(end - start for start, end in busy)) for busy in intervals],
        "detail": {"null" if step is None else str(step): _detail(by_step[step]) for step in detailed},
        "workers": [asdict(row) for row in worker_table(spans)],
    }


def with_steps(spans: Sequence[Span]) -> list[Span]:
    """Puts spans of a role that name no step, as parts that move do, in the step they begin in.

    Between two steps that is the later one; before the first and after the last the nearest one.
    """
    ends: dict[int, float] = {}
    for span in _own(spans):
        if span.step is not None:
            ends[span.step] = max(ends.get(span.step, span.end_s), span.end_s)

    def step_at(moment: float) -> int | None:
        return min((step for step, end in ends.items() if moment < end), default=max(ends, default=None))

    return [
        replace(span, step=step_at(span.start_s)) if span.step is None and span.role is not None else span
        for span in spans
    ]


def _own(spans: Iterable[Span]) -> list[Span]:
    """Returns the spans that a step waits for; all, where there are no such."""
    spans = list(spans)
    return [span for span in spans if span.mode != BACKGROUND] or spans


def _total(spans: Iterable[Span], name: str, attribute: str) -> float | int | str | None:
    return compact(sum(getattr(span, attribute) for span in spans if span.name == name))


def _detail(spans: list[Span]) -> list[dict[str, Any]]:
    """Returns the spans of one step with times relative to its beginning, in order of their start."""
    origin = min(span.start_s for span in spans)
    longest = sorted(spans, key=lambda span: -span.seconds)[:MAX_SPANS_PER_STEP]
    return [
        {
            "name": span.name,
            "start": round(span.start_s - origin, 5),
            "end": round(span.end_s - origin, 5),
            "role": span.role,
            "mode": span.mode,
            "chunk": span.chunk,
            "tokens": span.tokens,
            "bytes": span.nbytes,
            "failed": span.failed,
        }
        for span in sorted(longest, key=lambda span: span.start_s)
    ]


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
    """Collects everything the page shows, as JSON data.

    Raises:
        UserError: ``run_dir`` is not a directory, or holds no part of a run.
    """
    check_run(run_dir)
    notes: list[str] = []
    stages = []
    for path in stage_dirs(run_dir):
        (files := StageFiles(path)).poll()
        stages.append(collect_stage(files, limits, notes.append))
    head = collect_head(run_dir, notes)
    stages.sort(key=lambda stage: (stage["started_s"] is None, stage["started_s"] or 0.0))
    names = sorted({name for stage in stages if stage["metrics"] for name in stage["metrics"]["series"]})
    return {**head, "explained": explain(names), "telling": TELLING, "stages": stages, "notes": notes}


def check_run(run_dir: Path) -> None:
    """
    Raises:
        UserError: ``run_dir`` is not a directory, or holds no part of a run.
    """
    if not run_dir.is_dir():
        raise UserError(
            "no such run",
            found=f"{run_dir} is " + ("a file" if run_dir.exists() else "missing"),
            remedy="name the directory a run has written",
        )
    if not any((run_dir / name).exists() for name in _RUN_FILES) and not stage_dirs(run_dir):
        raise UserError(
            "the directory holds no run",
            found=f"none of {', '.join(_RUN_FILES)}, rollouts/ in {run_dir}",
            remedy="name the directory a run has written (the one with run.json)",
        )


def collect_head(run_dir: Path, notes: list[str]) -> dict[str, Any]:
    """Returns what belongs to the run as a whole: ``run`` (with its true status), ``recipe``, ``summary``."""
    return {
        "run": read_run(run_dir, notes),
        "recipe": _read_text(run_dir / "recipe.yaml", notes.append),
        "summary": _read_json(run_dir / "summary.json", notes.append),
    }


def read_run(run_dir: Path, notes: list[str]) -> dict[str, Any]:
    """Reads ``run.json`` with the true status, where it says one."""
    found = _read_json(run_dir / "run.json", notes.append) or {}
    status = run_status(run_dir, found)
    if status == ENDED:
        notes.append("run.json says running, and no process has the run's lock: --resume goes on with it")
    return {"name": run_dir.resolve().name, **found, **({"status": status} if "status" in found else {})}


def stage_dirs(run_dir: Path) -> list[Path]:
    """Returns the run itself where it has figures, and those of its direct sub-directories which have."""
    children = sorted(path for path in run_dir.iterdir() if path.is_dir() and path.name != "rollouts")
    figures = ("metrics.jsonl", "spans.jsonl")
    return [
        path
        for path in (run_dir, *children)
        if any((path / name).exists() for name in figures) or list_rollout_steps(path / "rollouts")
    ]


class StageFiles:
    """The metrics and spans of one stage of a run, as they come."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._metrics: FileTail[dict[str, float]] = FileTail(directory / "metrics.jsonl", metrics_from_row)
        self._spans: FileTail[Span] = FileTail(directory / "spans.jsonl", span_from_row)
        self.rows: list[dict[str, float]] = []
        self.spans: list[Span] = []

    def poll(self) -> bool:
        """Takes in what is new, and forgets what a resumed run has cut back; returns whether anything has changed."""
        rows, spans = self._metrics.poll(), self._spans.poll()
        self.rows = rows if self._metrics.restarted else self.rows + rows
        self.spans = spans if self._spans.restarted else self.spans + spans
        return bool(rows or spans or self._metrics.restarted or self._spans.restarted)

    @property
    def troubles(self) -> list[str]:
        return [tail.trouble for tail in (self._metrics, self._spans) if tail.trouble is not None]


def collect_stage(
    files: StageFiles, limits: ReportLimits, warn: Callable[[str], None], steps: Sequence[int] | None = None
) -> dict[str, Any]:
    """Returns what the page shows of one stage; of the tokens those of ``steps`` alone, if given."""
    path, rows, spans = files.directory, files.rows, files.spans
    run = _read_json(path / "run.json", warn) or {}
    for trouble in files.troubles:
        warn(trouble)
    columns, health = metric_columns(rows), examine_health(rows)
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
        "rollouts": collect_rollouts(path / "rollouts", limits, warn, steps),
    }


def _read_or_warn(path: Path, read: Callable[[Path], T], warn: Callable[[str], None]) -> T | None:
    if not path.exists():
        return None
    try:
        return read(path)
    except UserError as error:
        warn(f"{error.problem}: {error.found}")
        return None


def _read_text(path: Path, warn: Callable[[str], None]) -> str | None:
    data = _read_or_warn(path, read_file, warn)
    return None if data is None else data.decode("utf-8", errors="replace")


def _read_json(path: Path, warn: Callable[[str], None]) -> dict[str, Any] | None:
    text = _read_text(path, warn)
    if text is None:
        return None
    try:
        value = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError) as error:
        warn(f"{path} cannot be read: {error}")
        return None
    if not isinstance(value, dict):
        warn(f"{path} cannot be read: it is not an object")
        return None
    return value


def explain(names: Iterable[str]) -> dict[str, dict[str, str] | None]:
    """Returns ``explain_metric`` of each, by name."""
    return {name: explain_metric(name) for name in names}


def explain_metric(name: str) -> dict[str, str] | None:
    """Returns the row of the table of metrics; None where that has none."""
    try:
        metric = find_metric(name)
    except ValueError:
        return None  # written by another version; the page says so
    return {"unit": metric.unit, "meaning": metric.meaning, "bad": metric.bad}


def metric_columns(rows: list[dict[str, float]]) -> dict[str, Any] | None:
    """Turns rows into columns: ``steps``, and one list per metric with None for gaps."""
    if not rows:
        return None
    merged: dict[int, dict[str, float]] = {}
    for row in rows:
        merged.setdefault(int(row["step"]), {}).update(row)
    steps = evenly(sorted(merged), MAX_METRIC_ROWS)
    names = sorted({name for row in rows for name in row if name not in ("step", "time_s")})
    series = {name: [compact(merged[step].get(name), 6) for step in steps] for name in names}
    return {"steps": steps, "series": series}


# Health -----------------------------------------------------------------------------------------------------


def show_health(health: HealthMonitor) -> list[dict[str, Any]] | None:
    """Returns what the checks have found, as JSON data; None where they have found nothing."""
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


def telling(series: Mapping[str, Sequence[float | str | None]], health: HealthMonitor) -> list[str]:
    """Orders ``TELLING`` for one run: first what its health is judged by where that is bad, last what never moves."""
    bad = [name for finding in health.findings.values() for name in finding.check.needs]
    known = {name: [value for value in values if value is not None] for name, values in series.items()}
    still = [name for name in TELLING if len(found := known.get(name, [])) >= _MANY_ROWS and len(set(found)) == 1]
    return list(dict.fromkeys([*bad, *(name for name in TELLING if name not in still), *still]))


# Alarms -----------------------------------------------------------------------------------------------------


def collect_alarms(path: Path, limits: ReportLimits, warn: Callable[[str], None]) -> dict[str, Any] | None:
    """Collects the alarms of a stage; None without any."""
    tail = FileTail(path / "alarms.jsonl", alarm_from_row)
    rows = tail.poll()
    if tail.trouble is not None:
        warn(tail.trouble)
    if not rows:
        return None
    last = rows[-1]
    return {
        "text": str(last["text"]),
        "steps": [int(row["step"]) for row in rows],
        "examples": [
            {name: v[: limits.example_characters] if isinstance(v, str) else compact(v) for name, v in example.items()}
            for example in last["examples"]
        ],
    }


SCRIPTS = (
    "dom.js",
    "charts.js",
    "curves.js",
    "timing.js",
    "colours.js",
    "replay.js",
    "tokens.js",
    "alarm.js",
    "compare.js",
    "live.js",
    "main.js",
)
"""Joined in this order into one function, so that they share names with each other and with nothing else."""

_SLOT = re.compile(r"\{\{ (\w+) \}\}")


def build_report(run_dir: Path, out: Path | None = None) -> Path:
    """Writes the report of ``run_dir`` and returns its path (default: ``report.html`` inside the run).

    The page loads nothing: data, style and script are in it, and its content security policy allows no more.

    Raises:
        UserError: ``run_dir`` holds no run, or the report cannot be written.
    """
    data = collect_run(run_dir, ReportLimits())
    return write_page(data, out if out is not None else run_dir / "report.html")


def write_page(data: Mapping[str, Any], path: Path) -> Path:
    """Writes a page with ``data``; UserError where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(path, render_page(data).encode("utf-8"))
    except OSError as error:
        raise UserError(
            "the report cannot be written",
            found=f"{path}: {error.strerror or error}",
            remedy="name another file with --out, or make room",
        ) from error
    return path


def render_page(data: Mapping[str, Any], *, live: bool = False) -> str:
    """Writes the page for what :func:`quartet.extras.report.build.collect_run` returns.

    Args:
        live: the page may ask the server that it came from what is new.
    """
    style = _asset("report.css")
    script = "(() => {\n'use strict';\n" + "\n".join(_asset(name) for name in SCRIPTS) + "\n})();\n"
    slots = {
        "title": html.escape(escape_control(f"{data['run'].get('name', 'run')} · Quartet")),
        "policy": f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; img-src data:"
        + ("; connect-src 'self'" if live else ""),
        "style": style,
        "data": _inert_json(data),
        "script": script,
    }
    # one pass, so that a slot's name inside the data stays what it is
    return _SLOT.sub(lambda match: slots[match[1]], _asset("template.html"))


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


def _inert_json(data: Mapping[str, Any]) -> str:
    """Writes JSON that no HTML parser can mistake for markup, in ASCII, so that lone surrogates survive too."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
