"""Where metrics go: JSON Lines, which has everything, and the trackers beside it.

The trackers a recipe may name, each behind a thread of its own: an unreachable one costs the run nothing.

What a resumed run repeats, the steps after its checkpoint, is not logged twice, and what a killed process did not log
of those before it is logged then: ``trackers/<type>.json`` in the run's directory has the run's id there, and the last
step that was logged.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

from pydantic import ConfigDict, TypeAdapter

from quartet.config.errors import UserError, described
from quartet.config.logs import LogConfig, MLflowConfig, TrackioConfig, WandbConfig
from quartet.config.strict import flatten
from quartet.observe.background import BestEffortThread
from quartet.observe.jsonl import RowAppender, read_objects, replace_atomically
from quartet.observe.metrics import find_metric

_NUMBERS = TypeAdapter(dict[str, float | None], config=ConfigDict(strict=True))
_NONFINITE = TypeAdapter(dict[str, Literal["nan", "inf", "-inf"]])


Row = Mapping[str, str | float | None]
"""One sample: its columns by name. All rows of a table have the same ones."""


class Tracker(Protocol):
    """What shows a run's metrics and samples. It may raise anything, and take its time: see ``DeliveredTracker``.

    Attributes:
        id: by which a resumed run finds its own again; None where nothing needs to be found.
        url: where people see the run; None where there is no such place.
        delay_s: longest time for which it keeps what is logged in memory, where a kill destroys it.
    """

    id: str | None
    url: str | None
    delay_s: float

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """A table of what was sampled in ``step``; ``name`` as ``samples/rollouts``."""

    def close(self, *, failed: bool = False) -> None: ...


class Delivered(Protocol):
    """A tracker as the run uses it: no call waits or raises."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, step: int, name: str, rows: Callable[[int], Sequence[Row]]) -> None: ...


class JsonlTracker:
    """One JSON object per line: ``{"step": 3, "time_s": 1700000000.0, "loss/policy": 0.1}``.

    JSON has no NaN, so a value that is not finite is written as ``null`` and named under ``nonfinite`` as
    ``"nan"``, ``"inf"`` or ``"-inf"``; :func:`read_metrics` restores it. A half-written last line of a killed
    run is dropped on opening.

    Args:
        others: get the same metrics.
        clock: Unix time in seconds.
    """

    def __init__(self, path: Path, others: Sequence[Delivered] = (), *, clock: Callable[[], float] = time.time) -> None:
        self._rows = RowAppender(path)
        self._others = others
        self._clock = clock

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records ``metrics`` under ``step``; ValueError for a name that the table of metrics does not explain."""
        for name in metrics:
            find_metric(name)
        values = {name: float(value) for name, value in metrics.items()}
        row: dict[str, Any] = {"step": step, "time_s": round(self._clock(), 3)}
        row.update({name: value if math.isfinite(value) else None for name, value in values.items()})
        nonfinite = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
        if nonfinite:
            row["nonfinite"] = nonfinite
        self._rows.append(row)
        for tracker in self._others:
            tracker.log(step, values)

    def samples(self, step: int, name: str, rows: Callable[[int], Sequence[Row]]) -> None:
        """Gives the other trackers a table.

        Args:
            rows: makes its first so many rows, in another thread.
        """
        for tracker in self._others:
            tracker.samples(step, name, rows)

    def close(self) -> None:
        self._rows.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a ``metrics.jsonl``: ``step``, ``time_s``, metrics; NaN and infinities are restored.

    Rows that are broken, or hold something else than numbers, are left out.
    """
    return read_objects(path, metrics_of_row)


def metrics_of_row(row: dict[str, Any]) -> dict[str, float]:
    """One row of :func:`read_metrics`; ValueError or KeyError for one of another shape."""
    nonfinite = _NONFINITE.validate_python(row.pop("nonfinite", {}))
    _NUMBERS.validate_python(row)
    if type(row["step"]) is not int or row["time_s"] is None:
        raise ValueError("no whole step, or no time")
    found = {**row, **{name: float(text) for name, text in nonfinite.items()}}
    if None in found.values():
        raise ValueError("null, and nonfinite does not say what it stands for")
    return found


