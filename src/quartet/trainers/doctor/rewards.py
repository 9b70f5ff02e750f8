"""Checks of the rewards: on sampled answers, on the same ones once more, and on answers that the data know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quartet.batch.columns import ColumnSet
from quartet.batch.trajectory import REWARD_PREFIX, Trajectories
from quartet.rewards.combine import combine
from quartet.schedule.groups import GREEDY, Chunk, Group, chunk_of
from quartet.schedule.iteration import Scorer, score_all
from quartet.schedule.scorers import PartScorer
from quartet.trainers.doctor.answers import known_answers
from quartet.trainers.doctor.examined_run import ExaminedRun
from quartet.trainers.doctor.findings import Finding, judged
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
        total_N: the sum that is trained on; NaN where no source applies.
        columns: as the scorers gave them.
        seconds: of them all, side by side.
    """

    rewards: Mapping[str, Tensor]
    total_N: Tensor
    columns: Sequence[ColumnSet]
    seconds: float


async def score(run: ExaminedRun, chunk: Chunk) -> Scored:
    """The recipe's rewards of a chunk.

    Raises:
        UserError: a source failed.
    """
    batch, weights, watch = chunk.data, run.roles.rewards.weights, Stopwatch()
    scorers: list[Scorer] = list(run.roles.reward_scorers(run.attempt.leases))
    if GREEDY in batch.sequence:
        scorers = [PartScorer(scorer, sampled_and_greedy) for scorer in scorers]
    columns = await score_all(scorers, chunk)
    final_N = Trajectories.of(batch).final_N
    found = dict(batch.sequence) | {name: values for one in columns for name, values in one.sequence.items()}
    rewards = {name: found[REWARD_PREFIX + name][final_N].double() for name in weights}
    total_N = torch.full((len(final_N),), torch.nan, dtype=torch.float64)
    if weights:
        scores_N, applies_N = combine(rewards, weights)
        total_N = scores_N.masked_fill(~applies_N, torch.nan)
    return Scored(rewards, total_N, columns, watch.seconds)


def check_values(scored: Scored, known: Scored | None) -> list[Finding]:
    """Every source gives numbers, at least for some answers, and answers differ in their score.

    Args:
        known: of answers that the data know; where their scores differ, sampled ones may be alike by chance.
    """
    if not scored.rewards:
        return [judged(name, "no reward") for name in ("reward_values", "reward_spread")]
    found, wrong, constant = [], False, []
    for name, values in scored.rewards.items():
        given = values[~values.isnan()]
        wrong |= not len(given) or bool(given.isinf().any())
        constant += [name] if len(given) > 1 and bool((given == given[0]).all()) else []
        found.append(f"{name}: {float(given.mean()):.3g} on average, {len(given)} of {len(values)} answers")
    total = scored.total_N[~scored.total_N.isnan()]
    spread = f"the total has {len(set(total.tolist()))} values in {len(total)} answers"
    spread += f"; always the same: {', '.join(constant)}" if constant else ""
    is_constant = known is None or len(known.total_N[~known.total_N.isnan()].unique()) < 2
    is_constant &= len(total) > 1 and bool((total == total[0]).all())
    return [
        judged("reward_values", "; ".join(found), failure=wrong),
        judged("reward_spread", spread, warning=is_constant),
    ]


async def check_repeats(run: ExaminedRun, chunk: Chunk, scored: Scored) -> Finding:
    """A score belongs to its answer: the same in another order, and once more."""
    name, batch = "reward_repeats", chunk.data
    if run.roles.environment is not None or GREEDY in batch.sequence or not scored.rewards:
        return judged(name, "not asked twice")
    again = await score(run, Chunk(0, 0, batch.select(list(reversed(range(len(batch)))))))
    apart = [
        source
        for source, values in again.rewards.items()
        if not torch.allclose(values.flip(0), scored.rewards[source], atol=1e-4, rtol=1e-4, equal_nan=True)
    ]
    found = f"{len(apart)} of {len(again.rewards)} sources give other scores in another order {apart or ''}"
    return judged(name, found, warning=bool(apart))


async def score_known_answers(run: ExaminedRun) -> Scored | None:
    """Of right answers and wrong ones, in turn; None where the data have none.

    Raises:
        UserError: a source failed.
    """
    roles, groups = run.roles, list[Group]()
    known = known_answers(roles.recipe, roles.prompts.items, _KNOWN)
    if not known or roles.environment is not None or not roles.rewards.weights:
        return None
    for place, answer in enumerate(known):
        texts = (answer.right, answer.wrong)
        stored = [Answer(answer.item.prompt_id, 0, answer.item.prompt, text, "stop", 0, {}) for text in texts]
        made = [as_completion(roles.codec, one) for one in stored]
        groups.append(answers_of(roles.codec, place, answer.item, made, texts))
    return await score(run, chunk_of(0, 0, groups))


def check_known_answers(run: ExaminedRun, scored: Scored | None) -> Finding:
    """What the data call right scores no less than what is wrong."""
    name, roles = "reward_answers", run.roles
    if scored is None:
        return judged(name, "the data have no answers to compare")
    right, wrong = scored.total_N[0::2], scored.total_N[1::2]
    turned = [source for source, values in scored.rewards.items() if _is_turned(values[0::2], values[1::2])]
    learned, is_worse = {model.name for model in roles.reward_models}, _is_turned(right, wrong)
    found = f"known answers score {float(right.nanmean()):.3g}, wrong ones {float(wrong.nanmean()):.3g}, "
    found += f"{len(right)} rows; the other way round: {', '.join(turned) or 'none'}"
    return judged(name, found, failure=is_worse and not learned.issuperset(turned), warning=is_worse or bool(turned))


def _is_turned(right: Tensor, wrong: Tensor) -> bool:
    """Whether what is right scores less, row after row: sources that do not read the answer's contents vary."""
    return int((right < wrong).sum()) >= max(2, 0.75 * len(right))


def check_time(run: ExaminedRun, scored: Scored) -> Finding:
    """Seconds of the rewards in a step, if they take as long for every answer as for those sampled here."""
    recipe, num = run.roles.recipe, len(scored.total_N)
    whole = scored.seconds * recipe.prompts_per_step * recipe.responses_per_prompt / num
    found = f"{scored.seconds:.2g} s for {num} answers, at most {whole:.3g} s per step"
    return judged("reward_time", found, warning=whole > _SLOW_S and scored.seconds > 1.0)
