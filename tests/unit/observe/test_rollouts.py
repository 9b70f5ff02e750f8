"""The rollout store."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.config.errors import UserError
from quartet.observe.rollouts import (
    RolloutRecord,
    list_rollout_steps,
    read_rollout_step,
    rollout_rows,
    rollouts_path,
    truncate_rollouts_after,
    write_rollout_step,
)

RECORD = RolloutRecord(
    sequence_id="3-0-1",
    prompt_id="p0",
    response_index=1,
    policy_version=2,
    prompt_ids=[5, 6],
    response_ids=[7, 8, 9],
    prompt_tokens=["</script>", "\x00\ud83d"],
    response_tokens=["שלום", '"<img>', "\u2028"],
    prompt_text="</script>\x00",
    response_text='שלום"<img>\u2028',
    finish_reason="stop",
    rewards={"model": 0.1, "style": None, "odd": math.inf},
    score=0.30000000000000004,
    group="3-0",
    columns={"advantages": [0.1, -0.2, 1e-30], "ratio": [1.0, math.inf, -math.inf]},
)


def test_everything_comes_back(tmp_path: Path) -> None:
    plain = replace(RECORD, sequence_id="other", rewards={}, score=None, columns={}, trajectory_id="t1")
    path = write_rollout_step(tmp_path / "rollouts", 12, [RECORD, plain])
    assert path.name == "step_000012.jsonl.gz"
    assert read_rollout_step(tmp_path / "rollouts", 12) == [RECORD, plain]
    assert RECORD.trajectory_id == "3-0-1"


@given(st.text(st.characters()), st.floats(allow_nan=False))
def test_any_text_and_any_float(tmp_path_factory: pytest.TempPathFactory, text: str, value: float) -> None:
    directory = tmp_path_factory.mktemp("store")
    record = replace(RECORD, response_text=text, response_tokens=[text] * 3, columns={"kl": [value] * 3})
    write_rollout_step(directory, 0, [record])
    assert read_rollout_step(directory, 0) == [record]


def test_truncation_removes_later_steps_and_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_file, written = os.replace, []
    monkeypatch.setattr(os, "replace", lambda *paths: (written.append(paths[0]), replace_file(*paths)))
    for step in (1, 2, 3, 1_000_000):
        write_rollout_step(tmp_path, step, [RECORD])
    assert len(set(written)) == 4
    for path in written:  # as if killed before the rename, of steps that are kept, too
        Path(path).write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    assert list_rollout_steps(tmp_path) == [1, 2, 3, 1_000_000]
    assert truncate_rollouts_after(tmp_path, 2) == [3, 1_000_000]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "notes.txt",
        "step_000001.jsonl.gz",
        "step_000002.jsonl.gz",
    ]
    assert truncate_rollouts_after(tmp_path / "missing", 2) == []
    assert list_rollout_steps(tmp_path / "missing") == []


@pytest.mark.parametrize("keep", [0, 5, 40, -9, -1])
def test_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    write_rollout_step(tmp_path, 1, [RECORD])
    path = rollouts_path(tmp_path, 1)
    data = path.read_bytes()
    path.write_bytes(data[:keep] or b"\x00")
    with pytest.raises(UserError, match="damaged") as caught:
        read_rollout_step(tmp_path, 1)
    assert str(path) in caught.value.found


@pytest.mark.parametrize(
    "wrong",
    [{"prompt_tokens": ["one"]}, {"response_tokens": []}, {"columns": {"kl": [0.0]}}],
)
def test_lengths_must_agree(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="for"):
        replace(RECORD, **wrong)


def test_equal_records_give_equal_bytes(tmp_path: Path) -> None:
    first = write_rollout_step(tmp_path / "a", 1, [RECORD]).read_bytes()
    second = write_rollout_step(tmp_path / "b", 1, [RECORD]).read_bytes()
    assert first == second


def test_rows_of_kept_rollouts(tmp_path: Path) -> None:
    def record(n: int) -> RolloutRecord:
        columns = {"advantages": [1.0, 2.0, 9.0], "loss_mask": [1.0, 1.0, 0.0]}
        pieces = ["a", "\ud83d", "b"]
        return RolloutRecord(
            f"s{n}", "p0", n, 4, [1], [2, 3, 4], ["x"], pieces, "x", "".join(pieces), "stop", {"judge": None}, 0.5, "g",
            columns,
        )  # fmt: skip

    write_rollout_step(tmp_path, 7, [record(0), record(1), record(2)])
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
