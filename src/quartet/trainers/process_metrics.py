"""What process rewards say about the answers that the outcome calls right and wrong.

Shapes: T stored tokens, N trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quartet.algorithms.process import mean_gap, right_answers
from quartet.batch.ragged import RaggedBatch
from quartet.batch.trajectory import STEP_SCORE_PREFIX


def process_metrics(
    batch: RaggedBatch, rewards: Mapping[str, Tensor], weights: Mapping[str, float]
) -> dict[str, float]:
    """Figures of the process reward models among the sources; none without such a model.

    The gaps compare mean rewards of right and wrong answers, under the outcome sources and under the process reward
    models; several sources of a kind are added up with their weights (without, where all of these are 0). An answer is
    right where its outcome lies above the middle of the smallest and the largest of the step.

    Args:
        rewards: ``[N]`` by source, NaN where it does not apply.
        weights: of every source.
    """
    process = [name for name in rewards if STEP_SCORE_PREFIX + name in batch.token]
    if not process:
        return {}
    num = len(rewards[process[0]])
    scores = [batch.token[STEP_SCORE_PREFIX + name] for name in process]
    found = {
        "process/steps_mean": sum(float((~values.isnan()).sum()) for values in scores) / (num * len(process)),
        "process/unscored": float(sum(rewards[name].isnan().sum() for name in process)),
    }
    outcome_N, judged_N = _combined(rewards, weights, [name for name in rewards if name not in process])
    process_N, scored_N = _combined(rewards, weights, process)
    both_N = judged_N & scored_N
    right_N = right_answers(outcome_N, both_N)
    if right_N is not None:
        found["process/gap_outcome"] = float(mean_gap(outcome_N, right_N, both_N))
        found["process/gap_process"] = float(mean_gap(process_N, right_N, both_N))
    return found


def _combined(
    rewards: Mapping[str, Tensor], weights: Mapping[str, float], names: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """``[N]`` weighted sum of the sources that apply, and whether any does."""
    num = len(next(iter(rewards.values())))
    total, applies = torch.zeros(num, dtype=torch.float64), torch.zeros(num, dtype=torch.bool)
    only_logged = not any(weights[name] for name in names)
    for name in names:
        valid = ~rewards[name].isnan()
        weight = 1.0 if only_logged else weights[name]
        total += weight * torch.where(valid, rewards[name].double(), 0.0)
        applies |= valid
    return total, applies
