"""RLOO against PPO on the same work: bytes of their states, counted and measured, and the time of a step.

    python benchmarks/rloo_against_ppo.py [--model small] [--prompts 4] [--length 64] [--steps 3]

Both answer the same prompts four times each, with the same reward model, the same reference and KL in the reward; PPO
also trains a critic of the actor's size. The rollout engine keeps the actor's weights once more, in the order its
products read. Bytes are counted per parameter (weights 4, gradient 4, Adam's moments 8;
fp32; actor and critic are updated in turn, so one of them has gradients at a time) and measured as the storage of all
living tensors just before an optimizer steps, less what lived before the run. Times are medians over runs that take
turns.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import MODELS, arguments, build_model, build_tokenizer, markdown, prompt_ids, step_groups, write_results
from torch import Tensor
from transformers import PreTrainedModel

from quartet.config.algorithms import PPO, RLOO, KLConfig, PolicyGradientConfig
from quartet.config.common import OptimConfig, SamplingConfig, TrainConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.recipe import ActorConfig, CheckpointConfig, CriticConfig, LogConfig, RLRecipe, RolloutConfig
from quartet.models.loading import scalar_model_from
from quartet.observe.trackers import read_metrics
from quartet.trainers.rl import RLTrainer

RESPONSES = 4
ALGORITHMS: dict[str, PolicyGradientConfig] = {"PPO": PPO(kl=KLConfig(coef=0.05)), "RLOO": RLOO(kl=KLConfig(coef=0.05))}
WEIGHTS = {
    "PPO": ("actor", "engine", "critic", "reference", "reward"),
    "RLOO": ("actor", "engine", "reference", "reward"),
}
TRAINED_ROLES = {"PPO": ("actor", "critic"), "RLOO": ("actor",)}


def counted_bytes(name: str, num_parameters: int) -> dict[str, int]:
    """fp32 bytes by kind of state when the last optimizer steps."""
    return {
        "weights": 4 * num_parameters * len(WEIGHTS[name]),
        "moments": 8 * num_parameters * len(TRAINED_ROLES[name]),
        "gradients": 4 * num_parameters,
    }


def living_bytes() -> int:
    """Storage of every tensor that lives, shared storage once."""
    gc.collect()
    found: dict[int, int] = {}
    for candidate in gc.get_objects():
        # Not isinstance: it asks objects for their class, and some warn when asked.
        if not issubclass(type(candidate), Tensor):
            continue
        if candidate.is_mkldnn:
            found[id(candidate)] = candidate.numel() * candidate.element_size()
        else:
            storage = candidate.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
            if candidate.is_leaf and candidate.grad is not None:
                gradient = candidate.grad.untyped_storage()
                found[gradient.data_ptr()] = gradient.nbytes()
    return sum(found.values())


class Watch:
    """The most living bytes seen when an optimizer was about to step."""

    def __init__(self, trainer: RLTrainer) -> None:
        self.most = 0
        for engine in trainer.roles.engines().values():
            engine.optimizer.register_step_pre_hook(lambda *_: self._look())

    def _look(self) -> None:
        self.most = max(self.most, living_bytes())


def reward_model(actor: PreTrainedModel) -> PreTrainedModel:
    return scalar_model_from(actor, seed=1)


def run(name: str, args: Any, *, watched: bool) -> dict[str, Any]:
    """One short run: the time of each step after the first, its phases, and bytes where watched."""
    before = living_bytes()
    actor = build_model(args.model)
    tokenizer = build_tokenizer(actor.config.vocab_size)
    num_prompts, length, steps = (2, 8, 2) if args.smoke else (args.prompts, args.length, args.steps + 1)
    prompts = [tokenizer.decode(ids) for ids in prompt_ids(step_groups(num_prompts), actor.config.vocab_size)]
    train = TrainConfig(optim=OptimConfig(lr=1e-6))
    recipe = RLRecipe(
        output_dir=str(Path(tempfile.mkdtemp()) / "run"),
        threads=args.threads,
        actor=ActorConfig(train=train),
        critic=CriticConfig(train=train),
        algorithm=ALGORITHMS[name],
        rollout=RolloutConfig(
            sampling=SamplingConfig(max_new_tokens=length),
            engine=NativeEngineConfig(max_running=num_prompts * RESPONSES),
        ),
        steps=steps,
        prompts_per_step=num_prompts,
        responses_per_prompt=RESPONSES,
        log=LogConfig(tensorboard=False),
        checkpoint=CheckpointConfig(every_steps=1000),
    )
    trainer = RLTrainer(recipe, model=actor, tokenizer=tokenizer, rewards=[reward_model(actor)], prompts=prompts)
    watch = Watch(trainer) if watched else None
    parameters = sum(p.numel() for p in actor.parameters())
    trainer.train()
    rows = [row for row in read_metrics(trainer.path / "metrics.jsonl") if row["step"] >= 2]
    return {
        "seconds": [row["time/step_s"] for row in rows],
        "phases": {key: [row[key] for row in rows] for key in rows[0] if key.startswith("time/")},
        "tokens": rows[-1]["rollout/tokens"],
        "parameters": parameters,
        "bytes": watch.most - before if watch is not None else None,
    }


def table(parts: dict[str, dict[str, Any]]) -> str:
    head = ["", "weights", "Adam", "gradients", "counted MiB", "measured MiB", "measured / counted", "s per step"]
    rows = []
    for name, part in parts.items():
        counted = part["counted"]
        total = sum(counted.values())
        rows.append(
            [
                name,
                *(f"{counted[kind] / 2**20:,.0f}" for kind in ("weights", "moments", "gradients")),
                f"{total / 2**20:,.0f}",
                f"{part['bytes'] / 2**20:,.0f}",
                f"{part['bytes'] / total:.3f}",
                f"{part['step_s']:.2f}",
            ]
        )
    ppo, rloo = parts["PPO"], parts["RLOO"]
    less = [1 - sum(rloo["counted"].values()) / sum(ppo["counted"].values()), 1 - rloo["bytes"] / ppo["bytes"]]
    faster = f"{ppo['step_s'] / rloo['step_s']:.2f} × faster"
    rows.append(["RLOO saves", "", "", "", *(f"{100 * x:.0f} %" for x in less), "", faster])
    return markdown(head, rows)


def phases(parts: dict[str, dict[str, Any]]) -> str:
    names = sorted({name for part in parts.values() for name in part["phases"]} - {"time/step_s"})
    rows = []
    for name in names:
        seconds = [_seconds(part["phases"].get(name)) for part in parts.values()]
        rows.append([name.removeprefix("time/").removesuffix("_s"), *seconds])
    return markdown(["s per step in", *parts], rows)


def _seconds(values: Sequence[float] | None) -> str:
    return f"{statistics.median(values):.2f}" if values else "-"


def main() -> None:
    parser = arguments(__doc__, repeats=2)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    parts: dict[str, dict[str, Any]] = {}
    for name in ALGORITHMS:
        found = run(name, args, watched=True)
        parts[name] = {"bytes": found["bytes"], "counted": counted_bytes(name, found["parameters"])}
    timed: dict[str, list[dict[str, Any]]] = {name: [] for name in ALGORITHMS}
    for _ in range(1 if args.smoke else args.repeats):
        for name in ALGORITHMS:
            timed[name].append(run(name, args, watched=False))
    for name, runs in timed.items():
        parts[name]["step_s"] = statistics.median(s for found in runs for s in found["seconds"])
        keys = {key for found in runs for key in found["phases"]}
        parts[name]["phases"] = {key: [v for found in runs for v in found["phases"].get(key, ())] for key in keys}
    write_results(args, {"rloo_against_ppo": parts})
    print(table(parts), "", phases(parts), sep="\n")


if __name__ == "__main__":
    main()
