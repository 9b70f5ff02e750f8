"""Supervised fine-tuning on demonstrations."""

from __future__ import annotations

import math
from functools import partial

import torch

from quartet.config.recipe import SFTRecipe
from quartet.data.datasets import SFTData
from quartet.train.forward import Needs
from quartet.train.objectives import SFTObjective
from quartet.trainers.supervised import SupervisedTrainer
from quartet.trainers.supervised_worker import CausalWorker

_ROWS_PER_PASS = 256


class SFTWorker(CausalWorker[SFTRecipe, SFTData]):
    """Trains a causal LM to imitate demonstrations."""

    objective = SFTObjective()
    _rows_key = "examples_per_step"

    def _longest(self) -> int:
        return int(self.data.lengths.max())

    def _measure(self, data: SFTData) -> dict[str, float]:
        total = count = 0.0
        rows, forward = _ROWS_PER_PASS * self.engine.num_ranks, partial(self.engine.forward, needs=Needs(logprobs=True))
        for batch, found in self.engine.in_shares(data.in_parts(rows), forward):
            mask, logprobs = batch.token["loss_mask"], found.token["logprobs"]
            total -= float(logprobs[mask].to(torch.float64).sum())
            count += float(mask.sum())
        return {"eval/loss": total / count, "sft/perplexity": math.exp(min(50.0, total / count))}


class SFTTrainer(SupervisedTrainer[SFTRecipe, SFTWorker]):
    """Trains a causal LM to imitate demonstrations; only the demonstrator's tokens carry loss.

    Arguments as for ``SupervisedTrainer``; rows have ``prompt`` and ``completion``, ``messages``, ``text`` or
    ``input_ids``. Held-out figures: ``eval/loss`` in nats per token, and its exponential, ``sft/perplexity``.
    """

    recipe_class = SFTRecipe
    worker_class = SFTWorker
    _evaluation_metric = "eval/loss"
