"""Process-reward training on step-labelled answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quartet.batch.ragged import RaggedBatch
from quartet.cluster.dispatch import ONE_COPY, dispatch
from quartet.extras.process_rewards.config import ProcessRewardRecipe
from quartet.extras.process_rewards.data import ProcessData
from quartet.extras.process_rewards.scores import calibration_error, step_loss
from quartet.extras.process_rewards.steps import save_step_separator
from quartet.models.loading import saved_paths
from quartet.train.engine import TrainEngine
from quartet.train.forward import Needs, Outputs
from quartet.train.metrics import MetricSums
from quartet.train.objectives import Objective, required
from quartet.trainers.run_files import writing
from quartet.trainers.supervised import SupervisedTrainer, SupervisedWorker

_ANSWERS_PER_PASS = 128
STEP_NEEDS = Needs(step_scores=True, mask="step_mask")
"""A logit at the last token of every step."""


@dataclass(frozen=True)
class StepObjective(Objective):
    """Binary cross-entropy over the labelled steps of the batch (``step_mask``, ``step_labels``), their mean."""

    needs = STEP_NEEDS

    def denominators(self, batch: RaggedBatch) -> int:
        return int(batch.token["step_mask"].sum())

    def loss(self, outputs: Outputs, batch: RaggedBatch, denominators: int, sums: MetricSums) -> Tensor:
        scores = required(outputs.step_scores, "step_scores")
        out = step_loss(scores, batch.token["step_labels"], batch.token["step_mask"], denominators)
        sums.total("loss/process_reward", out.loss)
        sums.add("process_reward/accuracy", out.num_correct, out.num_decided)
        sums.add("process_reward/calibration", out.probability_sum - out.label_sum, out.num_steps)
        return out.loss


class ProcessRewardWorker(SupervisedWorker[ProcessRewardRecipe, ProcessData]):
    """Trains a scalar head to tell right steps from wrong ones."""

    objective = StepObjective()
    _rows_key = "answers_per_step"

    def _longest(self) -> int:
        return int(self.data.lengths.sum(1).max())

    def _measure(self, data: ProcessData) -> dict[str, float]:
        logits_M, labels_M = score_steps(self.engine, data)
        out = step_loss(logits_M, labels_M, torch.ones_like(labels_M, dtype=torch.bool), len(labels_M))
        found = {
            "eval/loss": float(out.loss),
            "eval/calibration_error": float(calibration_error(logits_M.sigmoid(), labels_M)),
        }
        if out.num_decided > 0:
            found["eval/accuracy"] = float(out.num_correct / out.num_decided)
        return found

    @dispatch(ONE_COPY)
    def write_model(self, path: Path) -> str | None:
        warning = super().write_model(path)
        with writing(path):
            for written in saved_paths(self.packed, path):
                save_step_separator(self.recipe.separator, written)
        return warning


class ProcessRewardTrainer(SupervisedTrainer[ProcessRewardRecipe, ProcessRewardWorker]):
    """Trains a scalar head on a causal LM's body (or goes on with a reward model) to tell right steps from wrong ones.

    Arguments as for ``SupervisedTrainer``; rows have ``prompt``, ``steps`` (or ``completion``) and ``labels``. Held-out
    figures: ``eval/loss`` (cross-entropy in nats), ``eval/accuracy``, ``eval/calibration_error``. Beside the weights
    ``process_reward.json`` says how steps end.
    """

    recipe_class = ProcessRewardRecipe
    worker_class = ProcessRewardWorker


def score_steps(engine: TrainEngine[Any], data: ProcessData) -> tuple[Tensor, Tensor]:
    """Logits and labels ``[M]`` of all labelled steps, answer after answer; collective."""
    rows, logits, labels = _ANSWERS_PER_PASS * engine.num_ranks, [], []
    for batch, found in engine.in_shares(data.in_parts(rows), partial(engine.forward, needs=STEP_NEEDS)):
        mask = batch.token["step_mask"]
        logits.append(found.token["step_scores"][mask])
        labels.append(batch.token["step_labels"][mask])
    return torch.cat(logits), torch.cat(labels)
