"""Trackers, and JSON Lines files that survive a kill."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from quartet.observe import files
from quartet.observe.files import RowAppender, read_rows, replace_atomically, truncate_after
from quartet.observe.trackers import JsonlTracker, TensorBoardTracker, read_metrics


def log_steps(path: Path, steps: int) -> None:
    tracker = JsonlTracker(path, clock=lambda: 12.5)
    for step in range(1, steps + 1):
        tracker.log(step, {"loss/policy": step / 4})
    tracker.close()


def test_one_object_per_line_visible_at_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    tracker = JsonlTracker(path, clock=lambda: 12.5)
    tracker.log(3, {"loss/policy": 0.25, "rollout/tokens": 7})
    assert path.read_text() == '{"step":3,"time_s":12.5,"loss/policy":0.25,"rollout/tokens":7.0}\n'
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


def test_null_must_stand_for_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,"time_s":2.0,"time/step_s":null}\n')
    told: list[str] = []
    monkeypatch.setattr(files._log, "warning", lambda text, *args: told.append(text % args))
    assert read_metrics(path) == [] and "(line 1: null" in told[0]


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


def test_two_writers_of_one_file_are_not_in_each_others_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sync = tmp_path / "run.json", os.fsync

    def another_writes(number: int) -> None:  # as from another machine, where the process may have the same number
        monkeypatch.setattr("quartet.observe.files.os.fsync", sync)
        replace_atomically(path, b"theirs")

    monkeypatch.setattr("quartet.observe.files.os.fsync", another_writes)
    replace_atomically(path, b"ours")
    assert path.read_bytes() == b"ours" and [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_rows_with_lone_surrogates_survive(tmp_path: Path) -> None:
    rows = RowAppender(tmp_path / "rows.jsonl")
    rows.append({"text": "\ud83d \x00 \u2028"})
    rows.close()
    assert read_rows(tmp_path / "rows.jsonl") == [{"text": "\ud83d \x00 \u2028"}]


def tensorboard_scalars(path: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(path))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss/policy")]


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.log(1, {"loss/policy": 0.5})
    tracker.log(2, {"loss/policy": 0.25})
    assert tensorboard_scalars(tmp_path) == [(1, 0.5), (2, 0.25)], "flushed before close"
    tracker.close()


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


def test_others_get_the_same_names(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl", [TensorBoardTracker(tmp_path / "board")])
    tracker.log(1, {"loss/policy": 0.5})
    with pytest.raises(ValueError, match="unknown metric"):
        tracker.log(2, {"loss/policy": 0.5, "nonsense": 1.0})
    assert tensorboard_scalars(tmp_path / "board") == [(1, 0.5)] and len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    tracker.close()
    with pytest.raises(ValueError, match="closed"):
        tracker.log(2, {"loss/policy": 0.5})


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
