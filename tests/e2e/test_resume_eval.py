"""`quartet eval` killed at any moment and resumed gives the answers and figures of one that never stopped."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

COUNTED = '''
import os, signal

def counted(completions, **_):
    """Notes how many it is asked about; kills the command at the second call where a file says so."""
    with open("asked.txt", "a") as file:
        file.write(f"{len(completions)}\\n")
    if os.path.exists("armed") and len(open("asked.txt").readlines()) == 2:
        keeper = open(f"/proc/{os.getppid()}/stat").read()  # of this process; its parent is the command
        os.kill(int(keeper.rpartition(")")[2].split()[1]), signal.SIGKILL)
    return [float(text[:1].isdigit()) for text in completions]
'''


def recipe(**changes: Any) -> dict[str, Any]:
    return {
        "threads": 1,
        "model": {"path": "model"},
        "data": {"path": "prompts.jsonl"},
        "rewards": [
            {"type": "function", "target": "counted.py:counted"},
            {"type": "model", "path": "reward_model"},
        ],
        "sampling": {"temperature": 1.0, "max_new_tokens": 8},
        "samples_per_prompt": 4,
        "engine": {"max_running": 8},
        **changes,
    }


@pytest.fixture
def whole(world: Any, quartet: Any) -> Path:
    (world.path / "counted.py").write_text(COUNTED, encoding="utf-8")
    path: Path = world.path / "runs" / "eval-whole"
    if not path.exists():
        outcome = quartet("eval", world.recipe("eval-killed", recipe()), f"output_dir={path}")
        assert outcome.status == 0, outcome.err
    (world.path / "asked.txt").unlink(missing_ok=True)
    return path


def same(one: Path, other: Path) -> None:
    assert (one / "answers.jsonl").read_bytes() == (other / "answers.jsonl").read_bytes()
    metrics = [json.loads((path / "summary.json").read_text())["stages"][0]["metrics"] for path in (one, other)]
    assert metrics[0] == metrics[1]


def kept(path: Path, what: str) -> list[str]:
    rows = [json.loads(line) for line in (path / "finished" / "answers.jsonl").read_text().splitlines()]
    return [row["sample"] for row in rows if what in row]


def test_a_kill_in_generation(world: Any, whole: Path, processes: Any) -> None:
    path, log = world.path / "runs" / "eval-40", world.path / "eval-40.log"
    command = ("eval", "eval-killed.yaml", f"output_dir={path}")
    assert processes.run(*command, cwd=world.path, output=log, kill=("decode", 40)) == -signal.SIGKILL
    before = kept(path, "token_ids")
    assert 0 < len(before) < 96
    assert processes.run(*command, "--resume", cwd=world.path, output=log) == 0, log.read_text()
    after = kept(path, "token_ids")
    assert after[: len(before)] == before and len(after) == len(set(after)) == 96
    same(whole, path)


def test_a_kill_while_answers_are_scored(world: Any, whole: Path, processes: Any) -> None:
    path, log = world.path / "runs" / "eval-scoring", world.path / "eval-scoring.log"
    command = ("eval", "eval-killed.yaml", f"output_dir={path}")
    (world.path / "armed").touch()
    assert processes.run(*command, cwd=world.path, output=log) == -signal.SIGKILL, log.read_text()
    (world.path / "armed").unlink()
    assert processes.run(*command, "--resume", cwd=world.path, output=log) == 0, log.read_text()
    assert (world.path / "asked.txt").read_text().split() == ["64", "32", "32"]
    assert len(kept(path, "token_ids")) == len(kept(path, "rewards")) == 96
    same(whole, path)
