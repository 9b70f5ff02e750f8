"""Process-reward training on step-labelled answers.

Process rewards: one score per step of a trajectory, their combination, and the loss that trains their model.

Shape suffixes: T stored tokens, A step ends, N trajectories, M any.

A step's score stands on the token that ends the step (``step_mask``), 0 elsewhere. A rule turns the scores
``s_1 … s_K`` of a trajectory into one number, and gives each step a *credit*, also on its last token. The credits
add up to that number, so an estimator that reads token rewards and one that reads a number per trajectory maximise
the same thing:

============== ============================== ===============================================
rule           process reward                 credit of step k
============== ============================== ===============================================
``sum``        ``s_1 + … + s_K``              ``s_k``
``min``        ``min(s_1 … s_K)``             ``min(s_1 … s_k) - min(s_1 … s_{k-1})``, first ``s_1``
``discounted`` ``sum_k gamma^(k-1) s_k``      ``gamma^(k-1) s_k``
============== ============================== ===============================================

The minimum's credits look back only: the first step is paid its score, a later one nothing unless it is worse than
all before it, and then what it takes off the minimum. (Cheng et al., 2025, "Stop Summation", maximise the same number
and put all of it on the worst step.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quartet.algorithms.segments import masked_owner, owned_positions, reduction_dtype, segment_sum, zero_unmasked
from quartet.batch.ragged import RaggedBatch
from quartet.cluster.dispatch import ONE_COPY, dispatch
from quartet.extras.process_rewards.config import ProcessRewardRecipe
from quartet.extras.process_rewards.data import ProcessData, save_step_separator
from quartet.models.loading import saved_paths
from quartet.train.engine import TrainEngine
from quartet.train.forward import ForwardNeeds, ForwardOutputs
from quartet.train.metrics import MetricSums
from quartet.train.objectives import Objective, require_tensor
from quartet.trainers.run_files import naming_write_errors
from quartet.trainers.supervised import SupervisedTrainer, SupervisedWorker

CombinationRule = Literal["sum", "min", "discounted"]


# Scores and their combination ----------------------------------------------------------------------------


@torch.no_grad()
def step_credits(
    scores_T: Tensor, step_mask_T: Tensor, owner_T: Tensor, rule: CombinationRule, gamma: float = 1.0
) -> Tensor:
    """Returns ``[T]`` each step's credit on its last token, 0 elsewhere; see this module's head.

    Args:
        scores_T: ``[T]``; ignored where no step ends.
        step_mask_T: ``[T]`` bool, tokens that end a step.
        owner_T: ``[T]`` int64 trajectory, -1 for none; tokens in time order.
        rule: how steps are combined.
        gamma: discount per *step*, read by ``discounted`` alone.
    """
    scores_T = zero_unmasked(scores_T, step_mask_T)
    order_A = owned_positions(masked_owner(owner_T, step_mask_T))
    scores_A, owner_A = scores_T[order_A], owner_T[order_A]
    match rule:
        case "sum":
            credits_A = scores_A
        case "min":
            minima_A = _minimum_so_far(scores_A, owner_A)
            credits_A = minima_A.clone()
            follows_A = owner_A[1:] == owner_A[:-1]
            credits_A[1:] -= torch.where(follows_A, minima_A[:-1], 0)
        case "discounted":
            credits_A = scores_A * gamma ** _place(owner_A).to(scores_A.dtype)
    return torch.zeros_like(scores_T).index_put((order_A,), credits_A)


@torch.no_grad()
def process_rewards(
    scores_T: Tensor, step_mask_T: Tensor, owner_T: Tensor, num_owners: int, rule: CombinationRule, gamma: float = 1.0
) -> Tensor:
    """Returns ``[N]`` the process reward of each trajectory, 0 for one without steps. Arguments as for
    ``step_credits``.

    The minimum is taken itself, not added up from credits: equal minima must be equal numbers.
    """
    owner_T = masked_owner(owner_T, step_mask_T)
    if rule != "min":
        return segment_sum(step_credits(scores_T, step_mask_T, owner_T, rule, gamma), owner_T, num_owners)
    kept_T = zero_unmasked(scores_T, owner_T >= 0)
    slots = torch.zeros(num_owners + 1, dtype=kept_T.dtype, device=kept_T.device)
    return slots.scatter_reduce(0, owner_T + 1, kept_T, "amin", include_self=False)[1:]


def _place(owner_A: Tensor) -> Tensor:
    """Returns ``[A]`` int64 the step's number within its trajectory, from 0; owners stand together."""
    position_A = torch.arange(owner_A.shape[0], device=owner_A.device)
    is_first_A = torch.ones_like(owner_A, dtype=torch.bool)
    is_first_A[1:] = owner_A[1:] != owner_A[:-1]
    return position_A - torch.where(is_first_A, position_A, 0).cummax(0).values


def _minimum_so_far(scores_A: Tensor, owner_A: Tensor) -> Tensor:
    """Returns ``[A]`` the smallest score of the owner up to and with each place; owners stand together."""
    if not scores_A.numel():
        return scores_A
    values, rank_A = torch.unique(scores_A, return_inverse=True)
    # Integers, so that starting afresh with each owner costs no digits of the scores.
    run_A = torch.zeros_like(owner_A)
    run_A[1:] = (owner_A[1:] != owner_A[:-1]).long().cumsum(0)
    offset_A = run_A * values.shape[0]
    return values[(rank_A - offset_A).cummin(0).values + offset_A]


