"""A shortened quickstart on a quiet machine and beside one busy process, by how OpenMP's threads wait for each other.

    python benchmarks/busy.py [--minutes 5.5] [--smoke] [--full]

Every run is a process of its own: the quickstart's model, 12 steps of SFT, 6 of a reward model, one of PPO. Runs take
turns, so many rounds as fit into the time; medians. *Beside*: one process that computes without end, started for the
run and ended with it. *CPU*: seconds of all the run's threads, which grow where they spin. *Bits*: whether all models
that it leaves are those of torch's own setting. Needs a machine that is otherwise idle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import arguments, markdown, write_results

from quartet.observe.process import WAITING

SETTINGS: dict[str, dict[str, str]] = {
    "torch's own": {},
    "spin 10000": {"GOMP_SPINCOUNT": "10000"},
    "spin 3000": {"GOMP_SPINCOUNT": "3000"},
    "quartet": WAITING,
    "one thread": {"OMP_NUM_THREADS": "1"},
}
_KNOBS = {name for setting in SETTINGS.values() for name in setting}


def quickstart(smoke: bool, full: bool) -> dict[str, Any]:
    """Seconds of each stage, CPU seconds, and the digest of the models."""
    from quartet.extras.quickstart import checker, recipes, task
    from quartet.extras.quickstart.run import Quickstart

    class Short(Quickstart):
        """Pairs are made, not sampled: a policy of few steps gets no answer right."""

        def _pairs(self) -> tuple[Path, Path]:
            groups = [
                (prompt, [task.work(*task.operands(prompt), habit) for habit in ("careful", "forgetful", "eager")])
                for prompt in task.toy_prompts(1, 64 if smoke else 200)
            ]
            rows = checker.judge_pairs(0, groups)
            return self._rows("pairs_train", rows), self._rows("pairs_held_out", rows[:32])

    size = recipes.Size(
        demonstrations=2_000,
        sft_steps=2 if smoke else 12,
        reward_model_epochs=1,
        rl_prompts=64,
        rl_steps=1,
        evaluation_prompts=8,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        made = Quickstart(0, path).run() if full else Short(0, path, size=size).run()
        weights = b"".join(file.read_bytes() for file in sorted(made.path.rglob("model.safetensors")))
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = {stage["name"]: stage["seconds"] for stage in made.summary["stages"]}
    return {
        "seconds": {name: seconds[name] for name in ("sft", "reward_model", "rl")} | {"all": made.summary["seconds"]},
        "cpu": used.ru_utime + used.ru_stime,
        "weights": hashlib.sha256(weights).hexdigest(),
    }


@contextlib.contextmanager
def busy_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield process
        finally:
            process.kill()


def run(setting: dict[str, str], beside: bool, options: list[str]) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name not in _KNOBS} | setting
    with busy_process() if beside else contextlib.nullcontext():
        command = [sys.executable, __file__, "--child", *options]
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if said.returncode:
        sys.exit(said.stderr)
    found: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    return found


def table(runs: list[dict[str, Any]]) -> str:
    """Medians by setting, quiet and beside; ratios are to the quiet median of torch's own setting."""

    def median(setting: str, beside: bool, what: str) -> float:
        chosen = [r for r in runs if r["setting"] == setting and r["beside"] == beside]
        return statistics.median(r["cpu"] if what == "cpu" else r["seconds"][what] for r in chosen)

    first, rows = runs[0], []
    for setting in dict.fromkeys(r["setting"] for r in runs):
        cells = [setting]
        for beside in (False, True):
            cells += [f"{median(setting, beside, what):.1f}" for what in ("sft", "reward_model", "rl", "all", "cpu")]
            cells.append(f"{median(setting, beside, 'all') / median(first['setting'], False, 'all'):.2f}")
        weights = {r["weights"] for r in runs if r["setting"] == setting}
        rows.append([*cells, "equal" if weights == {first["weights"]} else "others"])
    names = ("SFT", "reward model", "RL", "all", "CPU", "ratio")
    return markdown(["setting", *(f"{name}, {where}" for where in ("quiet", "beside") for name in names), "bits"], rows)


def main() -> None:
    parser = arguments(__doc__, repeats=9)
    parser.add_argument("--minutes", type=float, default=5.5, help="no round begins that would end later")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--full", action="store_true", help="the whole quickstart, minutes a run")
    parser.add_argument("--child", action="store_true", help="one run, in this process")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(quickstart(args.smoke, args.full)))
        return
    begun, longest, runs = time.monotonic(), 0.0, list[dict[str, Any]]()
    for round_ in range(1 if args.smoke else args.repeats):
        if round_ and time.monotonic() - begun + longest > 60 * args.minutes:
            break
        round_began = time.monotonic()
        for setting in args.settings:
            for beside in (False, True):
                found = run(SETTINGS[setting], beside, ["--smoke"] * args.smoke + ["--full"] * args.full)
                runs.append({"round": round_, "setting": setting, "beside": beside, **found})
                where = "beside a busy process" if beside else "quiet"
                print(f"{setting}, {where}: {found['seconds']['all']:.1f} s", file=sys.stderr, flush=True)
        longest = max(longest, time.monotonic() - round_began)
    print(f"{runs[-1]['round'] + 1} rounds, load {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores\n")
    print(table(runs))
    write_results(args, {"busy": runs})


if __name__ == "__main__":
    main()
