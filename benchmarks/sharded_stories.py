"""PPO on the real story model with every model held by several processes on Ray, beside the same run in one process.

    QUARTET_REALDATA=DIR python benchmarks/sharded_stories.py [--steps 30] [--ways meshes] [--other-seeds 1 2]
    QUARTET_REALDATA=DIR python benchmarks/sharded_stories.py --ways stages --other-seeds --steps 5 --killed

``recipes/story-ppo.yaml`` with a reward model more: the story model's body trained on PandaLM's human pairs
(``--reward-model``, a directory; left out, ``benchmarks/realdata.py reward-model`` makes it, some minutes). In the run
``halves`` actor, critic, reference and reward model have ``sharding.shard: 2`` and two processes each under
``separated``, the engine one; in the run ``meshes`` the actor has ``tensor: 2`` and ``shard: 2`` and four processes,
critic and reference have ``context: 2``, and the reward model ``tensor: 2``; in the run ``stages`` the actor has
``pipeline: 2`` and ``tensor: 2`` and four processes, the critic ``shard: 2``, and the others are whole. These and
``one process`` have the same seed, so they begin with the same stories. Last bits differ; sooner or later a token does,
and from there on they are samples of one experiment. What that alone does show the runs of one process with
``--other-seeds``.

With ``--killed`` each way is run once more: SIGKILL hits the driver when the checkpoint of the third step is written,
``--resume`` goes on, and it is seen whether metrics and weights have the bits of the run that was not killed.

Prints a table of every fifth part of the steps, metrics of the steps before the first token differs, and writes both
into ``--out``/figures.md. Runs are kept there, with a report of each way; a run that is there is not made again.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import arguments, markdown, write_results
from realdata import ROOT, publish, quartet, read_jsonl, reward_model
from safetensors.torch import load_file

ALONE = "one process"
ROLES = ("actor", "critic", "reference", "reward")
WAYS: dict[str, dict[str, dict[str, int]]] = {
    "halves": {role: {"shard": 2} for role in ROLES},
    "meshes": {
        "actor": {"tensor": 2, "shard": 2},
        "critic": {"context": 2},
        "reference": {"context": 2},
        "reward": {"tensor": 2},
    },
    "stages": {"actor": {"pipeline": 2, "tensor": 2}, "critic": {"shard": 2}},
}
"""How the models are cut, by role."""
KILLED_AFTER = 3
"""Steps; in the third the actor is trained for the first time."""
METRICS = ("reward/score_mean", "kl/ref", "loss/value", "policy/entropy", "rollout/length_mean")
FIRST = (
    "reward/score_mean",
    "reward/reward_model",
    "loss/value",
    "critic/grad_norm",
    "loss/policy",
    "policy/grad_norm",
)
FUNCTIONS = ("complete_ending", "hero_stays", "somebody_speaks")
Rows = list[dict[str, Any]]


def overrides(args: Any, judge: Path, seed: int, cuts: dict[str, dict[str, int]] | None) -> list[str]:
    functions = [f"{{type: function, target: 'examples/story_reward.py:{name}', weight: 0.3333}}" for name in FUNCTIONS]
    sections = {
        role: "{" + ", ".join(f"{name}: {size}" for name, size in sizes.items()) + "}"
        for role, sizes in (cuts or {}).items()
    }
    cut = f", sharding: {sections['reward']}" if "reward" in sections else ""
    rewards = ", ".join([*functions, f"{{type: model, path: {judge}, weight: 0.05{cut}}}"])
    sizes = [f"{role}: {{processes: {math.prod((cuts or {}).get(role, {}).values())}}}" for role in ROLES]
    sharded = [
        "cluster={type: ray, cpus_per_process: 0.1}",
        f"placement={{type: separated, {', '.join(['rollout: {processes: 1}', *sizes])}}}",
        *(f"{role}.sharding={section}" for role, section in sections.items() if role != "reward"),
    ]
    return [f"rewards=[{rewards}]", f"steps={args.steps}", f"seed={seed}", *(sharded if cuts else [])]


def command(args: Any, folder: Path, judge: Path, seed: int, cuts: dict[str, dict[str, int]] | None) -> list[str]:
    changes = [
        f"actor.model.path={Path(os.environ['QUARTET_REALDATA']) / 'stories260K'}",
        f"output_dir={folder}",
        f"threads={args.threads}",
        *([f"checkpoint.every_steps={KILLED_AFTER}"] if args.killed else []),
        *overrides(args, judge, seed, cuts),
    ]
    return ["rl", str(ROOT / "recipes" / "story-ppo.yaml"), *changes]


def rows_of(folder: Path) -> Rows:
    """The rows of a run's metrics, from step 1 on."""
    return [row for row in read_jsonl(folder / "metrics.jsonl") if row["step"] > 0]


def run(args: Any, name: str, judge: Path, seed: int) -> Rows:
    folder = args.out / name.replace(" ", "-")
    if not (folder / "summary.json").exists():
        quartet(*command(args, folder, judge, seed, WAYS.get(name)))
    return rows_of(folder)