# Training ------------------------------------------------------------------------------------------------


class StepLossOutput(NamedTuple):
    """A micro-batch's part: the loss (scalar), and sums over its steps.

    ``num_decided`` counts steps whose label is not exactly one half, ``num_correct`` those of them that the model
    puts on the label's side (half of one where the logit is 0).
    """

    loss: Tensor
    num_correct: Tensor
    num_decided: Tensor


def step_loss(logits_T: Tensor, labels_T: Tensor, step_mask_T: Tensor, num_steps: Tensor | int) -> StepLossOutput:
    """Computes binary cross-entropy of step labels, the mean over steps (Lightman et al., 2023; Wang et al., 2024).

    Args:
        logits_T: ``[T]`` of "this step is right"; ignored where no labelled step ends.
        labels_T: ``[T]`` in [0, 1]: hard labels are 0 and 1, soft ones probabilities.
        step_mask_T: ``[T]`` bool, the last tokens of labelled steps.
        num_steps: labelled steps of the whole mini-batch, so that micro-batches add up.
    """
    dtype = reduction_dtype(logits_T)
    # Rows are picked, not zeroed: a NaN elsewhere must not come back through the gradient.
    logits_M, labels_M = logits_T[step_mask_T].to(dtype), labels_T[step_mask_T].to(dtype)
    loss = F.binary_cross_entropy_with_logits(logits_M, labels_M, reduction="sum") / max(1, int(num_steps))
    with torch.no_grad():
        decided_M = labels_M != 0.5
        correct_M = torch.where(logits_M == 0, 0.5, ((logits_M > 0) == (labels_M > 0.5)).to(dtype))
        return StepLossOutput(loss, (correct_M * decided_M).sum(), decided_M.sum())


# Right and wrong answers ---------------------------------------------------------------------------------


def right_answers(outcomes_N: Tensor, applies_N: Tensor) -> Tensor | None:
    """Returns ``[N]`` bool: the outcome lies above the middle of the smallest and the largest one.

    Args:
        outcomes_N: ``[N]`` outcome rewards.
        applies_N: ``[N]`` bool, where there is one; others are not right.

    Returns:
        None where all outcomes are equal: which are right is unknown then.
    """
    if not bool(applies_N.any()):
        return None
    low, high = outcomes_N[applies_N].min(), outcomes_N[applies_N].max()
    return None if bool(low == high) else applies_N & (outcomes_N > (low + high) / 2)


def mean_gap(rewards_N: Tensor, is_right_N: Tensor, applies_N: Tensor) -> Tensor:
    """Returns a scalar: mean reward of the right trajectories less that of the others that ``applies [N]`` keeps."""
    wrong_N = applies_N & ~is_right_N
    return rewards_N[applies_N & is_right_N].mean() - rewards_N[wrong_N].mean()


_ANSWERS_PER_PASS = 128
STEP_NEEDS = ForwardNeeds(step_scores=True, mask="step_mask")
"""A logit at the last token of every step."""


@dataclass(frozen=True)
class StepObjective(Objective):
    """Binary cross-entropy over the labelled steps of the batch (``step_mask``, ``step_labels``), their mean."""

    needs = STEP_NEEDS

    def denominators(self, batch: RaggedBatch) -> int:
        return int(batch.token["step_mask"].sum())

    def loss(self, outputs: ForwardOutputs, batch: RaggedBatch, denominators: int, sums: MetricSums) -> Tensor:
        scores = require_tensor(outputs.step_scores, "step_scores")
        out = step_loss(scores, batch.token["step_labels"], batch.token["step_mask"], denominators)
        sums.total("loss/process_reward", out.loss)
        sums.add("process_reward/accuracy", out.num_correct, out.num_decided)
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
        found = {"eval/loss": float(out.loss)}
        if out.num_decided > 0:
            found["eval/accuracy"] = float(out.num_correct / out.num_decided)
        return found

    @dispatch(ONE_COPY)
    def write_model(self, path: Path) -> str | None:
        warning = super().write_model(path)
        with naming_write_errors(path):
            for written in saved_paths(self.packed, path):
                save_step_separator(self.recipe.separator, written)
        return warning


class ProcessRewardTrainer(SupervisedTrainer[ProcessRewardRecipe, ProcessRewardWorker]):
    """Trains a scalar head on a causal LM's body (or goes on with a reward model) to tell right steps from wrong ones.

    Arguments as for ``SupervisedTrainer``; rows have ``prompt``, ``steps`` (or ``completion``) and ``labels``. Held-out
    figures: ``eval/loss`` (cross-entropy in nats), ``eval/accuracy``. Beside the weights
    ``process_reward.json`` says how steps end.
    """

    recipe_class = ProcessRewardRecipe
    worker_class = ProcessRewardWorker


def score_steps(engine: TrainEngine[Any], data: ProcessData) -> tuple[Tensor, Tensor]:
    """Returns the logits and labels ``[M]`` of all labelled steps, answer after answer; collective."""
    rows, logits, labels = _ANSWERS_PER_PASS * engine.num_ranks, [], []
    for batch, found in engine.in_shares(data.in_parts(rows), partial(engine.forward, needs=STEP_NEEDS)):
        mask = batch.token["step_mask"]
        logits.append(found.token["step_scores"][mask])
        labels.append(batch.token["step_labels"][mask])
    return torch.cat(logits), torch.cat(labels)
