"""False alarms of the checks of a run's health: how many healthy runs each of them would have called unwell.

    python benchmarks/health.py [--train DIR] [RUN …]

Healthy are the recorded curves of tests/golden, which have few steps, and the runs given (directories with a
metrics.jsonl, or with stages that have one). ``--train`` makes such runs: the quickstart's model, after SFT, by every
method of RL. Prints the rows of the table in docs/how-to/not-learning.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from quartet.config import algorithms
from quartet.config.common import ModelConfig, OptimConfig, SamplingConfig, TrainConfig
from quartet.config.recipe import ActorConfig, CriticConfig, RLRecipe, RolloutConfig
from quartet.config.run import LogConfig
from quartet.extras.quickstart import recipes, task
from quartet.extras.quickstart.run import Quickstart
from quartet.observe.health import CHECKS, examine_health
from quartet.observe.trackers import read_metrics

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
METHODS = (
    *("PPO", "GRPO", "DrGRPO", "DAPO", "RLOO", "ReMax", "ReinforcePlusPlus", "ReinforcePlusPlusBaseline", "GSPO"),
    *("CISPO", "SAPO", "GMPO", "GPG", "OPO", "GDPO", "BestOfN", "OnlineDPO", "PassAtK", "OptimalTokenBaseline"),
)
Curves = Mapping[str, Sequence[Mapping[str, float]]]


def recorded_curves() -> Curves:
    """Those of tests/golden, by their names."""
    found: dict[str, Sequence[Mapping[str, float]]] = {}
    for name in ("golden", "quickstart_short"):
        curves = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))["curves"]
        found |= {f"{name}/{curve}": rows for curve, rows in curves.items()}
    return found


def near(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
    """Share of the right answer's characters that are at their places."""
    wanted = [task.work(*task.operands(prompt)) for prompt in prompts]
    return [
        sum(a == b for a, b in zip(right, text, strict=False)) / max(len(right), len(text))
        for right, text in zip(wanted, completions, strict=True)
    ]


def train_healthy(path: Path) -> list[Path]:
    """Runs of every method from one SFT of the quickstart's model; returns their directories."""
    import quartet

    size = recipes.Size(demonstrations=8_000, sft_steps=130, pair_prompts=60, rl_steps=12, evaluation_prompts=16)
    if not (path / "quickstart" / "rl" / "summary.json").exists():
        Quickstart(0, path / "quickstart", size=size).run()
    runs = [path / "quickstart"]
    for method in METHODS:
        runs.append(path / method)
        recipe = RLRecipe(
            output_dir=str(runs[-1]),
            actor=ActorConfig(
                model=ModelConfig(path=str(path / "quickstart" / "sft" / "model")),
                train=TrainConfig(optim=OptimConfig(lr=3e-4)),
            ),
            critic=CriticConfig(train=TrainConfig(optim=OptimConfig(lr=1e-3)), warmup_steps=1),
            algorithm=getattr(algorithms, method)(),
            rollout=RolloutConfig(sampling=SamplingConfig(max_new_tokens=recipes.MAX_NEW_TOKENS)),
            steps=12,
            prompts_per_step=8,
            responses_per_prompt=4,
            minibatches=2,
            log=LogConfig(tensorboard=False, rollouts_every=100),
        )
        rewards = [near, lambda completions, **_: [1.0 - len(c) / 100 for c in completions]]
        chosen = rewards if method == "GDPO" else rewards[:1]
        quartet.RLTrainer(recipe, rewards=chosen, prompts=task.toy_prompts(0, 64), resume="auto").train()
    return runs


def false_alarms(curves: Curves) -> dict[str, list[str]]:
    """The names of the curves that each check finds something in."""
    found: dict[str, list[str]] = {check.name: [] for check in CHECKS}
    for name, rows in curves.items():
        for check in examine_health(rows).findings:
            found[check].append(name)
    return found


def judged(curves: Curves) -> dict[str, int]:
    """How many of the curves have as many steps of its metrics as each check needs."""
    return {
        check.name: sum(
            sum(all(name in row for name in check.needs) for row in rows) >= check.steps for rows in curves.values()
        )
        for check in CHECKS
    }


def main() -> None:
    curves, arguments = dict(recorded_curves()), sys.argv[1:]
    runs = train_healthy(Path(arguments[1])) if arguments[:1] == ["--train"] else []
    for run in [*runs, *map(Path, arguments[2 if runs else 0 :])]:
        for path in sorted({*run.glob("metrics.jsonl"), *run.glob("*/metrics.jsonl")}):
            curves[str(path.parent)] = read_metrics(path)
    alarms, long_enough = false_alarms(curves), judged(curves)
    print(f"{len(curves)} runs\n")
    print("| check | finds | means | try | false alarms |\n|---|---|---|---|---|")
    for check in CHECKS:
        count = f"{len(alarms[check.name])} of {long_enough[check.name]}"
        print(f"| `health/{check.name}` | {check.when} | {check.meaning} | {check.remedy} | {count} |")
    for name, found in alarms.items():
        if found:
            print(f"{name}: {', '.join(found)}")


if __name__ == "__main__":
    main()
