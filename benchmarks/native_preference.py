"""Our side of ``preference.py``: ``PreferenceTrainer`` (DPO) or ``RewardModelTrainer`` from Python objects."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from peers.turns import Turns

turns = Turns()

from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: E402

import quartet  # noqa: E402
from quartet.trainers.supervised import SupervisedTrainer  # noqa: E402

FOREVER = 10_000

job = turns.job
step_of_trainer = SupervisedTrainer._step


async def stepped(trainer: SupervisedTrainer[Any, Any], step: int, *workers: Any) -> dict[str, float]:
    """Waits to be asked before each step after the warm-up; reports each step's time and tokens."""
    if step == job["warm_up"]:
        turns.report()
    if step >= job["warm_up"] and not turns.wait():
        raise SystemExit
    begun = time.perf_counter()
    metrics = await step_of_trainer(trainer, step, *workers)
    seconds = time.perf_counter() - begun
    if step >= job["warm_up"]:
        wanted = sum(job["tokens_per_pair"])
        if int(metrics["tokens/useful"]) != wanted:
            raise RuntimeError(f"{metrics['tokens/useful']} tokens instead of {wanted}")
        turns.report(seconds=seconds, tokens=metrics["tokens/useful"])
    return metrics


SupervisedTrainer._step = stepped  # type: ignore[method-assign]
common: dict[str, Any] = {
    "output_dir": str(Path(tempfile.mkdtemp()) / "run"),
    "threads": job["threads"],
    "train": quartet.TrainConfig(
        precision={"float32": "fp32", "bfloat16": "bf16"}[job["dtype"]],
        optim=quartet.OptimConfig(lr=1e-6),
        **job.get("train", {}),
    ),
    "steps": FOREVER,
    "pairs_per_step": len(job["rows"]),
    "checkpoint": quartet.CheckpointConfig(every_steps=FOREVER),
}
objects: dict[str, Any] = {
    "model": AutoModelForCausalLM.from_pretrained(job["model"]),
    "tokenizer": PreTrainedTokenizerFast.from_pretrained(job["model"]),
    "rows": job["rows"],
}
trainer: Any
if job["job"] == "dpo":
    trainer = quartet.PreferenceTrainer(quartet.PreferenceRecipe(**common), **objects)
else:
    trainer = quartet.RewardModelTrainer(quartet.RewardModelRecipe(**common), **objects)
trainer.train()
