"""Trackers of other packages, really run: wandb offline, mlflow and trackio on this machine."""

from __future__ import annotations

import importlib.util
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quartet.config.errors import UserError
from quartet.config.run import LogConfig
from quartet.extras.trackers.config import MLflowConfig, TrackioConfig, WandbConfig
from quartet.observe.trackers import Row, RunInfo, build_trackers

ROWS: list[Row] = [
    {"prompt": "1+1=", "response": "2", "score": 1.0},
    {"prompt": "2+2=", "response": "5", "score": None},
]
RECIPE = {"seed": 3, "log": {"level": "info"}, "tags": ["a", "b"]}


@pytest.fixture
def told() -> list[str]:
    return []


def check(config: LogConfig) -> None:
    for section in config.chosen_trackers:
        section.check()


def track(config: LogConfig, path: Path, told: list[str], steps: range, resumed_after: int = 0) -> None:
    """Logs a figure and a table for each step, as a run does, to the end."""
    path.mkdir(exist_ok=True)
    kept = [{"step": step, "time_s": 0.0, "loss/policy": step / 4} for step in range(1, resumed_after + 1)]
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    run = RunInfo(path.name, path, RECIPE, resumed_after)
    (tracker,) = build_trackers(config, run, told.append, told.append)
    for step in (*steps, steps[-1]):  # a step that is done again, as after a worker's death
        tracker.log(step, {"loss/policy": step / 4, "eval/judge": float(step), "eval/judge/exact_match": 0.5})
        tracker.samples(step, "samples/rollouts", lambda num: ROWS[:num])
    tracker.close()


# wandb -------------------------------------------------------------------------------------------------------


def records_of(file: Path) -> Iterator[Any]:
    """The records of a ``.wandb`` file: LevelDB's log format, 32 KiB blocks, behind a head of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            yield Record.FromString(whole)
            whole = b""


def test_wandb_offline_has_metrics_samples_and_the_recipe(tmp_path: Path, told: list[str]) -> None:
    pytest.importorskip("wandb")
    config = LogConfig(trackers=(WandbConfig(project="sums", tags=("toy",), mode="offline"),))
    check(config)
    path = tmp_path / "my-run"
    track(config, path, told, range(1, 4))
    (file,) = path.glob("wandb/offline-run-*/run-*.wandb")
    records = list(records_of(file))
    (run,) = [record.run for record in records if record.HasField("run")]
    assert (run.project, run.display_name, list(run.tags)) == ("sums", "my-run", ["toy"])
    assert json.loads(next(u.value_json for u in run.config.update if u.key == "seed")) == 3
    rows = [
        {(".".join(item.nested_key) or item.key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [(row["_step"], row["loss/policy"]) for row in rows] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    tables = sorted(path.glob("wandb/offline-run-*/files/media/table/samples/*.json"))
    assert len(tables) == 3
    assert json.loads(tables[0].read_text()) == {
        "columns": ["step", "prompt", "response", "score"],
        "data": [[1, "1+1=", "2", 1.0], [1, "2+2=", "5", None]],
    }
    # A resumed run has the same id, and what it repeats is not logged twice.
    time.sleep(1.5)  # wandb still puts the first one away
    track(config, path, told, range(3, 5), resumed_after=2)
    (again,) = [f for f in path.glob("wandb/offline-run-*/run-*.wandb") if f != file]
    assert again.name == file.name == f"run-{json.loads((path / 'trackers' / 'wandb.json').read_text())['id']}.wandb"
    later = [r.history for r in records_of(again) if r.HasField("history")]
    assert [json.loads(i.value_json) for h in later for i in h.item if "_step" in (i.key, *i.nested_key)] == [4]
    assert told == []


def test_wandb_without_a_key_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    with pytest.raises(UserError, match="WANDB_API_KEY") as caught:
        check(LogConfig(trackers=(WandbConfig(),)))
    assert "no API key" in caught.value.found
    monkeypatch.setenv("WANDB_MODE", "offline")
    check(LogConfig(trackers=(WandbConfig(),)))


# mlflow and trackio --------------------------------------------------------------------------------------------


def test_mlflow_has_metrics_samples_and_the_recipe(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    config = LogConfig(trackers=(MLflowConfig(uri=f"file://{tmp_path}/store", experiment="sums"),), samples=1)
    path = tmp_path / "my-run"
    track(config, path, told, range(1, 4))
    track(config, path, told, range(3, 5), resumed_after=2)
    assert told == []
    client = mlflow.MlflowClient(f"file://{tmp_path}/store")
    (run,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert (run.info.run_name, run.info.status) == ("my-run", "FINISHED")
    assert run.data.params == {"seed": "3", "log.level": "info", "tags.0": "a", "tags.1": "b"}
    history = client.get_metric_history(run.info.run_id, "loss/policy")
    assert [(row.step, row.value) for row in history] == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert run.data.metrics["eval/judge"] == 4.0 and run.data.metrics["eval/judge.exact_match"] == 0.5
    root = Path(run.info.artifact_uri.removeprefix("file://"))
    (first, *others) = sorted((root / "samples" / "rollouts").iterdir())
    assert first.name == "step_00000001.json" and len(others) == 3
    assert json.loads(first.read_text()) == {"columns": ["prompt", "response", "score"], "data": [["1+1=", "2", 1.0]]}


def test_mlflow_must_be_told_where(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError, match="neither uri nor MLFLOW_TRACKING_URI"):
        check(LogConfig(trackers=(MLflowConfig(),)))
    with pytest.raises(UserError, match="holds a password"):
        MLflowConfig(uri="https://me:secret@host")
    check(LogConfig(trackers=(MLflowConfig(uri="sqlite:///mlflow.db"),)))


def test_trackio_has_metrics_and_samples(tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))  # read when it is first imported
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    config = LogConfig(trackers=(TrackioConfig(project="sums"),))
    path = tmp_path / "my-run"
    track(config, path, told, range(1, 4))
    track(config, path, told, range(3, 5), resumed_after=2)
    assert told == []
    rows = storage.get_logs("sums", "my-run")
    assert [(r["step"], r["loss/policy"]) for r in rows if "loss/policy" in r] == [(n, n / 4) for n in range(1, 5)]
    tables = [row["samples/rollouts"] for row in rows if "samples/rollouts" in row]
    assert len(tables) == 4 and "2+2=" in json.dumps(tables[0])


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        check(LogConfig(trackers=("wandb",)))
    assert "pip install 'quartet-rl[wandb]'" in caught.value.remedy


def test_names_stand_for_trackers_and_tensorboard_can_be_left_out() -> None:
    assert [t.type for t in LogConfig().chosen_trackers] == ["tensorboard"]
    assert LogConfig(tensorboard=False).chosen_trackers == ()
    both = LogConfig(trackers=["tensorboard", {"type": "trackio", "project": "p"}])
    assert [t.type for t in both.chosen_trackers] == ["tensorboard", "trackio"]
    with pytest.raises(UserError, match="did you mean 'wandb'"):
        LogConfig(trackers=["wandbb"])
    with pytest.raises(UserError, match="names wandb twice"):
        LogConfig(trackers=["wandb", {"type": "wandb", "project": "other"}])
