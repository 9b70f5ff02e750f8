"""What an RL step says about itself beside its losses: seconds, lengths, episodes, baselines, what memory did, and what
process rewards say about the answers that the outcome calls right and wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quartet.algorithms.process import mean_gap, right_answers
from quartet.batch.ragged import RaggedBatch
from quartet.batch.trajectory import CUT_OFF, STEP_SCORE_PREFIX, Trajectories, num_emitted
from quartet.observe.spans import Span, overlap_seconds, seconds_by_name
from quartet.schedule.model_worker import ModelStats
from quartet.trainers.estimators import BASELINE


def timing(spans: Sequence[Span], wall_s: float, generated: int) -> dict[str, float]:
    """Seconds of each stage and of the step; ``generated`` tokens were sampled in it."""
    seconds = seconds_by_name(spans)
    found = {f"time/{name}_s": value for name, value in seconds.items()}
    found["time/step_s"] = wall_s
    found["rollout/tokens"] = float(generated)
    if seconds.get("generate"):
        # Of the engine's leases: an engine that is ahead has sampled some of the step's tokens earlier.
        sampled = sum(span.tokens or 0 for span in spans if span.name == "generate")
        found["rollout/tokens_per_s"] = sampled / seconds["generate"]
    bursts = [s for s in spans if s.name == "generate"]
    compared = [Span("scoring", s.start_s, s.end_s) for s in spans if s.chunk is not None]
    if bursts:  # from the first to the last one, as one
        compared.append(Span("generation", min(s.start_s for s in bursts), max(s.end_s for s in bursts)))
    found["overlap/score_generate_s"] = overlap_seconds(compared, "generation", "scoring")
    return found


def batch_metrics(batch: RaggedBatch) -> dict[str, float]:
    """Lengths, and what episodes and the greedy baseline add where there are any."""
    return {**_lengths(batch), **episode_metrics(batch), **greedy_metrics(batch)}


def _lengths(batch: RaggedBatch) -> dict[str, float]:
    trajectories = Trajectories.of(batch)
    emitted = num_emitted(batch, trajectories)
    return {
        "rollout/length_mean": float(emitted.mean()),
        "rollout/length_max": float(emitted.max()),
        "rollout/truncated_frac": float((~batch.sequence["ended"][trajectories.final_N]).float().mean()),
        "tokens/useful": float(batch.num_tokens),
    }


def episode_metrics(batch: RaggedBatch) -> dict[str, float]:
    """How the episodes of a step went; nothing where there are none."""
    if "observation_mask" not in batch.token:
        return {}
    num = len(Trajectories.of(batch))
    cut_off = sum(reason in CUT_OFF for reason in batch.objects["finish_reason"])
    return {
        "episode/turns_mean": float(batch.sequence["num_turns"].sum()) / num,
        "episode/sequences_mean": len(batch) / num,
        "episode/observation_tokens": float(batch.token["observation_mask"].sum()) / num,
        "episode/done_frac": 1.0 - cut_off / num,
    }


def greedy_metrics(batch: RaggedBatch) -> dict[str, float]:
    """Mean baseline over the prompts of a step that have one; nothing where the method has none."""
    if BASELINE not in batch.sequence:
        return {}
    by_group = dict(zip(batch.sequence["group"].tolist(), batch.sequence[BASELINE].tolist(), strict=True))
    found = torch.tensor(list(by_group.values())).nanmean()
    return {} if bool(found.isnan()) else {"reward/greedy_mean": float(found)}


def model_stats(stats: Mapping[str, ModelStats]) -> dict[str, float]:
    """Of all roles' hosts."""
    return {
        "optim/skipped_steps": float(sum(of.num_skipped for of in stats.values())),
        "train/token_budget": float(min(of.token_budget for of in stats.values() if of.token_budget)),
        "train/num_oom": float(sum(of.num_oom for of in stats.values())),
    }


# Process rewards -----------------------------------------------------------------------------------------
# Shapes: N trajectories.


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
