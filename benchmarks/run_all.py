"""Every figure of docs/benchmarks.md in one go, the most important first; each part has a time limit.

    python benchmarks/run_all.py [--out DIR] [--only PART ...] [--set core|extra|all] [--threads 2] [--smoke]
    python benchmarks/render.py DIR [--into docs/benchmarks.md]

Makes the peers' environments first, where they are missing. A part writes ``DIR/<part>.json`` as it goes; run again,
finished parts are skipped (``--again`` measures them anew).
What a part had when its time was up stays there, marked as incomplete. Use an idle machine: nothing else may run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from peers.environments import ENVIRONMENTS, make
from sides import HERE, work_folder


@dataclass(frozen=True)
class Part:
    """``minutes`` is the limit, about twice what two idle cores with AVX-512 need."""

    name: str
    command: tuple[str, ...]
    minutes: float


def _part(name: str, minutes: float, command: str) -> Part:
    return Part(name, tuple(command.split()), minutes)


CORE = (
    _part("step-small-grpo", 8, "rl_step.py --cases small/grpo/128 small/grpo/64"),
    _part("rollout-small-mixed", 12, "rollout.py --models small --scenarios mixed --sides native generate vllm "
          "vllm-compiled"),
    _part("rollout-small-shared", 9, "rollout.py --models small --scenarios shared --sides native generate vllm "
          "vllm-compiled"),
    _part("update", 4, "update.py"),
    _part("prefix", 4, "prefix.py"),
    _part("step-prompts", 8, "rl_step.py --cases small/grpo/64/512 tiny/grpo/64/512"),
    _part("step-small-rloo", 8, "rl_step.py --cases small/rloo/128 small/rloo/64"),
    _part("step-tiny", 6, "rl_step.py --cases tiny/grpo/64 tiny/grpo/128 tiny/rloo/64 tiny/rloo/128"),
    _part("rollout-tiny", 8, "rollout.py --models tiny --sides native generate vllm vllm-compiled"),
    _part("preference", 15, "preference.py"),
    _part("fusions", 3, "fusions.py --threads 1"),
    _part("memory", 5, "memory.py"),
    _part("continuous-tiny", 4, "rollout.py --models tiny --sides native continuous --repeats 1"),
    _part("floor-small", 2, "floor.py --model small"),
    _part("floor-tiny", 2, "floor.py --model tiny"),
)  # fmt: skip
EXTRA = (
    _part("rollout-processes", 8, "rollout.py --models small --scenarios mixed --repeats 1 --sides native "
          "vllm-processes vllm-compiled-processes"),
    _part("step-trl-default", 5, "rl_step.py --cases small/grpo/128 --sides native trl-default --repeats 1"),
    _part("update-bf16", 8, "update.py --dtypes bf16 --longest 64 --repeats 3"),
    _part("step-bf16", 15, "rl_step.py --cases small/grpo/64 --dtypes bf16 --repeats 1"),
    _part("rollout-bf16", 20, "rollout.py --models small --scenarios mixed --dtypes bf16 --repeats 1 --sides native "
          "generate vllm"),
    _part("continuous-small", 12, "rollout.py --models small --sides native continuous --repeats 1"),
    _part("dispatch", 4, "dispatch.py"),
    _part("memory-tiny", 5, "memory.py --model tiny --factors 1 2 4 8 16 32 64"),
)  # fmt: skip
SETS = {"core": CORE, "extra": EXTRA, "all": (*CORE, *EXTRA)}


def run(part: Part, out: Path, threads: int, smoke: bool) -> str:
    """Runs one part; returns how it ended."""
    partial = out / f"{part.name}.partial.json"
    script, *options = part.command
    command = [sys.executable, str(HERE / script), *options, "--threads", str(threads), "--json", str(partial)]
    with open(out / f"{part.name}.log", "w", encoding="utf-8") as log:
        # A session of its own, so that the sides end with it when its time is up.
        process = subprocess.Popen(
            [*command, *(["--smoke"] if smoke else [])], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(part.minutes * 60)
        except subprocess.TimeoutExpired:
            _end(process)
            return f"out of time after {part.minutes:.0f} min"
        except BaseException:
            _end(process)
            raise
    if code:
        return f"failed, see {log.name}"
    partial.replace(out / f"{part.name}.json")
    return "done"


def _end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=work_folder("results"))
    parser.add_argument("--only", nargs="+", metavar="PART", choices=[part.name for part in SETS["all"]])
    parser.add_argument("--set", choices=SETS, default="core")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="measure finished parts anew")
    parser.add_argument("--smoke", action="store_true", help="a few tokens of everything; figures mean nothing")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    # Parts live in sessions of their own, so being asked to stop must be passed on to them.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for environment in ENVIRONMENTS:
        make(environment)
    parts = [part for part in SETS["all"] if part.name in args.only] if args.only else SETS[args.set]
    for part in parts:
        if (args.out / f"{part.name}.json").exists() and not args.again:
            print(f"{part.name}: already there", flush=True)
            continue
        begun = time.monotonic()
        print(f"{part.name}: {' '.join(part.command)}", flush=True)
        ended = run(part, args.out, args.threads, args.smoke)
        print(f"{part.name}: {ended}, {time.monotonic() - begun:.0f} s", flush=True)
        (args.out / "run.json").write_text(json.dumps({"parts": [p.name for p in parts], "last": part.name}))


if __name__ == "__main__":
    main()
