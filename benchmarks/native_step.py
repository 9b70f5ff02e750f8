"""Our side of ``rl_step.py``: ``RLTrainer`` from Python objects, on the same prompts, group sizes and lengths."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from peers.turns import Turns

turns = Turns()

from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: E402

import quartet  # noqa: E402
from quartet.observe.progress import Progress  # noqa: E402
from quartet.observe.trackers import read_metrics  # noqa: E402

FOREVER = 10_000

job = turns.job
tokenizer = PreTrainedTokenizerFast.from_pretrained(job["model"])
prompts = job["prompts"]
group_size = len(job["lengths"]) // len(prompts)
wanted = {prompt: job["lengths"][i * group_size : (i + 1) * group_size] for i, prompt in enumerate(prompts)}


class SteppedTrainer(quartet.RLTrainer):
    """Waits to be asked before each step after the warm-up; reports each step's time and phases."""

    async def _step(self, step: int, *args: Any) -> int:
        if step == job["warm_up"]:
            turns.report()
        if step >= job["warm_up"] and not turns.wait():
            raise SystemExit
        begun = time.perf_counter()
        done = await super()._step(step, *args)
        seconds = time.perf_counter() - begun
        if step >= job["warm_up"]:
            metrics = read_metrics(self.path / "metrics.jsonl")[-1]
            times = {k.removeprefix("time/"): v for k, v in metrics.items() if k.startswith("time/")}
            phases = {k.removesuffix("_s"): v for k, v in times.items() if k != "step_s"}
            if int(metrics["rollout/tokens"]) != sum(job["lengths"]):
                raise RuntimeError(f"{metrics['rollout/tokens']} tokens instead of {sum(job['lengths'])}")
            turns.report(seconds=seconds, tokens=sum(job["lengths"]), phases=phases)
        return done


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion) % 7) for completion in completions]


# TRL's defaults: GRPO without a reference model, RLOO with 0.05 times the KL in the reward.
algorithm: Any = (
    quartet.GRPO(kl=quartet.KLConfig(coef=0.0))
    if job["algorithm"] == "grpo"
    else quartet.RLOO(kl=quartet.KLConfig(coef=0.05))
)
recipe = quartet.RLRecipe(
    output_dir=str(Path(tempfile.mkdtemp()) / "run"),
    threads=job["threads"],
    actor=quartet.ActorConfig(
        train=quartet.TrainConfig(
            precision={"float32": "fp32", "bfloat16": "bf16"}[job["dtype"]],
            optim=quartet.OptimConfig(lr=1e-6),
            **job.get("train", {}),
        )
    ),
    algorithm=algorithm,
    numerics=job.get("numerics", "fast"),
    rollout={  # type: ignore[arg-type]
        "sampling": {"max_new_tokens": max(job["lengths"])},
        **job.get("rollout", {}),
    },
    steps=FOREVER,
    prompts_per_step=len(prompts),
    responses_per_prompt=group_size,
    checkpoint=quartet.CheckpointConfig(every_steps=FOREVER),
)
trainer = SteppedTrainer(
    recipe,
    model=AutoModelForCausalLM.from_pretrained(job["model"]),
    tokenizer=tokenizer,
    rewards=[reward],
    prompts=prompts,
    progress=Progress(),
)
requests_of = trainer.roles.requests


def with_lengths(index: int) -> Any:
    """Requests of given lengths: no stop token, and each member of a group with its own limit."""
    item, asked = requests_of(index)
    lengths = wanted[item.prompt]
    samples = {
        name: replace(sampling, max_new_tokens=length, stop_token_ids=())
        for (name, sampling), length in zip(asked.samples.items(), lengths, strict=True)
    }
    return item, replace(asked, samples=samples)


if sorted(Counter(prompts).values()) != [1] * len(prompts):
    raise ValueError("prompts must differ")
trainer.roles.requests = with_lengths  # type: ignore[method-assign]
trainer.train()
