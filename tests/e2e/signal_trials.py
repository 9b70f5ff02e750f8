"""Signals at random moments and gaps, hundreds of times, on a machine that is busy: none may be without effect.

``python tests/e2e/signal_trials.py [--trials 200] [--seed 0] [--jobs rl sft eval] [--load 1] [--threads 1]`` runs tiny
jobs without an end in processes of their own and sends each two SIGINT (or with ``--preempt`` SIGTERM, SIGUSR1 and
others), at any moment from the first on. A trial fails where the process does not end within a few seconds, ends with
another exit status, prints a traceback, or leaves ``run.json`` saying something else than ``interrupted``. Failures and
their logs stay in ``--folder``. Not a test: ``test_requeue.py`` has a handful of these.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from conftest import Processes, World, rl_recipe, sft_recipe

END_S = 20.0
EVALUATION = {
    "model": {"path": "model"},
    "data": {"path": "prompts.jsonl"},
    "rewards": [{"type": "function", "target": "rewards.py:digits"}],
    "sampling": {"temperature": 1.0, "max_new_tokens": 100},
    "samples_per_prompt": 500,
    "engine": {"max_running": 8},
}
PREEMPTIONS = (
    (signal.SIGTERM,),
    (signal.SIGUSR1,),
    (signal.SIGTERM, signal.SIGTERM),
    (signal.SIGUSR1, signal.SIGTERM),
    (signal.SIGINT, signal.SIGTERM),
)


def has_ended(pid: int) -> bool:
    """Also where nobody has asked for its status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def trial(processes: Processes, world: World, rng: random.Random, job: str, name: str, preempt: bool) -> list[str]:
    """What went wrong."""
    log = world.path / f"{name}.log"
    numbers = rng.choice(PREEMPTIONS) if preempt else (signal.SIGINT, signal.SIGINT)
    gap = rng.choice([0.0, rng.uniform(0, 0.002), rng.uniform(0, 0.02), rng.uniform(0, 0.5)])
    pid = processes.start(job, f"endless-{job}.yaml", f"output_dir=runs/{name}", cwd=world.path, output=log)
    time.sleep(rng.uniform(0.05, 2.5))  # the forked process needs a moment until it is a command
    for number in numbers:
        if not has_ended(pid):
            os.kill(pid, number)
        time.sleep(gap)
    sent = time.monotonic()
    while not has_ended(pid) and time.monotonic() - sent < END_S:
        time.sleep(0.01)
    wrong = []
    if not has_ended(pid):
        wrong.append(f"still running {END_S:g} s later")
        os.kill(pid, signal.SIGKILL)
    status, run = processes.wait(pid), world.path / "runs" / name / "run.json"
    if not wrong and status not in {128 + number for number in numbers}:
        wrong.append(f"exit status {status}")
    if run.exists() and (said := json.loads(run.read_text())["status"]) != "interrupted":
        wrong.append(f"status {said}")
    if "Traceback" in log.read_text():
        wrong.append("a traceback")
    if not wrong:
        log.unlink()
    shutil.rmtree(run.parent, ignore_errors=True)
    return [f"{name}: {[number.name for number in numbers]}, gap {1000 * gap:.1f} ms: {what}" for what in wrong]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", nargs="+", default=["rl", "sft", "eval"], choices=["rl", "sft", "eval"])
    parser.add_argument("--load", type=int, default=1, help="processes that do nothing but compute")
    parser.add_argument("--threads", type=int, default=1, help="of OpenMP in every job")
    parser.add_argument("--preempt", action="store_true")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="quartet-signals-"))
    folder.mkdir(parents=True, exist_ok=True)
    world, rng = World(folder), random.Random(arguments.seed)
    threads = {"threads": arguments.threads}
    world.recipe("endless-rl", rl_recipe(steps=100_000, **threads))
    world.recipe("endless-sft", sft_recipe(steps=100_000, **threads))
    world.recipe("endless-eval", EVALUATION | threads)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(arguments.load)]
    processes, failed = Processes(), Counter[str]()
    try:
        for number in range(arguments.trials):
            job = arguments.jobs[number % len(arguments.jobs)]
            for line in trial(processes, world, rng, job, f"{job}-{number}", arguments.preempt):
                failed[job] += 1
                print(line, flush=True)
    finally:
        processes.close()
        for process in busy:
            process.kill()
    print(f"{arguments.trials} trials, {failed.total()} failures {dict(failed)}; logs of failures in {folder}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