class TensorBoardTracker:
    """TensorBoard event files in ``directory``, through TensorBoard's own writer (no torch involved).

    Args:
        directory: created if missing; a resumed run writes another event file beside the old one.
        resume_after: last step to keep; TensorBoard then hides what earlier event files hold of later steps.
    """

    id: str | None = None
    url: str | None = None
    delay_s = 0.0

    def __init__(self, directory: Path, resume_after: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory))
        if resume_after is not None:
            self._add(resume_after + 1, session_log=SessionLog(status=SessionLog.START))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, **content))
        self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=self._summary(value=values))

    def samples(self, step: int, name: str, rows: Sequence[Row]) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
        self._add(step, summary=text_pb(name, "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)))

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()


def _cell(value: str | float | None) -> str:
    """Of a table in Markdown."""
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", "<br>")


_WAIT_S = 20.0
"""Longest wait of wandb for its server when a run begins and when it ends; it keeps the process that long."""
_PARAMS, _PARAM_CHARACTERS = 100, 500
"""So many parameters, each of so many characters at most, servers of MLflow take at a time."""
_DATABASES = ("sqlite", "mysql", "postgresql", "mssql")


@dataclass(frozen=True)
class TrackedRun:
    """What trackers are told of a run.

    Args:
        name: of the run, by which people find it.
        directory: of the run.
        recipe: as it is saved, without secrets.
        resumed_after: complete steps at which it goes on; 0 for a run that begins.
        token: a new run's id, where a tracker lets it be chosen.
    """

    name: str
    directory: Path
    recipe: Mapping[str, Any]
    resumed_after: int = 0
    token: str = field(default_factory=partial(secrets.token_hex, 4))


# Kinds -----------------------------------------------------------------------------------------------------


class WandbTracker:
    """A run of Weights & Biases, in a process of its own, which keeps what it cannot send in the run's directory."""

    delay_s = 20.0  # it writes every 15 s

    def __init__(self, config: WandbConfig, run: TrackedRun, known: str | None) -> None:
        import wandb

        self._table = wandb.Table
        # A process that was killed in here has left a folder, and its id was not noted.
        left = [path.name.rpartition("-")[2] for path in sorted(run.directory.glob("wandb/*run-*-*"))]
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=list(config.tags),
            mode=_mode(config),
            name=run.name,
            id=known or next(iter(left), run.token),
            resume="allow",
            dir=str(run.directory),
            config=dict(run.recipe),
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, init_timeout=_WAIT_S, finish_timeout=_WAIT_S),
        )
        self.id: str | None = str(self._run.id)
        self.url: str | None = self._run.url if _mode(config) == "online" else None
        self._last_step = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)
        self._last_step = step

    def samples(self, step: int, name: str, rows: Sequence[Row]) -> None:
        # A step before the last one would be ignored.
        table = self._table(columns=["step", *rows[0]], data=[[step, *row.values()] for row in rows])
        self._run.log({name: table}, step=max(step, self._last_step))

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


def _mode(config: WandbConfig) -> Any:
    return config.mode or os.environ.get("WANDB_MODE", "online")


class TrackioTracker:
    """A run of Trackio: a database on this machine, or a Space of the hub."""

    delay_s = 2.0  # it writes every 0.5 s

    def __init__(self, config: TrackioConfig, run: TrackedRun, known: str | None) -> None:
        import trackio

        self._table = trackio.Table
        self._run = trackio.init(
            config.project,
            name=known or run.name,
            space_id=config.space_id,
            config=dict(run.recipe),
            resume="never" if known is None else "allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.id: str | None = self._run.name
        self.url: str | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, name: str, rows: Sequence[Row]) -> None:
        self._run.log({name: self._table(columns=list(rows[0]), data=[list(row.values()) for row in rows])}, step=step)

    def close(self, *, failed: bool = False) -> None:
        self._run.finish()


