r"""Drafts of Medusa heads while RL moves their trunk: heads that stay, and heads that learn along, by token budget.

    quartet quickstart --out runs/quickstart
    python benchmarks/companion_heads.py --quickstart runs/quickstart --out runs/companion [--budgets 0 128 512 2048]
    python benchmarks/companion_heads.py --stories stories260K --out runs/companion-stories \\
        --own-heads --heads-lr 1e-2 --epochs 3 --lr 3e-3 --budgets 0 4096

Trains heads for the model on its own answers, then runs the task once per budget (0: the heads stay), drafting at every
step, whether it pays or not: the quickstart's PPO on its SFT model, or ``recipes/story-grpo.yaml`` on the real story
model, with overrides (``STORIES``) by which it moves further. Prints one Markdown table: acceptance in quarters of the
run, how far the policy has moved, positions learned from, and the heads' seconds as a share of those of the steps. Runs
that are done are only read, those that broke off go on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quartet.config.common import CheckpointConfig, OptimConfig, SamplingConfig, TrainConfig
from quartet.config.load import load_recipe
from quartet.config.recipe import RLRecipe
from quartet.extras.quickstart.recipes import FULL, rl_recipe
from quartet.extras.speculation.config import HeadsConfig, HeadTraining, MedusaRecipe, MedusaSpeculation, StepCosts
from quartet.extras.speculation.head_trainer import Companion
from quartet.extras.speculation.job import MedusaTrainer
from quartet.observe.trackers import read_metrics
from quartet.trainers.rl import RLTrainer

ROOT = Path(__file__).resolve().parents[1]
ALWAYS = StepCosts(plain=(1.0,), drafted=(0.1,), drafting=(0.0,))
"""By which it always pays to draft."""
STORIES = (
    "actor.train.optim.lr=3e-4",
    "algorithm.kl.coef=0.005",
    "rollout.sampling.draw=gumbel",
    "prompts_per_step=16",
)
HEAD = "| tokens_per_step | drafts kept, by quarters | tokens per forward, by quarters | kl/ref | positions | seconds |"


def quickstart_task(quickstart: Path) -> RLRecipe:
    data = quickstart / "data"
    return rl_recipe(FULL, 0, quickstart, data / "prompts.jsonl", data / "prompts_held_out.jsonl")


def story_task(model: Path) -> RLRecipe:
    recipe = load_recipe("rl", ROOT / "recipes" / "story-grpo.yaml", [f"actor.model.path={model}", *STORIES])
    assert isinstance(recipe, RLRecipe)
    return recipe


def trained_heads(task: RLRecipe, out: Path, heads: HeadsConfig, samples: int, epochs: int, lr: float) -> Path:
    """Of the actor as it is before, on its answers to the task's prompts."""
    path = out / "heads"
    if not (path / "medusa").is_dir():
        recipe = MedusaRecipe(
            output_dir=str(path),
            model=task.actor.model,
            data=task.data,
            sampling=SamplingConfig(max_new_tokens=task.rollout.sampling.max_new_tokens),
            samples_per_prompt=samples,
            heads=heads,
            train=TrainConfig(optim=OptimConfig(lr=lr, warmup_steps=10, schedule="cosine")),
            epochs=epochs,
        )
        MedusaTrainer(recipe).train()
    return path / "medusa"


