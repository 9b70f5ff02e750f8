"""A run that is watched in a terminal and as a live page while another process writes it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from quartet.extras.report.build import ReportLimits, collect_run
from quartet.extras.report.watch import LiveServer

STEPS = 10


def read_all(descriptor: int, into: list[bytes]) -> None:
    try:
        while data := os.read(descriptor, 65536):
            into.append(data)
    except OSError:  # the terminal's other end is closed
        return


def follow(url: str, limit_s: float = 120.0) -> list[dict[str, Any]]:
    """All news until the run has ended, as the page asks for them."""
    news: list[dict[str, Any]] = []
    end, after = time.monotonic() + limit_s, 0
    while not any(piece.get("run", {}).get("status") == "done" for piece in news):
        assert time.monotonic() < end, news
        with urllib.request.urlopen(f"{url}news?after={after}", timeout=30) as answer:
            found = json.load(answer)
        assert not any("reload" in piece for piece in found["news"])
        news, after = news + found["news"], found["next"]
        time.sleep(0.3)
    return news


def test_a_run_is_watched_while_it_writes(world: Any, recipes: Any, processes: Any, quartet: Any) -> None:
    path: Path = world.path / "runs" / "watched"
    recipe = world.recipe("watched", recipes["rl"]("grpo", steps=STEPS, log={"rollouts_every": 1}))
    running = processes.start("rl", recipe, f"output_dir={path}", cwd=world.path, output=world.path / "watched.txt")
    while not (path / "run.json").exists():
        time.sleep(0.02)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "quartet", "watch", str(path), "--every", "0.2"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    screens: list[bytes] = []
    with (
        LiveServer(path) as server,
        subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as watching,
    ):
        os.close(theirs)
        for work in (
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True),
            threading.Thread(target=read_all, args=(ours, screens), daemon=True),
        ):
            work.start()
        try:
            news = follow(server.url)
            assert watching.wait(timeout=60) == 0, "it ends with the run"
        finally:
            server.shutdown()
            watching.terminate()
    os.close(ours)
    assert processes.wait(running) == 0
    text = b"".join(screens).decode()
    assert (
        f"step {STEPS} of {STEPS}" in text and "done" in text and "samples of step" in text and "Traceback" not in text
    )

    stage = collect_run(path, ReportLimits())["stages"][0]
    metrics = [piece["metrics"] for piece in news if piece.get("metrics")]
    assert len(metrics) > 1 and metrics[-1] == stage["metrics"], "the news end with what a page shows afterwards"
    tokens = {step for piece in news if piece.get("rollouts") for step in piece["rollouts"]["steps"]}
    assert tokens == set(range(1, STEPS + 1)) == set(stage["rollouts"]["steps"])
    assert "rollout/repetition_frac" in stage["metrics"]["series"]

    once = quartet("watch", path, "--once")
    assert once.status == 0 and f"step {STEPS} of {STEPS}" in once.out and not once.err
    replayed = quartet("replay", path, "--step", STEPS, "--sample", 1)
    assert replayed.status == 0 and "score" in replayed.out.splitlines()[-1]
    quartet("compare", path).expect_user_error("2 to 10 different runs")
    quartet("watch", world.path / "nowhere").expect_user_error("no such run")
