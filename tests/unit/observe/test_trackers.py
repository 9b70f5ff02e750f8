"""Trackers, and JSON Lines files that survive a kill."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from quartet.observe import background, files
from quartet.observe.files import RowAppender, read_rows, replace_atomically, truncate_after
from quartet.observe.trackers import BackgroundTracker, JsonlTracker, Row, RunInfo, TensorBoardTracker, read_metrics


def log_steps(path: Path, steps: int) -> None:
    tracker = JsonlTracker(path, clock=lambda: 12.5)
    for step in range(1, steps + 1):
        tracker.log(step, {"loss/policy": step / 4})
    tracker.close()


def test_values_that_are_not_finite_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {"loss/policy": math.nan, "loss/value": -math.inf, "kl/ref": 0.5})
    tracker.close()
    row = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert row["loss/policy"] is None
    assert row["nonfinite"] == {"loss/policy": "nan", "loss/value": "-inf"}
    (back,) = read_metrics(path)
    assert math.isnan(back["loss/policy"])
    assert back["loss/value"] == -math.inf
    assert back["kl/ref"] == 0.5
    assert "nonfinite" not in back


def test_unknown_name_leaves_no_row(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="loss/policy"):
        tracker.log(1, {"loss/polcy": 1.0})
    tracker.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_truncation_keeps_steps_up_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(path, 5)
    before = path.read_bytes()
    assert truncate_after(path, 3) == 2
    assert path.read_bytes() == b"".join(line + b"\n" for line in before.split(b"\n")[:3])
    assert truncate_after(path, 3) == 0
    assert truncate_after(tmp_path / "missing.jsonl", 3) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_kill_at_any_byte_loses_at_most_the_last_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(path, 2)
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        complete = whole[:cut].count(b"\n")
        assert [row["step"] for row in read_rows(path)] == list(range(1, complete + 1))
        tracker = JsonlTracker(path, clock=lambda: 12.5)
        tracker.log(9, {"loss/policy": 1.0})
        tracker.close()
        assert [row["step"] for row in read_rows(path)] == [*range(1, complete + 1), 9]
        path.write_bytes(whole[:cut])
        truncate_after(path, 1)
        assert [row["step"] for row in read_rows(path)] == list(range(1, min(complete, 1) + 1))


@pytest.mark.parametrize("damage", [b"{broken\n", b"[1]\n", b"\xff\n"])
def test_damage_in_the_middle_is_left_out_and_named(
    tmp_path: Path, damage: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n' + damage + b'{"step":2}\n')
    told: list[str] = []
    monkeypatch.setattr(files._log, "warning", lambda text, *args: told.append(text % args))
    assert read_rows(path) == [{"step": 1}, {"step": 2}]
    assert told[0].startswith(f"{path}: 1 broken lines are left out (line 2")


def test_failed_replacement_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quartet.observe.files.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_rows_with_lone_surrogates_survive(tmp_path: Path) -> None:
    rows = RowAppender(tmp_path / "rows.jsonl")
    rows.append({"text": "\ud83d \x00 \u2028"})
    rows.close()
    assert read_rows(tmp_path / "rows.jsonl") == [{"text": "\ud83d \x00 \u2028"}]


def tensorboard_scalars(path: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(path))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss/policy")]


def test_tensorboard_hides_what_a_resumed_run_repeats(tmp_path: Path) -> None:
    first = TensorBoardTracker(tmp_path)
    for step in (1, 2, 3, 4):
        first.log(step, {"loss/policy": step})
    first.close()
    resumed = TensorBoardTracker(tmp_path, resume_after=2)
    resumed.log(3, {"loss/policy": 30.0})
    resumed.close()
    files = sorted(tmp_path.iterdir(), key=lambda p: p.stat().st_mtime_ns)
    for number, file in enumerate(files):  # names sort by second only; the order of writing must not be a race
        file.rename(tmp_path / f"events.out.tfevents.{number}")
    assert tensorboard_scalars(tmp_path) == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_tensorboard_shows_samples_as_a_table(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.samples(4, "samples/rollouts", [{"prompt": "a|b", "score": None}, {"prompt": "c\nd", "score": 0.5}])
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Tensors("samples/rollouts")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 4
    assert text == "| prompt | score |\n| --- | --- |\n| a\\|b |  |\n| c<br>d | 0.5 |"


# Behind a thread of their own ----------------------------------------------------------------------------------


@pytest.fixture
def told() -> list[str]:
    return []


class Remote:
    """A tracker that fails so many times."""

    id, url = "r1", None

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.steps: list[int] = []
        self.closed: list[bool] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no route to host")
        self.steps.append(step)

    def samples(self, step: int, name: str, rows: Sequence[Row]) -> None: ...

    def close(self, *, failed: bool = False) -> None:
        self.closed.append(failed)


def delivered(remote: Remote, path: Path, told: list[str], resumed_after: int = 0) -> BackgroundTracker:
    run = RunInfo("r", path, {}, resumed_after)
    return BackgroundTracker("wandb", lambda known: remote, run, 0, told.append, told.append)


def test_an_outage_is_told_once_and_what_follows_it_is_logged(tmp_path: Path, told: list[str]) -> None:
    remote = Remote(failures=3)
    tracker = delivered(remote, tmp_path, told)
    for step in range(5):
        tracker.log(step, {})
    tracker.close(failed=True)
    assert remote.steps == [3, 4] and remote.closed == [True]
    assert len(told) == 2 and "ConnectionError: no route to host" in told[0] and "the run goes on" in told[0]
    assert "lacks 3 rows and tables" in told[1]


def test_a_resumed_run_logs_no_step_twice(tmp_path: Path, told: list[str]) -> None:
    remote = Remote()
    for steps in ((1, 2, 3), (2, 3, 4)):
        tracker = delivered(remote, tmp_path, told, resumed_after=steps[0] - 1)
        for step in steps:
            tracker.log(step, {})
        tracker.close()
    assert remote.steps == [1, 2, 3, 4]
    assert json.loads((tmp_path / "trackers" / "wandb.json").read_text()) == {"id": "r1", "step": 4}


def test_what_an_unreachable_tracker_lacks_is_counted_and_costs_no_time(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_MOST_WAITING", 4)
    path = tmp_path / "metrics.jsonl"
    remote = delivered(Remote(failures=10**6), tmp_path, told)
    tracker = JsonlTracker(path, [remote])
    begun = time.monotonic()
    for step in range(10):
        tracker.log(step, {"loss/policy": 1.0})
    tracker.close()
    remote.close()
    assert time.monotonic() - begun < 5
    assert len(path.read_text().splitlines()) == 10
    assert len(told) == 2 and "lacks 10 rows and tables" in told[1]


def test_a_call_that_hangs_does_not_keep_the_run(tmp_path: Path, told: list[str]) -> None:
    hung = threading.Event()
    thread = background.BestEffortThread("it", told.append)
    thread.submit(lambda: hung.wait(30))
    thread.submit(lambda: None)
    begun = time.monotonic()
    thread.close(lambda: None, patience_s=0.1)
    assert time.monotonic() - begun < 5 and thread.num_dropped == 2
    assert told == ["it: a call has not ended within the last 0.1 s"]
    hung.set()
