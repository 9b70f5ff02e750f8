"""Checks of what is learned from the sampled answers: advantages, a rehearsed update, the reference, the critic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.extras.doctor.checks import Finding, judged
from quartet.extras.doctor.examined_run import ExaminedRun
from quartet.schedule.groups import GREEDY, Chunk
from quartet.schedule.iteration import ModelScorer, PartScorer, Scorer, UpdatePlan, score_all
from quartet.schedule.model_worker import TrainWorker, Update
from quartet.trainers.experience import Experience, sampled_only
from quartet.trainers.run import Stopwatch

OLD = "old_logprobs"


@dataclass(frozen=True)
class Learned:
    """
    Args:
        experience: the sampled answers with all columns.
        scoring_s, update_s: seconds of the models' passes, and of the rehearsed update.
    """

    experience: Experience
    scoring_s: float
    update_s: float
    metrics: dict[str, float]


async def rehearse(run: ExaminedRun, chunk: Chunk, rewards: Sequence[ColumnSet]) -> Learned:
    """Scores, advantages, and an update that changes nothing, against the log-probabilities of a pass without gradient.

    Raises:
        UserError: a model's values are not finite, or memory is too small.
    """
    roles, attempt, watch = run.roles, run.attempt, Stopwatch()
    scorers = list(roles.column_scorers(attempt.leases))
    if all(scorer.column != OLD for scorer in scorers):
        scorers.append(ModelScorer(attempt.leases, "actor", roles.groups["actor"], run.needs(), OLD, trains=True))
    parts: list[Scorer] = list(scorers)
    if GREEDY in chunk.data.sequence:
        parts = [PartScorer(scorer, sampled_only) for scorer in scorers]
    columns = await score_all(parts, chunk)
    experience: Experience = await attempt.stages.assemble([(chunk, [*rewards, *columns])])
    scoring_s, watch = watch.seconds, Stopwatch()
    metrics = await _update(run, attempt.learned(experience))
    return Learned(experience, scoring_s, watch.seconds, metrics)


async def _update(run: ExaminedRun, batch: RaggedBatch) -> dict[str, float]:
    """What the rehearsed update measured; nothing where no token is learned from."""
    roles, attempt = run.roles, run.attempt
    picked = UpdatePlan(1, 1, roles.recipe.seed).selections(batch, 0)
    if not picked:
        return {}
    actor = roles.train_group("actor")
    update = Update(picked[0], attempt.policy_objective(False), 0, rehearsal=True)
    if roles.ptx is not None:
        await actor.call(TrainWorker.expect_update, 0)
    # Weights are read, and stay: nobody waits for a new version.
    async with attempt.leases.turn("actor", "train", "rehearsal", step=0, reads={"actor": None}):
        (found,) = await actor.call(TrainWorker.update, batch.without_objects(), [update])
    return found


def check_signal(learned: Learned) -> Finding:
    """Advantages are numbers, and not all 0 where scores of a group differ."""
    batch = learned.experience.batch
    groups, scores = batch.sequence["group"].tolist(), batch.sequence["score"].nan_to_num().tolist()
    differ = len({*zip(groups, scores, strict=True)}) > len(set(groups))
    advantages = batch.token["advantages"][batch.token["loss_mask"]]
    broken, alive = int((~torch.isfinite(advantages)).sum()), int((advantages != 0).sum())
    found = f"{alive} of {len(advantages)} trained tokens have an advantage, {broken} one that is not finite"
    return judged("learning_signal", found, failure=broken > 0, warning=alive == 0 and differ)


def check_first_ratio(run: ExaminedRun, learned: Learned) -> Finding:
    """The first mini-batch's policy is the one that the step began with."""
    name, metrics = "first_ratio", learned.metrics
    if "policy/ratio_max" not in metrics:
        return judged(name, "the method has no ratio" if metrics else "no token was trained on")
    mean, most, kl = (metrics[f"policy/{key}"] for key in ("ratio_mean", "ratio_max", "approx_kl"))
    in_fp32 = run.roles.actor.packed.precision == "fp32"
    apart = max(abs(mean - 1), abs(kl), abs(most - 1) if in_fp32 else 0.0)
    found = f"ratio {mean:.6f} (largest {most:.6f}), approximate KL {kl:.2g}, with gradients against without"
    return judged(name, found, failure=not apart <= run.tolerance)


def check_gradient(learned: Learned) -> Finding:
    """The first update's gradient is finite, and there where there is something to learn."""
    name, norm = "gradient", learned.metrics.get("grad_norm")
    if norm is None:
        return judged(name, "no token was trained on")
    has_signal = bool((learned.experience.batch.token["advantages"] != 0).any())
    found = f"the first update's gradient has the norm {norm:.3g}"
    return judged(name, found, failure=not math.isfinite(norm), warning=norm == 0 and has_signal)


def check_reference(run: ExaminedRun, learned: Learned) -> Finding:
    """The reference is the actor as it starts, or is meant to be another model."""
    name, batch = "reference_kl", learned.experience.batch
    if "ref_logprobs" not in batch.token:
        return judged(name, "nothing reads a reference")
    gap = (batch.token[OLD] - batch.token["ref_logprobs"])[batch.token["action_mask"]]
    largest, kl = run.largest(gap.abs()), float(gap.mean()) if len(gap) else 0.0
    found = f"KL to the reference is {kl:.2g} nats per token at the start (at most {largest:.2g})"
    # The reference's log-probabilities are those of all tokens, whatever sampling leaves out.
    if run.roles.recipe.reference.path is not None or run.needs().limits is not None:
        return judged(name, f"{found}; the two are meant to differ", failure=not math.isfinite(kl), warning=kl > 5)
    return judged(name, found, failure=not largest <= run.tolerance)


def check_critic(learned: Learned) -> Finding:
    """Values are numbers, of the size of returns."""
    name, batch = "critic_values", learned.experience.batch
    if "values" not in batch.token:
        return judged(name, "the method has no critic")
    values, returns = (batch.token[column][batch.token["action_mask"]] for column in ("values", "returns"))
    found = f"values from {float(values.min()):.3g} to {float(values.max()):.3g}, "
    found += f"returns from {float(returns.min()):.3g} to {float(returns.max()):.3g}"
    broken = not bool(torch.isfinite(torch.stack([values, returns])).all())
    large = float(values.abs().max()) > 100 * max(1.0, float(returns.abs().max()))
    return judged(name, found, failure=broken, warning=large)