def run(
    task: RLRecipe, path: Path, heads: Path, budget: int, lr: float, actor_lr: float | None
) -> list[Mapping[str, float]]:
    """The steps' metrics of one run, with ``heads_s`` of the whole run in the first."""
    took = path.with_name(f"{path.name}.seconds")
    if not (path / "summary.json").is_file():
        learning = HeadTraining(tokens_per_step=budget, optim=OptimConfig(lr=lr)) if budget else None
        speculation = MedusaSpeculation(path=str(heads), costs=ALWAYS, train=learning)
        actor = task.actor
        if actor_lr is not None:
            actor = actor.model_copy(update={"train": TrainConfig(optim=OptimConfig(lr=actor_lr))})
        recipe = task.model_copy(
            update={
                "output_dir": str(path),
                "actor": actor,
                "rollout": task.rollout.model_copy(update={"speculation": speculation}),
                "evaluation": None,
                "checkpoint": CheckpointConfig(every_steps=10**6, keep=1),
            }
        )
        seconds = [json.loads(took.read_text(encoding="utf-8"))] if took.is_file() else [0.0]
        for name in ("watch", "learn"):
            setattr(Companion, name, timed(getattr(Companion, name), seconds))
        try:
            RLTrainer(recipe, resume="auto").train()
        finally:
            took.write_text(json.dumps(seconds[0]), encoding="utf-8")
    rows = [row for row in read_metrics(path / "metrics.jsonl") if "time/step_s" in row]
    return [{**rows[0], "heads_s": json.loads(took.read_text(encoding="utf-8"))}, *rows[1:]]


def timed(method: Any, seconds: list[float]) -> Any:
    def measured(self: Companion, *arguments: Any) -> Any:
        start = time.perf_counter()
        found = method(self, *arguments)
        seconds[0] += time.perf_counter() - start
        return found

    return measured


def row(budget: int, steps: Sequence[Mapping[str, float]]) -> str:
    size = -(-len(steps) // 4)
    quarters = [steps[start : start + size] for start in range(0, len(steps), size)]
    kept, gained, moved = (
        partial(of_steps, name) for name in ("rollout/draft_acceptance", "rollout/tokens_per_forward", "kl/ref")
    )
    share = steps[0]["heads_s"] / sum(step["time/step_s"] for step in steps)
    cells = [
        str(budget) if budget else "heads stay",
        " · ".join(f"{kept(quarter):.3f}" for quarter in quarters),
        " · ".join(f"{gained(quarter):.2f}" for quarter in quarters),
        " · ".join(f"{moved(quarter):.2f}" for quarter in quarters),
        f"{of_steps('heads/tokens', steps):.0f}",
        f"{100 * share:.1f} %",
    ]
    return f"| {' | '.join(cells)} |\n"


def of_steps(name: str, steps: Sequence[Mapping[str, float]]) -> float:
    """Mean over the steps that have it; 0 of none."""
    found = [step[name] for step in steps if name in step]
    return sum(found) / max(1, len(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--quickstart", type=Path, help="directory of a quickstart")
    which.add_argument("--stories", type=Path, help="directory of the model stories260K")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budgets", type=int, nargs="+", default=[0, 128, 512, 2048])
    parser.add_argument("--layers", type=int, default=2, help="of each head's residual block")
    parser.add_argument("--own-heads", action="store_true", help="each ends in an LM head of its own, which learns")
    parser.add_argument("--heads-lr", type=float, default=1e-3, help="of the heads before the run")
    parser.add_argument("--samples", type=int, default=8, help="answers to each prompt that the heads learn from first")
    parser.add_argument("--epochs", type=int, default=2, help="over these answers")
    parser.add_argument("--lr", type=float, default=1e-3, help="of heads that learn along")
    parser.add_argument("--actor-lr", type=float, help="in place of the task's: more moves the policy further")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    task = quickstart_task(arguments.quickstart) if arguments.quickstart else story_task(arguments.stories)
    config = HeadsConfig(layers=arguments.layers, shared_head=not arguments.own_heads)
    heads = trained_heads(task, arguments.out, config, arguments.samples, arguments.epochs, arguments.heads_lr)
    sys.stdout.write(f"{HEAD}\n|---|---|---|---|---|---|\n")
    for budget in arguments.budgets:
        path = arguments.out / f"budget_{budget}"
        sys.stdout.write(row(budget, run(task, path, heads, budget, arguments.lr, arguments.actor_lr)))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
