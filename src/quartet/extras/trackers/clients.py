"""Runs of wandb, trackio and mlflow: each class is made of its section, the run, and the id that the run had before."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from quartet.config.strict import flatten
from quartet.extras.trackers.config import MLflowConfig, TrackioConfig, WandbConfig
from quartet.observe.trackers import Row, RunInfo

_WAIT_S = 20.0
"""Longest wait of wandb for its server when a run begins and when it ends; it keeps the process that long."""
_PARAMS, _PARAM_CHARACTERS = 100, 500
"""So many parameters, each of so many characters at most, servers of MLflow take at a time."""


class WandbTracker:
    """A run of Weights & Biases, in a process of its own, which keeps what it cannot send in the run's directory."""

    def __init__(self, config: WandbConfig, run: RunInfo, known: str | None) -> None:
        import wandb

        self._table = wandb.Table
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=list(config.tags),
            mode=config.chosen_mode,
            name=run.name,
            id=known or run.token,
            resume="allow",
            dir=str(run.directory),
            config=dict(run.recipe),
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, init_timeout=_WAIT_S, finish_timeout=_WAIT_S),
        )
        self.id: str | None = str(self._run.id)
        self.url: str | None = self._run.url if config.chosen_mode == "online" else None
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


class TrackioTracker:
    """A run of Trackio: a database on this machine, or a Space of the hub."""

    def __init__(self, config: TrackioConfig, run: RunInfo, known: str | None) -> None:
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

    def __init__(self, config: MLflowConfig, run: RunInfo, known: str | None) -> None:
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
    """Makes a name without characters that MLflow refuses, and with one slash at most: stores of files make folders of
    them, and ``eval/judge`` and ``eval/judge/exact_match`` cannot both be there.
    """
    family, slash, rest = name.replace("@", "_").replace("+", "_").partition("/")
    return family + slash + rest.replace("/", ".")
