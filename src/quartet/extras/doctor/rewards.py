"""Checks of the rewards: on sampled answers, and on answers that the data know.

Answers that the data know: what a prompt's row says is right, and what would be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quartet.batch.ragged import ColumnSet
from quartet.batch.trajectory import REWARD_PREFIX, Trajectories
from quartet.config.recipe import RLRecipe
from quartet.config.rewards import MathReward
from quartet.data.datasets import PromptItem
from quartet.extras.doctor.checks import Finding, answer_column, answer_text, compared_reward, judged
from quartet.rewards.math_worker import is_plain_answer
from quartet.rewards.source import combine_scores
from quartet.rollout.protocol import Completion, FinishReason
from quartet.schedule.groups import GREEDY, Chunk, PromptGroup, make_chunk
from quartet.schedule.iteration import Scorer, SubsetScorer, score_chunk
from quartet.text.examples import PromptText
from quartet.text.tokenizer import TextCodec
from quartet.trainers.evaluation import completions_as_group
from quartet.trainers.experience import sampled_and_greedy
from quartet.trainers.model_loader import encode_answer
from quartet.trainers.run import Stopwatch

if TYPE_CHECKING:
    from quartet.extras.doctor.examine import ExaminedRun


def known_answers(recipe: RLRecipe, items: Sequence[PromptItem], num: int) -> list[tuple[PromptItem, str, str]]:
    """Returns the first items that have an answer, at most ``num``, each with it and one that is not: its ``rejected``,
    else what another row is answered by.
    """
    column = answer_column(recipe, items)
    if column is None:
        return []
    is_math = isinstance(compared_reward(recipe, items), MathReward)
    rows = [(item, text) for item in items[: 8 * num] if (text := answer_text(item, column)) is not None]

    def given(text: str) -> str:
        """Writes an answer as a completion has it: of bare LaTeX math would read a part."""
        return f"\\boxed{{{text}}}" if is_math and not is_plain_answer(text) else text

    found = []
    for place, (item, right) in enumerate(rows):
        others = (text for _, text in [*rows[place + 1 :], *rows[:place]] if text.strip() != right.strip())
        wrong = answer_text(item, "rejected") or next(others, None)
        if wrong is not None:
            found.append((item, given(right), given(wrong)))
    return found[:num]


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
    """Computes the recipe's rewards of a chunk.

    Raises:
        UserError: a source failed.
    """
    batch, weights, watch = chunk.data, run.roles.rewards.weights, Stopwatch()
    scorers: list[Scorer] = list(run.roles.reward_scorers(run.loop.leases))
    if GREEDY in batch.sequence:
        scorers = [SubsetScorer(scorer, sampled_and_greedy) for scorer in scorers]
    columns = await score_chunk(scorers, chunk)
    final_N = Trajectories.of(batch).final_N
    found = dict(batch.sequence) | {name: values for one in columns for name, values in one.sequence.items()}
    rewards = {name: found[REWARD_PREFIX + name][final_N].double() for name in weights}
    total_N = torch.full((len(final_N),), torch.nan, dtype=torch.float64)
    if weights:
        scores_N, applies_N = combine_scores(rewards, weights)
        total_N = scores_N.masked_fill(~applies_N, torch.nan)
    return Scored(rewards, total_N, columns, watch.seconds)


def check_values(scored: Scored, known: Scored | None) -> list[Finding]:
    """Checks that every source gives numbers, at least for some answers, and answers differ in their score.

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
    totals = scored.total_N if known is None else known.total_N
    is_constant = known is None or len(totals[~totals.isnan()].unique()) < 2
    is_constant &= len(total) > 1 and bool((total == total[0]).all())
    return [
        judged("reward_values", "; ".join(found), failure=wrong),
        judged("reward_spread", spread, warning=is_constant),
    ]


async def score_known_answers(run: ExaminedRun) -> Scored | None:
    """Scores a right and a wrong answer to each prompt, in turn; None where the data have no answers.

    Raises:
        UserError: a source failed.
    """
    roles, groups = run.roles, list[PromptGroup]()
    known = known_answers(roles.recipe, roles.prompts.items, _KNOWN)
    if not known or roles.environment is not None or not roles.rewards.weights:
        return None
    for place, (item, *texts) in enumerate(known):
        made = [_completion(roles.codec, item.prompt, text) for text in texts]
        groups.append(completions_as_group(roles.codec, place, item, made, texts))
    return await score(run, make_chunk(0, 0, groups))


def _completion(codec: TextCodec, prompt: PromptText, text: str) -> Completion:
    """Makes a completion of a text, to be scored: its token ids are those that it has after its prompt."""
    _, ids = encode_answer(codec, prompt, text, ended=True)
    return Completion("known", "known", tuple(ids), (0.0,) * len(ids), (0,) * len(ids), FinishReason.STOP)


def check_known_answers(run: ExaminedRun, known: Scored | None) -> Finding:
    """Checks that what the data call right scores no less than what is wrong."""
    name = "reward_answers"
    if known is None:
        return judged(name, "the data have no answers to compare")
    right, wrong = known.total_N[0::2], known.total_N[1::2]
    turned = [source for source, values in known.rewards.items() if _is_turned(values[0::2], values[1::2])]
    learned, is_worse = {model.name for model in run.roles.reward_models}, _is_turned(right, wrong)
    found = f"known answers score {float(right.nanmean()):.3g}, wrong ones {float(wrong.nanmean()):.3g}, "
    found += f"{len(right)} rows; the other way round: {', '.join(turned) or 'none'}"
    failure = is_worse and not learned.issuperset(turned)
    return judged(name, found, failure=failure, warning=is_worse or bool(turned))


def _is_turned(right: Tensor, wrong: Tensor) -> bool:
    """Tells whether what is right scores less, row after row: sources that do not read the answer's contents vary."""
    return int((right < wrong).sum()) >= max(2, 0.75 * len(right))


def check_time(run: ExaminedRun, scored: Scored) -> Finding:
    """Estimates the seconds of the rewards in a step, if they take as long for every answer as for those
    sampled here.
    """
    recipe, num = run.roles.recipe, len(scored.total_N)
    whole = scored.seconds * recipe.prompts_per_step * recipe.responses_per_prompt / num
    found = f"{scored.seconds:.2g} s for {num} answers, at most {whole:.3g} s per step"
    return judged("reward_time", found, warning=whole > _SLOW_S and scored.seconds > 1.0)
