"""What the ranks of ``test_split_evaluation.py`` run: held-out figures and reference tables of supervised jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from quartet.config.common import LoRAConfig, OptimConfig, TrainConfig
from quartet.config.preference import DPOLoss, KTOLoss, PreferenceRecipe
from quartet.config.recipe import RewardModelRecipe, SFTRecipe
from quartet.extras.process_rewards.config import ProcessRewardRecipe
from quartet.extras.process_rewards.trainer import ProcessRewardWorker
from quartet.extras.quickstart.tokenizer import build_tokenizer
from quartet.models.loading import scalar_model_from
from quartet.train import forward
from quartet.train.parallel.mesh import DataParallelGroup, Mesh
from quartet.trainers.preference import PreferenceWorker
from quartet.trainers.supervised import PassedObjects, RewardModelWorker, SFTWorker

NUM_ROWS = 24
JOBS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sft": (SFTWorker, SFTRecipe, {"examples_per_step": 4}),
    "reward-model": (RewardModelWorker, RewardModelRecipe, {"pairs_per_step": 4}),
    "process-reward": (ProcessRewardWorker, ProcessRewardRecipe, {"answers_per_step": 4, "separator": ";"}),
    "dpo": (PreferenceWorker, PreferenceRecipe, {"pairs_per_step": 4, "loss": DPOLoss(), "lora": LoRAConfig(rank=2)}),
    "kto": (PreferenceWorker, PreferenceRecipe, {"pairs_per_step": 4, "loss": KTOLoss()}),
}


class Counts:
    """Batches, passes and tokens that a rank computed, and passes that it made because others had one."""

    def __init__(self) -> None:
        self.batches = self.passes = self.tokens = self.idle = 0


@contextmanager
def counting(fails: bool = False) -> Iterator[Counts]:
    """What forward-only passes compute within; all of them fail where ``fails``, but idle ones."""
    counts, compute, columns = Counts(), forward.PackedPass, forward._columns

    def counted(packed: Any, batch: Any, *args: Any, **options: Any) -> Any:
        if batch.ids == ("idle",):
            counts.idle += 1
        elif fails:
            raise ValueError("planted")
        else:
            counts.passes, counts.tokens = counts.passes + 1, counts.tokens + batch.num_tokens
        return compute(packed, batch, *args, **options)

    def counted_batch(*args: Any) -> Any:
        counts.batches += 1
        return columns(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "PackedPass", counted)
        patch.setattr(forward, "_columns", counted_batch)
        yield counts


def make_worker(job: str, mesh: Mesh | None) -> Any:
    """A tiny model in fp64 and rows of about equal length."""
    kind, recipe, options = JOBS[job]
    tokenizer, options = build_tokenizer(), dict(options)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.2, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    rows = []
    for n in range(10, 10 + NUM_ROWS):
        answer = {"steps": [f"{n}+1", f"={n + 1}"], "labels": [1, n % 2]} if job == "process-reward" else {}
        pair = {"completion": f"{n + 1};"} if job == "sft" else {"chosen": f"{n + 1};", "rejected": f"{n};"}
        rows.append({"prompt": f"{n}+1=", **(answer or pair)})
    train = TrainConfig(
        optim=OptimConfig(lr=1e-2), token_budget=64, forward_token_budget=64, lora=options.pop("lora", None)
    )
    made = recipe(steps=3, threads=1, train=train, **options)
    model: Any = LlamaForCausalLM(config)
    if recipe.is_scalar:
        model = scalar_model_from(model, seed=0)
    model = model.double()
    given = PassedObjects(model, tokenizer, rows, rows)
    return kind(made, given, torch.device("cpu"), mesh)


def evaluated(job: str, mesh: Mesh | None, path: Path) -> dict[str, Any]:
    """Reference tables where there are any, a step, and held-out figures; what this rank computed for each."""
    worker, found = make_worker(job, mesh), {}
    with counting() as found["reference"]:
        if isinstance(worker, PreferenceWorker):
            found["missing"] = worker.begin_reference(path)
            while worker.compute_reference():
                pass
            found["tables"] = dict(worker._tables.tables)
            worker.release_reference()
    found["step"] = worker.step(0)
    with counting() as found["evaluation"]:
        found["figures"] = worker.evaluate()
    return found


def on_ranks(shard: int, jobs: list[str], path: str) -> dict[str, Any]:
    """Of each job; its reference tables go below the path, which the first rank alone sees."""
    mesh = Mesh.of(DataParallelGroup.of_world(), shard=shard)
    found = {}
    for job in jobs:
        own = Path(path) / (job if dist.get_rank() == 0 else "unseen")
        if dist.get_rank() == 0:
            own.mkdir(parents=True, exist_ok=True)
        found[job] = evaluated(job, mesh, own)
        dist.barrier()
    return found
