"""Checks of what is learned from the sampled answers: advantages, a rehearsed update, the reference, the critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quartet.batch.columns import ColumnSet
from quartet.batch.ragged import RaggedBatch
from quartet.schedule.groups import GREEDY, Chunk
from quartet.schedule.iteration import Scorer, score_all
from quartet.schedule.learners import UpdatePlan
from quartet.schedule.model_worker import TrainWorker, Update
from quartet.schedule.scorers import ModelScorer, PartScorer
from quartet.train.forward import Needs
from quartet.trainers.doctor.findings import Finding, judged, ok
from quartet.trainers.doctor.joints import Joints
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


async def rehearse(joints: Joints, chunk: Chunk, rewards: Sequence[ColumnSet]) -> Learned:
    """Scores, advantages, and an update that changes nothing, against the log-probabilities of a pass without gradient.

    Raises:
        UserError: a model's values are not finite, or memory is too small.
    """
    roles, attempt, watch = joints.roles, joints.attempt, Stopwatch()
    scorers = list(roles.column_scorers(attempt.leases))
    if all(scorer.column != OLD for scorer in scorers):
        needs = Needs(logprobs=True, mask="action_mask", temperature=joints.temperature)
        scorers.append(ModelScorer(attempt.leases, "actor", roles.groups["actor"], needs, OLD, trains=True))
    parts: list[Scorer] = list(scorers)
    if GREEDY in chunk.data.sequence:
        parts = [PartScorer(scorer, sampled_only) for scorer in scorers]
    columns = await score_all(parts, chunk)
    experience: Experience = await attempt.stages.assemble([(chunk, [*rewards, *columns])])
    scoring_s, watch = watch.seconds, Stopwatch()
    metrics = await _update(joints, attempt.learned(experience))
    return Learned(experience, scoring_s, watch.seconds, metrics)


async def _update(joints: Joints, batch: RaggedBatch) -> dict[str, float]:
    """What the rehearsed update measured; nothing where no token is learned from."""
    roles, attempt = joints.roles, joints.attempt
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
    """Advantages are numbers, and not all 0."""
    batch = learned.experience.batch
    mask = batch.token["loss_mask"]
    advantages = batch.token["advantages"][mask]
    broken, alive = int((~torch.isfinite(advantages)).sum()), int((advantages != 0).sum())
    share = alive / max(1, len(advantages))
    return judged(
        "learning_signal",
        f"{broken} of {len(advantages)} advantages are not finite"
        if broken
        else f"{share:.0%} of {len(advantages)} trained tokens have an advantage",
        "see reward_spread: where all answers of a prompt score alike, it teaches nothing",
        failure=broken > 0,
        warning=alive == 0,
    )


def check_first_ratio(joints: Joints, learned: Learned) -> Finding:
    """The first mini-batch's policy is the one that the step began with."""
    name, metrics = "first_ratio", learned.metrics
    if "policy/ratio_max" not in metrics:
        return ok(name, "the method has no ratio" if metrics else "no token was trained on")
    mean, most, kl = (metrics[f"policy/{key}"] for key in ("ratio_mean", "ratio_max", "approx_kl"))
    apart = max(abs(mean - 1), abs(most - 1) if joints.tolerance < 0.1 else 0.0, abs(kl))
    return judged(
        name,
        f"ratio {mean:.6f} (largest {most:.6f}), approximate KL {kl:.2g}, with gradients against without",
        "passes with and without gradients must compute the same: no dropout, one temperature, one precision",
        failure=not apart <= joints.tolerance,
    )


def check_gradient(learned: Learned) -> Finding:
    name, norm = "gradient", learned.metrics.get("grad_norm")
    if norm is None:
        return ok(name, "no token was trained on")
    is_finite = bool(torch.isfinite(torch.tensor(norm)))
    has_signal = bool((learned.experience.batch.token["advantages"] != 0).any())
    return judged(
        name,
        f"the first update's gradient has the norm {norm:.3g}",
        "check the model's weights and precision; see learning_signal",
        failure=not is_finite,
        warning=norm == 0 and has_signal,
    )


def check_reference(joints: Joints, learned: Learned) -> Finding:
    """The reference is the actor as it starts, or is meant to be another model."""
    name, batch = "reference_kl", learned.experience.batch
    if "ref_logprobs" not in batch.token:
        return ok(name, "nothing reads a reference")
    mask = batch.token["action_mask"]
    gap = (batch.token[OLD] - batch.token["ref_logprobs"])[mask]
    largest, kl = joints.largest(gap.abs()), float(gap.mean()) if len(gap) else 0.0
    path = joints.roles.recipe.reference.path
    if path is not None:
        return judged(
            name,
            f"KL to the reference {path} is {kl:.3g} nats per token at the start",
            "see that reference.path and the actor belong to the same family and tokenizer",
            failure=not torch.isfinite(torch.tensor(kl)),
            warning=kl > 5,
        )
    return judged(
        name,
        f"KL to the reference is {kl:.2g} (log-probabilities differ by {largest:.2g})",
        "the reference must be the actor as it starts, in the same precision and at the same temperature",
        failure=not largest <= joints.tolerance,
    )


def check_critic(joints: Joints, learned: Learned) -> Finding:
    name, batch = "critic_values", learned.experience.batch
    if "values" not in batch.token:
        return ok(name, "the method has no critic")
    values = batch.token["values"][batch.token["action_mask"]]
    scores = batch.token["returns"][batch.token["action_mask"]]
    return judged(
        name,
        f"values from {float(values.min()):.3g} to {float(values.max()):.3g}, "
        f"returns from {float(scores.min()):.3g} to {float(scores.max()):.3g}",
        "train the critic first (critic.warmup_steps), or begin with a copy of the reward model",
        failure=not bool(torch.isfinite(values).all() and torch.isfinite(scores).all()),
        warning=float(values.abs().max()) > 100 * max(1.0, float(scores.abs().max())),
    )