class MLflowTracker:
    """A run of MLflow, with the recipe as parameters and tables as artifacts."""

    delay_s = 0.0

    def __init__(self, config: MLflowConfig, run: TrackedRun, known: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(tracking_uri=config.uri), Metric
        self.url: str | None = None
        if known is not None:
            self._client.update_run(known, status="RUNNING")
            self.id: str | None = known
            return
        found = self._client.get_experiment_by_name(config.experiment)
        experiment = self._client.create_experiment(config.experiment) if found is None else found.experiment_id
        # What failed behind the run's creation, or lost its answer, is tried again: then the run is there.
        made = self._client.search_runs([experiment], f"tags.quartet = '{run.token}'")
        created = made[0] if made else self._client.create_run(experiment, None, {"quartet": run.token}, run.name)
        self.id = created.info.run_id
        params = [Param(key, str(value)[:_PARAM_CHARACTERS]) for key, value in flatten(run.recipe).items()]
        for start in range(0, len(params), _PARAMS):
            self._client.log_batch(self.id, params=params[start : start + _PARAMS])
        self._client.log_dict(self.id, dict(run.recipe), "recipe.yaml")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        rows = [self._metric(_mlflow_name(name), value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self.id, metrics=rows)

    def samples(self, step: int, name: str, rows: Sequence[Row]) -> None:
        table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
        self._client.log_dict(self.id, table, f"{name}/step_{step:08d}.json")

    def close(self, *, failed: bool = False) -> None:
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


def _mlflow_name(name: str) -> str:
    """Without characters that MLflow refuses, and with one slash at most: stores of files make folders of them, and
    ``eval/judge`` and ``eval/judge/exact_match`` cannot both be there."""
    family, slash, rest = name.replace("@", "_").replace("+", "_").partition("/")
    return family + slash + rest.replace("/", ".")


def _tensorboard(config: Any, run: TrackedRun, known: str | None) -> TensorBoardTracker:
    return TensorBoardTracker(run.directory / "tensorboard", run.resumed_after or None)


KINDS: Mapping[str, Callable[[Any, TrackedRun, str | None], Tracker]] = MappingProxyType(
    {"tensorboard": _tensorboard, "wandb": WandbTracker, "trackio": TrackioTracker, "mlflow": MLflowTracker}
)
"""By the type that recipes name, which is also the name of the package and of the extra. Each is made of its section,
the run, and the id that the run had there before."""


# Before the run, and in it -----------------------------------------------------------------------------------


def check_trackers(config: LogConfig) -> None:
    """
    Raises:
        UserError: a tracker's package is missing, or what it needs to reach its server.
    """
    for tracker in config.chosen_trackers:
        if importlib.util.find_spec(tracker.type) is None:
            raise UserError(
                f"the tracker {tracker.type} needs a package that is not installed",
                found=f"log.trackers names {tracker.type}; there is no module of that name",
                remedy=f"pip install 'quartet-rl[{tracker.type}]', or leave it out of log.trackers",
            )
        lacking = _lacking(tracker)
        if lacking is not None:
            raise UserError(f"the tracker {tracker.type} cannot reach its server", found=lacking[0], remedy=lacking[1])


def _lacking(config: Any) -> tuple[str, str] | None:
    """What is not there that the tracker's server asks for, and what to do; None where it has all. Asks no server."""
    if isinstance(config, WandbConfig) and _mode(config) == "online":
        import wandb

        remedy = "wandb login, or export WANDB_API_KEY=…; mode: offline needs none"
        try:
            if wandb.run is None and not wandb.login(prompt=False, verify=False):
                return "no API key of Weights & Biases", remedy
        except wandb.Error as error:
            return described(error), remedy
    if isinstance(config, MLflowConfig):
        uri = config.uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            return "neither uri nor MLFLOW_TRACKING_URI", "set one of them: http://host:port, or sqlite:///mlflow.db"
        if uri.startswith(_DATABASES) and importlib.util.find_spec("sqlalchemy") is None:
            return f"a database ({uri.partition(':')[0]}), and mlflow-skinny without SQLAlchemy", "pip install mlflow"
    if isinstance(config, TrackioConfig) and config.space_id is not None:
        from huggingface_hub import get_token

        if get_token() is None:
            return f"space_id {config.space_id}, and no token of the hub", "hf auth login, or export HF_TOKEN=…"
    return None


def build_trackers(
    config: LogConfig, run: TrackedRun, tell: Callable[[str], object], warn: Callable[[str], object]
) -> list[DeliveredTracker]:
    """Those that the recipe names. Nothing is loaded or asked before there is something to log.

    Args:
        tell: is told in their threads where the run can be seen, and of the first failure.
        warn: is told in the caller's, when they are closed, of how much was lost.
    """
    return [
        DeliveredTracker(of.type, partial(KINDS[of.type], of, run), run, config.samples, tell, warn)
        for of in config.chosen_trackers
    ]


class DeliveredTracker:
    """A tracker behind a thread of its own: calls return at once and never raise.

    Args:
        kind: key of ``KINDS``.
        start: makes the tracker, of the id that the run had there.
        run: what the tracker lacks of a resumed run's steps, as after a kill, is logged first.
        num_samples: rows of a table; 0: none are shown.
        tell, warn: as of ``build_trackers``.
    """

    def __init__(
        self,
        kind: str,
        start: Callable[[str | None], Tracker],
        run: TrackedRun,
        num_samples: int,
        tell: Callable[[str], object],
        warn: Callable[[str], object],
    ) -> None:
        self._kind, self._start, self._num_samples, self._tell, self._warn = kind, start, num_samples, tell, warn
        self._thread = BestEffortThread(f"the tracker {kind}", tell)
        self._path = run.directory / "trackers" / f"{kind}.json"
        self._tracker: Tracker | None = None
        self._known: dict[str, Any] = {}
        self._last: dict[str, int] = {}  # step of metrics, and of each table
        self._kept: deque[tuple[float, int]] = deque()  # from when on no kill destroys a logged step, and the step
        if run.resumed_after:
            self._thread.submit(partial(self._catch_up, run.directory / "metrics.jsonl", run.resumed_after))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._thread.submit(partial(self._log, step, dict(metrics)))

    def samples(self, step: int, name: str, rows: Callable[[int], Sequence[Row]]) -> None:
        if self._num_samples:
            self._thread.submit(partial(self._show, step, name, rows))

    def close(self, *, failed: bool = False) -> None:
        self._thread.close(partial(self._end, failed))
        if lost := self._thread.num_dropped:
            self._warn(f"the tracker {self._kind} lacks {lost} rows and tables of the run; metrics.jsonl has all")

    # In the thread -----------------------------------------------------------------------------------------

    def _opened(self) -> Tracker:
        if self._tracker is None:
            if self._path.is_file():
                self._known = json.loads(self._path.read_text(encoding="utf-8"))
            self._tracker = self._start(self._known.get("id"))
            self._note(self._known.get("step", -1))
            if self._tracker.url is not None:
                self._tell(f"{self._kind}: {self._tracker.url}")
        return self._tracker

    def _catch_up(self, metrics: Path, last: int) -> None:
        """Logs the rows up to step ``last`` that the process before had not got through."""
        if self._opened().id is not None:  # else the run's directory has them
            for row in read_metrics(metrics):
                if row["step"] <= last:
                    self._log(int(row["step"]), {name: row[name] for name in row.keys() - {"step", "time_s"}})

    def _note(self, step: int) -> None:
        if self._tracker is not None and self._tracker.id is not None:
            self._path.parent.mkdir(exist_ok=True)
            replace_atomically(self._path, json.dumps({"id": self._tracker.id, "step": step}).encode())

    def _note_safe(self, now: float) -> None:
        """Notes the last step that no kill destroys any more."""
        safe = -1
        while self._kept and self._kept[0][0] <= now:
            _, safe = self._kept.popleft()
        if safe >= 0:
            self._note(safe)

    def _is_new(self, step: int, name: str = "") -> bool:
        """False for what was logged already: by the process before, or before a worker died."""
        return step > self._last.get(name, self._known.get("step", -1))

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        tracker = self._opened()
        if self._is_new(step):
            tracker.log(step, metrics)
            self._last[""] = step
            self._kept.append((time.monotonic() + tracker.delay_s, step))
            self._note_safe(time.monotonic())

    def _show(self, step: int, name: str, rows: Callable[[int], Sequence[Row]]) -> None:
        tracker, table = self._opened(), rows(self._num_samples)
        if table and self._is_new(step, name):
            tracker.samples(step, name, table)
            self._last[name] = step

    def _end(self, failed: bool) -> None:
        if self._tracker is not None:
            self._tracker.close(failed=failed)
            self._note_safe(math.inf)
