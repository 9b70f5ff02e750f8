"""Files of a run that are read while they are written: tails, the terminal's screen, replays."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from test_report import RECORDS

from quartet.config.errors import UserError
from quartet.extras.report.compare import kept_trajectory, replay_lines
from quartet.extras.report.watch import Watch
from quartet.observe.files import FileTail, truncate_after
from quartet.observe.rollouts import write_rollout_step
from quartet.observe.trackers import JsonlTracker, metrics_from_row

MakeRun = Callable[..., Path]


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_tail_gives_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = FileTail(path, metrics_from_row)
    assert tail.poll() == [] and tail.trouble is None, "there is no file yet"
    append(path, '{"step":1,"time_s":1.0}\n{"step":2,"ti')
    assert [row["step"] for row in tail.poll()] == [1]
    append(path, 'me_s":2.0}')
    assert tail.poll() == [], "its line feed is missing"
    append(path, "\n")
    assert [row["step"] for row in tail.poll()] == [2] and tail.poll() == []


def test_tail_passes_over_damage_and_other_versions(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = FileTail(path, metrics_from_row)
    for bad in ("nonsense", "[1]", '{"step":"x","time_s":1.0}', '{"time_s":1.0}', "\udcff", "[" * 100_000):
        with path.open("ab") as file:
            file.write(bad.encode("utf-8", "surrogateescape") + b'\n{"step":1,"time_s":1.0}\n')
        assert [row["step"] for row in tail.poll()] == [1], bad
        assert tail.trouble is not None and "metrics.jsonl, line " in tail.trouble


def test_tail_of_what_a_resume_cuts_back_or_removes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tail = FileTail(path, metrics_from_row)
    for step in (1, 2, 3):
        tracker.log(step, {"loss/policy": 0.0})
    tracker.close()
    assert len(tail.poll()) == 3 and not tail.restarted
    truncate_after(path, 2)
    assert [row["step"] for row in tail.poll()] == [1, 2] and tail.restarted
    assert tail.poll() == [] and not tail.restarted
    path.unlink()
    assert tail.poll() == []
    append(path, '{"step":9,"time_s":1.0}\n')
    assert [row["step"] for row in tail.poll()] == [9]
    path.unlink()
    path.mkdir()
    assert tail.poll() == [] and "could not be read: Is a directory" in str(tail.trouble)


def shown(watched: Watch, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(watched.screen())
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_screen_of_a_run(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path / "run", steps=6)
    (run / "rl" / "recipe.yaml").write_text("steps: 8\n")
    alarm = {"step": 4, "text": "scores part \x1b[31m", "examples": []}
    (run / "rl" / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    watched = Watch(run)
    assert watched.poll() is False, "it has ended"
    text = shown(watched)
    for part in (
        "quickstart 2026-03-01",
        "done",
        "step 6 of 8",
        "reward/score_mean",
        "samples of step 6",
    ):
        assert part in text, part
    assert "ALARM at step 4: scores part \\x1b[31m" in text and "\x1b" not in text
    assert max(map(len, shown(watched, 80).splitlines())) <= 80


def test_replay_of_an_episode_tells_observations_from_tokens(tmp_path: Path) -> None:
    write_rollout_step(tmp_path / "rollouts", 7, RECORDS)
    (tmp_path / "run.json").write_text("{}")
    lines = list(replay_lines(kept_trajectory(tmp_path, 7, 0)))
    assert [line.split(maxsplit=2) for line in lines if "read, " in line] == [["2", '"[higher]"', "read, not sampled"]]
    assert sum("sequence" in line for line in lines) == 2 and any('"three"' in line for line in lines)
    assert lines[-1].startswith("score 0 (environment 1)")
    for step, sample, what in ((7, 2, "no sample 2(?s:.)*0 to 1"), (8, 0, "no rollouts of step 8")):
        with pytest.raises(UserError, match=what):
            kept_trajectory(tmp_path, step, sample)


def test_replay_reads_columns_out(tmp_path: Path, make_run: MakeRun) -> None:
    (record,) = trajectory = kept_trajectory(make_run(tmp_path / "run", steps=2), None, 5)
    lines = list(replay_lines(trajectory))
    assert len(lines) == len(record.response_ids) + 4
    assert [float(word) for word in lines[2].split()[2:6]] == pytest.approx(
        [record.columns[name][0] for name in ("rollout_logprobs", "token_rewards", "advantages", "values")], rel=1e-3
    )
    assert float(lines[-1].rpartition(" ")[2]) == pytest.approx(sum(record.columns["token_rewards"]), rel=1e-3)


def test_what_vanishes_is_said_and_the_rest_stays_on_the_screen(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path / "run", steps=3)
    watched = Watch(run)
    watched.poll()
    (run / "rl" / "rollouts" / "step_000004.jsonl.gz").write_bytes(b"half")
    watched.poll()
    assert "a rollout file is damaged" in shown(watched)
    shutil.move(run, tmp_path / "moved")
    watched.poll()
    assert "note: the run cannot be read" in shown(watched) and "step 3" in shown(watched)
    with pytest.raises(UserError, match="no such run"):
        Watch(run)