def kill_and_resume(args: Any, name: str, judge: Path) -> bool:
    """Whether a run that is killed and resumed has the bits of the other in ``--out``."""
    whole, folder = args.out / name, args.out / f"{name}-killed"
    if not (folder / "summary.json").exists():
        words = command(args, folder, judge, 0, WAYS[name])
        driver = subprocess.Popen([sys.executable, "-m", "quartet.cli.main", *words])
        while driver.poll() is None and not (folder / "checkpoints" / f"step_{KILLED_AFTER:08d}").exists():
            time.sleep(0.05)
        driver.kill()
        if driver.wait() != -signal.SIGKILL:
            raise SystemExit(f"the run in {folder} ended before it was killed")
        quartet(*words, "--resume")
    same = [{key: row[key] for key in row.keys() & {*METRICS, *FIRST}} for row in rows_of(folder)]
    if same != [{key: row[key] for key in row.keys() & {*METRICS, *FIRST}} for row in rows_of(whole)]:
        return False
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (folder, whole))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def curves(runs: dict[str, Rows], parts: int = 5) -> list[list[str]]:
    """Each metric's mean over every fifth part of the steps and over all, by run."""
    rows = []
    for metric in METRICS:
        for name, steps in runs.items():
            size = -(-len(steps) // parts)
            found = [[row[metric] for row in steps[i : i + size] if metric in row] for i in range(0, len(steps), size)]
            found.append([row[metric] for row in steps if metric in row])
            rows.append([metric, name, *(f"{statistics.mean(part):.4f}" if part else "" for part in found)])
    # Of the last step, on prompts that were held out.
    ends = {name: [row["eval/score_mean"] for row in steps if "eval/score_mean" in row] for name, steps in runs.items()}
    rows += [
        ["eval/score_mean, at the end", name, *[""] * parts, f"{end[-1]:.4f}"] for name, end in ends.items() if end
    ]
    return rows


def same_stories(one: Rows, other: Rows) -> int:
    """Steps before the first whose stories are of other lengths or have other rewards; those of a model that is cut
    differ in the seventh digit."""
    same = [
        a["rollout/tokens"] == b["rollout/tokens"]
        and math.isclose(a["reward/score_mean"], b["reward/score_mean"], rel_tol=1e-6)
        for a, b in zip(one, other, strict=True)
    ]
    return same.index(False) if False in same else len(same)


def apart(runs: dict[str, Rows], way: str, steps: int) -> float:
    name = "reward/score_mean"
    pairs = zip(runs[way][:steps], runs[ALONE][:steps], strict=True)
    return max((abs(ours[name] / one[name] - 1) for ours, one in pairs), default=0.0)


def first_steps(cut: Rows, alone: Rows, num: int) -> list[list[str]]:
    rows = []
    for ours, one in zip(cut[:num], alone[:num], strict=True):
        for metric in FIRST:
            if metric in one:
                rows.append([str(one["step"]), metric, f"{ours[metric]:.7g}", f"{one[metric]:.7g}"])
    return rows


def main(arguments_given: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--other-seeds", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--killed", action="store_true", help="each way once more, killed and resumed")
    parser.add_argument("--reward-model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/sharded-stories"))
    parser.set_defaults(threads=1)
    args = parser.parse_args(arguments_given)
    if "QUARTET_REALDATA" not in os.environ:
        parser.error("set QUARTET_REALDATA to the folder of the data")
    args.steps, args.out = 3 if args.smoke else args.steps, args.out.resolve()
    if args.killed and args.steps <= KILLED_AFTER:
        parser.error(f"--killed needs more than {KILLED_AFTER} steps")
    judge = args.out / "pandalm" / "run" / "model" if args.reward_model is None else args.reward_model.resolve()
    os.chdir(ROOT)  # recipes name reward functions relative to it
    args.out.mkdir(parents=True, exist_ok=True)
    if not judge.exists():
        reward_model(Path(os.environ["QUARTET_REALDATA"]), args.out, [f"threads={args.threads}"])
    runs = {name: run(args, name, judge, 0) for name in (*args.ways, ALONE)}
    runs |= {f"seed {seed}": run(args, f"seed {seed}", judge, seed) for seed in args.other_seeds}
    parts = [*(f"fifth {i + 1}" for i in range(5)), "all"]
    notes, same = [], {way: same_stories(runs[way], runs[ALONE]) for way in args.ways}
    for way, steps in same.items():
        first = markdown(["step", "metric", way, ALONE], first_steps(runs[way], runs[ALONE], min(steps + 1, 4)))
        notes += [f"{way}: stories are the same in the first {steps} of {args.steps} steps:", "", first, ""]
        notes += [f"Largest relative difference of the mean reward in these steps: {apart(runs, way, steps):.1e}.", ""]
        if args.killed:
            bits = "the bits of the run that was not" if kill_and_resume(args, way, judge) else "OTHER BITS"
            notes += [f"{way}, killed behind step {KILLED_AFTER} and resumed: {bits}.", ""]
    publish(args.out, "Stories by models in parts", ["metric", "run", *parts], curves(runs), notes)
    write_results(args, {"sharded_stories": {"same_stories": same, "runs": runs}})
    for way in args.ways:
        quartet("report", str(args.out / way))


if __name__ == "__main__":
    main()
