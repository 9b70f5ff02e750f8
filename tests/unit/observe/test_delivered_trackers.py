"""Trackers behind a thread of their own, and the rows that they show."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from quartet.observe import background
from quartet.observe.rollouts import RolloutRecord, rollout_rows, write_step
from quartet.observe.trackers import DeliveredTracker, JsonlTracker, Row, TrackedRun


@pytest.fixture
def told() -> list[str]:
    return []


class Remote:
    """A tracker that fails so many times, and waits before each call."""

    id, url = "r1", None

    def __init__(self, failures: int = 0, wait_s: float = 0.0, delay_s: float = 0.0) -> None:
        self.failures, self.wait_s, self.delay_s = failures, wait_s, delay_s
        self.steps: list[int] = []
        self.closed: list[bool] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        time.sleep(self.wait_s)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no route to host")
        self.steps.append(step)

    def samples(self, step: int, name: str, rows: Sequence[Row]) -> None: ...

    def close(self, *, failed: bool = False) -> None:
        self.closed.append(failed)


def delivered(remote: Remote, path: Path, told: list[str], resumed_after: int = 0) -> DeliveredTracker:
    run = TrackedRun("r", path, {}, resumed_after)
    return DeliveredTracker("wandb", lambda known: remote, run, 0, told.append, told.append)


def test_an_outage_is_told_once_and_nothing_is_lost(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_FIRST_WAIT_S", 0.01)
    remote = Remote(failures=3)
    tracker = delivered(remote, tmp_path, told)
    for step in range(5):
        tracker.log(step, {})
    deadline = time.monotonic() + 10
    while len(remote.steps) < 5 and time.monotonic() < deadline:
        time.sleep(0.005)
    tracker.close(failed=True)
    assert remote.steps == [0, 1, 2, 3, 4] and remote.closed == [True]
    assert len(told) == 1 and "ConnectionError: no route to host" in told[0] and "the run goes on" in told[0]


@pytest.mark.parametrize("noted", [None, 2])
def test_what_waited_when_a_process_was_killed_is_logged_by_the_next(
    noted: int | None, tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the steps in metrics.jsonl the tracker has the first two, or none; the run goes on after step 4."""
    monkeypatch.setattr(background, "_FIRST_WAIT_S", 0.01)
    metrics = JsonlTracker(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        metrics.log(step, {"loss/policy": math.nan if step == 4 else 1.0})
    metrics.close()
    if noted is not None:
        (tmp_path / "trackers").mkdir()
        (tmp_path / "trackers" / "wandb.json").write_text(json.dumps({"id": "r1", "step": noted}))
    remote = Remote(failures=2)
    tracker = delivered(remote, tmp_path, told, resumed_after=4)
    tracker.log(5, {"loss/policy": 1.0})
    deadline = time.monotonic() + 10
    while 5 not in remote.steps and time.monotonic() < deadline:
        time.sleep(0.005)
    tracker.close()
    assert remote.steps == list(range(1 + (noted or 0), 6))


@pytest.mark.parametrize(("delay_s", "noted"), [(0.0, 2), (60.0, -1)])
def test_a_step_counts_as_logged_once_no_kill_destroys_it(
    delay_s: float, noted: int, tmp_path: Path, told: list[str]
) -> None:
    """wandb and trackio keep rows in memory for a while."""
    remote, path = Remote(delay_s=delay_s), tmp_path / "trackers" / "wandb.json"
    tracker = delivered(remote, tmp_path, told)
    tracker.log(1, {})
    tracker.log(2, {})
    deadline = time.monotonic() + 10
    found = None
    while found != {"id": "r1", "step": noted} and time.monotonic() < deadline:
        time.sleep(0.005)
        found = json.loads(path.read_text()) if path.exists() else None
    assert found == {"id": "r1", "step": noted}
    tracker.close()
    assert remote.steps == [1, 2] and json.loads(path.read_text())["step"] == 2


def test_what_an_unreachable_tracker_lacks_is_counted_and_costs_no_time(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_FIRST_WAIT_S", 60.0)
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
    thread.close(patience_s=0.1)
    assert time.monotonic() - begun < 5 and thread.num_dropped == 2
    assert told == ["it: a call has not ended within the last 0.1 s"]
    hung.set()


# Rows ---------------------------------------------------------------------------------------------------------


def test_rows_of_kept_rollouts(tmp_path: Path) -> None:
    def record(n: int) -> RolloutRecord:
        columns = {"advantages": [1.0, 2.0, 9.0], "loss_mask": [1.0, 1.0, 0.0]}
        pieces = ["a", "\ud83d", "b"]
        return RolloutRecord(
            f"s{n}", "p0", n, 4, [1], [2, 3, 4], ["x"], pieces, "x", "".join(pieces), "stop", {"judge": None}, 0.5, "g",
            columns,
        )  # fmt: skip

    write_step(tmp_path, 7, [record(0), record(1), record(2)])
    rows = rollout_rows(tmp_path, 7, 2)
    assert len(rows) == 2
    assert rows[1] == {
        "prompt": "x",
        "response": "a\\ud83db",
        "finish_reason": "stop",
        "tokens": 3,
        "policy_version": 4,
        "reward/judge": None,
        "score": 0.5,
        "advantage": 1.5,
    }
    assert rollout_rows(tmp_path, 8, 2) == []
