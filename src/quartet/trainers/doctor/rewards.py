"""Checks of the rewards: on sampled answers, on the same ones once more, and on answers that the data know."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quartet.batch.columns import ColumnSet
from quartet.batch.trajectory import REWARD_PREFIX, Trajectories
from quartet.rewards.combine import combine
from quartet.schedule.groups import GREEDY, Chunk, chunk_of
from quartet.schedule.iteration import Scorer
from quartet.schedule.scorers import PartScorer
from quartet.trainers.doctor.answers import known_answers
from quartet.trainers.doctor.findings import Finding, judged, ok
from quartet.trainers.doctor.joints import Joints
from quartet.trainers.evaluation import answers_of, as_completion
from quartet.trainers.evaluation_files import Answer
from quartet.trainers.experience import sampled_and_greedy
from quartet.trainers.run import Stopwatch

_KNOWN = 8
"""Rows whose answers are scored."""
_SLOW_S = 60.0
"""Seconds of rewards in a step that are not worth a word."""


@dataclass(frozen=True)
class Scored:
    """
    Args:
        rewards: ``[N]`` of each source by name, NaN where it does not apply.
        columns: as the scorers gave them.
        seconds: of them all, side by side.
    """

    rewards: Mapping[str, Tensor]
    columns: Sequence[ColumnSet]
    seconds: float

    def total(self, weights: Mapping[str, float]) -> Tensor:
        """``[N]`` the sum that is trained on; NaN where no source applies."""
        scores, applies = combine(self.rewards, weights)
        return scores.masked_fill(~applies, float("nan"))


async def score(joints: Joints, chunk: Chunk) -> Scored:
    """The recipe's rewards of a chunk.

    Raises:
        UserError: a source failed.
    """
    batch, watch = chunk.data, Stopwatch()
    scorers: list[Scorer] = list(joints.roles.reward_scorers(joints.attempt.leases))
    if GREEDY in batch.sequence:
        scorers = [PartScorer(scorer, sampled_and_greedy) for scorer in scorers]
    columns = list(await asyncio.gather(*(scorer.score(chunk) for scorer in scorers)))
    final = Trajectories.of(batch).final_N
    own = {name: values for name, values in batch.sequence.items() if name.startswith(REWARD_PREFIX)}
    found = own | {name: values for one in columns for name, values in one.sequence.items()}
    rewards = {
        name.removeprefix(REWARD_PREFIX): values[final].double()
        for name, values in found.items()
        if name.startswith(REWARD_PREFIX)
    }
    return Scored(rewards, columns, watch.seconds)


def check_values(scored: Scored) -> Finding:
    """Every source gives numbers, at least for some answers."""
    silent = [name for name, values in scored.rewards.items() if bool(values.isnan().all())]
    endless = [name for name, values in scored.rewards.items() if bool(values.isinf().any())]
    figures = "; ".join(
        f"{name}: {float(values.nanmean()):.3g} on average, {int((~values.isnan()).sum())} of {len(values)} answers"
        for name, values in scored.rewards.items()
    )
    if silent or endless:
        what = f"{', '.join(silent)} scores no answer" if silent else f"{', '.join(endless)} is not finite"
        return Finding("reward_values", "failure", f"{what} ({figures})", "mend the reward, or leave it out")
    return ok("reward_values", figures or "no reward: a teacher's answers are learned")


def check_spread(joints: Joints, scored: Scored) -> Finding:
    """Answers differ in their score: where all are alike nothing is learned."""
    name = "reward_spread"
    if not scored.rewards:
        return ok(name, "no reward")
    total = scored.total(joints.roles.rewards.weights)
    total = total[~total.isnan()]
    constant = [source for source, values in scored.rewards.items() if len(set(values[~values.isnan()].tolist())) == 1]
    found = f"scores from {float(total.min()):.3g} to {float(total.max()):.3g}" if len(total) else "no score"
    found += f"; always the same: {', '.join(constant)}" if constant else ""
    return judged(
        name,
        f"{found}, {len(total)} answers",
        "begin with a model that succeeds at times, easier prompts, or a reward with more grades",
        warning=len(total) > 1 and bool((total == total[0]).all()),
    )


async def check_repeats(joints: Joints, chunk: Chunk, scored: Scored) -> Finding:
    """A score belongs to its answer: the same in another order, and once more."""
    name, batch = "reward_repeats", chunk.data
    if joints.roles.environment is not None or GREEDY in batch.sequence or not scored.rewards:
        return ok(name, "not asked twice")
    turned = batch.select(list(reversed(range(len(batch)))))
    again = await score(joints, Chunk(0, 0, turned))
    apart = [
        source
        for source, values in again.rewards.items()
        if not torch.allclose(values.flip(0), scored.rewards[source], atol=1e-4, rtol=1e-4, equal_nan=True)
    ]
    return judged(
        name,
        f"asked in another order, {', '.join(apart)} gives answers other scores"
        if apart
        else "answers keep their scores in another order",
        "scores must be in the order of the completions; a random judge wants several votes",
        warning=bool(apart),
    )


async def check_known_answers(joints: Joints) -> Finding:
    """What the data call right scores no less than what is wrong."""
    name, roles = "reward_answers", joints.roles
    known = known_answers(roles.recipe, roles.prompts.items, _KNOWN)
    if not known or roles.environment is not None or not roles.rewards.weights:
        return ok(name, "the data have no answers to compare")
    groups = []
    for place, answer in enumerate(known):
        texts = (answer.right, answer.wrong)
        stored = [Answer(answer.item.prompt_id, 0, answer.item.prompt, text, "stop", 0, {}) for text in texts]
        made = [as_completion(roles.codec, one) for one in stored]
        groups.append(answers_of(roles.codec, place, answer.item, made, texts))
    scored = await score(joints, chunk_of(0, 0, groups))
    total = scored.total(roles.rewards.weights)
    gaps = {source: values[0::2] - values[1::2] for source, values in scored.rewards.items()}
    turned = [source for source, gap in gaps.items() if _is_turned(gap)]
    learned = {model.name for model in roles.reward_models}
    right, wrong = float(total[0::2].nanmean()), float(total[1::2].nanmean())
    worse = _is_turned(total[0::2] - total[1::2])
    return judged(
        name,
        f"known answers score {right:.3g}, wrong ones {wrong:.3g}, {len(known)} rows"
        + (f"; the other way round: {', '.join(turned)}" if turned else ""),
        "see that the reward reads the column that it means (data.columns), and the sign of its weight",
        failure=worse and not learned.issuperset(turned),
        warning=worse or bool(turned),
    )


def _is_turned(gap: Tensor) -> bool:
    """Whether what is right scores less, row after row: sources that do not read the answer's contents vary."""
    return int((gap < 0).sum()) >= max(2, 0.75 * len(gap))


def check_time(joints: Joints, scored: Scored) -> Finding:
    """Seconds of the rewards in a step, if they take as long for every answer as for those sampled here."""
    recipe = joints.roles.recipe
    num = len(next(iter(scored.rewards.values()), ()))
    whole = scored.seconds * recipe.prompts_per_step * recipe.responses_per_prompt / max(1, num)
    return judged(
        "reward_time",
        f"{scored.seconds:.2g} s for {num} answers, at most {whole:.3g} s per step",
        "raise the reward's concurrency or batch_size, or give its server more room",
        warning=whole > _SLOW_S and whole > num and scored.seconds > 1.0,
    )
