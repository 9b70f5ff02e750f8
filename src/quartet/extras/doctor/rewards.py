"""Checks of the rewards: on sampled answers, on the same ones once more, and on answers that the data know.

Answers that the data know: what a prompt's row says is right, what would be wrong, and parts of what is right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quartet.batch.ragged import ColumnSet
from quartet.batch.trajectory import REWARD_PREFIX, Trajectories
from quartet.config.recipe import RLRecipe
from quartet.config.rewards import MathReward, NumericReward
from quartet.data.datasets import PromptItem
from quartet.extras.doctor.checks import (
    USUAL,
    Compared,
    Finding,
    answer_column,
    answer_text,
    compared_reward,
    judged,
    usual_column,
)
from quartet.rewards.builtin import NUMBER
from quartet.rewards.math_worker import stands_alone
from quartet.rewards.source import combine
from quartet.rollout.protocol import Completion, FinishReason
from quartet.schedule.groups import GREEDY, Chunk, Group, chunk_of
from quartet.schedule.iteration import PartScorer, Scorer, score_all
from quartet.text.examples import PromptText
from quartet.text.tokenizer import TextCodec
from quartet.trainers.evaluation import answers_of
from quartet.trainers.experience import sampled_and_greedy
from quartet.trainers.model_loader import encode_answer
from quartet.trainers.run import Stopwatch

if TYPE_CHECKING:
    from quartet.extras.doctor.examine import ExaminedRun

_UNITS = re.compile(
    r"\\(?:text|mathrm|mbox|textbf)\s*\{[^{}]*\}|\\[%$,!; ]|\^\{?\\circ\}?|_\{?\d+\}?|\\(?:left|right)\b"
)
_SENTENCE = re.compile(r"(?<![\\\w{])[A-Za-z]{4,}")


@dataclass(frozen=True)
class KnownAnswer:
    """A row's answer, and one that is not: its ``rejected``, else what another row is answered by.

    Args:
        parts: of the right one, wrong by themselves.
        elsewhere: what another column than the one under test says is right.
    """

    item: PromptItem
    right: str
    wrong: str
    parts: tuple[str, ...] = ()
    elsewhere: str | None = None

    def texts(self) -> list[tuple[str, str]]:
        """Returns the kind and text of each."""
        elsewhere = [] if self.elsewhere is None else [("elsewhere", self.elsewhere)]
        return [("right", self.right), ("wrong", self.wrong), *(("part", part) for part in self.parts), *elsewhere]


def known_answers(recipe: RLRecipe, items: Sequence[PromptItem], num: int) -> list[KnownAnswer]:
    """Returns the known answers of the first items that have any, at most ``num``."""
    column = answer_column(recipe, items)
    if column is None:
        return []
    other, is_math = usual_column(items, but=column), isinstance(compared_reward(recipe, items), MathReward)
    rows = [(item, text) for item in items[: 8 * num] if (text := answer_text(item, column)) is not None]

    def given(text: str) -> str:
        """Writes an answer as a completion has it: of bare LaTeX math would read a part."""
        return f"\\boxed{{{text}}}" if is_math and not stands_alone(text) else text

    found = []
    for place, (item, right) in enumerate(rows):
        others = (text for _, text in [*rows[place + 1 :], *rows[:place]] if text.strip() != right.strip())
        wrong = answer_text(item, "rejected") or next(others, None)
        elsewhere = answer_text(item, other) if other is not None else None
        if wrong is not None:
            parts = tuple(map(given, parts_of(right)))
            found.append(KnownAnswer(item, given(right), given(wrong), parts, elsewhere and given(elsewhere)))
    return found[:num]


def parts_of(answer: str) -> list[str]:
    """Makes wrong answers from a right one: its first and last number, and what stands before its first comma or sign.

    A number with its unit has none, a sentence, which ends with the answer, at most the first number.
    """
    bare = _UNITS.sub(" ", answer.rpartition("=")[2] if not _SENTENCE.search(answer) else answer)
    numbers = NUMBER.findall(bare)
    if _SENTENCE.search(bare):
        return numbers[:1] if numbers and numbers[0] != numbers[-1] else []
    head = re.split(r"\s[-+]\s|,\s", bare.strip())[0].strip()
    is_whole = all(head.count(a) == head.count(b) for a, b in ("()", "[]", "{}"))
    parts = [head] if head and is_whole and head != bare.strip() else []
    if len(numbers) > 1 or re.search(r"\\[A-Za-z]|\^", bare):
        parts = [*numbers[:1], *numbers[-1:], *parts]
    return [part for part in dict.fromkeys(parts) if part != bare.strip()]


_KNOWN = 8
"""Rows whose answers are scored."""
_FINE = (False, "")
"""No failure, and nothing to tell."""
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


def check_values(scored: Scored, known: KnownScores | None) -> list[Finding]:
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
    totals = scored.total_N if known is None else known.scored.total_N
    is_constant = known is None or len(totals[~totals.isnan()].unique()) < 2
    is_constant &= len(total) > 1 and bool((total == total[0]).all())
    return [
        judged("reward_values", "; ".join(found), failure=wrong),
        judged("reward_spread", spread, warning=is_constant),
    ]


async def check_repeats(run: ExaminedRun, chunk: Chunk, scored: Scored) -> Finding:
    """Checks that a score belongs to its answer: the same in another order, and once more."""
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


@dataclass(frozen=True)
class KnownScores:
    """Scores of answers that the data know.

    Args:
        texts: row, kind and text of each (``KnownAnswer.texts``).
    """

    scored: Scored
    texts: Sequence[tuple[int, str, str]]

    def places(self, kind: str) -> list[int]:
        return [place for place, (_, found, _) in enumerate(self.texts) if found == kind]

    def beyond(self, values: Tensor, kind: str) -> list[tuple[bool, int]]:
        """Tells of each answer of this ``kind`` whether it scores more than its row's wrong one, and its place."""
        wrong = {self.texts[place][0]: values[place] for place in self.places("wrong")}
        return [(bool(values[place] > wrong[self.texts[place][0]]), place) for place in self.places(kind)]


async def score_known_answers(run: ExaminedRun) -> KnownScores | None:
    """Scores right answers, wrong ones, parts of the right ones and what another column says; None where the data have
    no answers.

    Raises:
        UserError: a source failed.
    """
    roles, groups = run.roles, list[Group]()
    known = known_answers(roles.recipe, roles.prompts.items, _KNOWN)
    if not known or roles.environment is not None or not roles.rewards.weights:
        return None
    for place, answer in enumerate(known):
        texts = [text for _, text in answer.texts()]
        made = [_completion(roles.codec, answer.item.prompt, text) for text in texts]
        groups.append(answers_of(roles.codec, place, answer.item, made, texts))
    kinds = [(row, kind, text) for row, answer in enumerate(known) for kind, text in answer.texts()]
    return KnownScores(await score(run, chunk_of(0, 0, groups)), kinds)


def _completion(codec: TextCodec, prompt: PromptText, text: str) -> Completion:
    """Makes a completion of a text, to be scored: its token ids are those that it has after its prompt."""
    _, ids = encode_answer(codec, prompt, text, ended=True)
    return Completion("known", "known", tuple(ids), (0.0,) * len(ids), (0,) * len(ids), FinishReason.STOP)


def check_known_answers(run: ExaminedRun, known: KnownScores | None) -> Finding:
    """Checks that what the data call right scores no less than what is wrong, and more than a part of it; and that
    another column than the one that is compared with knows the same answers.
    """
    name, roles = "reward_answers", run.roles
    if known is None:
        return judged(name, "the data have no answers to compare")
    scored, places = known.scored, [known.places(kind) for kind in ("right", "wrong")]
    right, wrong = (scored.total_N[found] for found in places)
    turned = [source for source, values in scored.rewards.items() if _is_turned(*(values[found] for found in places))]
    learned, is_worse = {model.name for model in roles.reward_models}, _is_turned(right, wrong)
    found = f"known answers score {float(right.nanmean()):.3g}, wrong ones {float(wrong.nanmean()):.3g}, "
    found += f"{len(right)} rows; the other way round: {', '.join(turned) or 'none'}"
    doubts = [(is_worse and not learned.issuperset(turned), "")]
    rules = {reward.name for reward in roles.recipe.rewards if isinstance(reward, Compared)}
    doubts += [_parts(known, source, is_rule=source in rules) for source in scored.rewards]
    doubts += [_other_column(run, known)]
    failure, warning = any(is_failure for is_failure, _ in doubts), is_worse or bool(turned)
    told = "".join(text for _, text in doubts)
    return judged(name, found + told, failure=failure, warning=warning or bool(told))


def _parts(known: KnownScores, source: str, *, is_rule: bool) -> tuple[bool, str]:
    """Tells whether it is a failure, and in words, that the source takes parts of answers for the whole. Asked of
    rules, and of others that give all right answers one score, and all wrong ones less: these compare, too.
    """
    values = known.scored.rewards[source]
    right, wrong = values[known.places("right")], values[known.places("wrong")]
    if not is_rule and not (len(right.unique()) == 1 and bool((right > wrong).all())):
        return _FINE
    best = right.nan_to_num(nan=-torch.inf).max()
    passing = [place for is_more, place in known.beyond(values, "part") if is_more and values[place] >= best]
    if not passing:
        return _FINE
    row, _, text = known.texts[passing[0]]
    whole = known.texts[known.places("right")[row]][2]
    return len(passing) > 1, f"; {source} takes a part for the whole {len(passing)} times, {text!r} for {whole!r}"


def _other_column(run: ExaminedRun, known: KnownScores) -> tuple[bool, str]:
    """Tells the same of the compared column, which may be the wrong one: answers are not known from it alone."""
    rule = compared_reward(run.roles.recipe, run.roles.prompts.items)
    if rule is None:
        return _FINE
    is_usual, others = rule.column in USUAL, known.beyond(known.scored.rewards[rule.name], "elsewhere")
    if not others:
        alone = f"; known from the column {rule.column!r} alone, which {rule.name} compares with"
        return _FINE if is_usual else (False, alone)
    # Where a text only ends with the answer, rules that look for a number find it.
    if any(is_more for is_more, _ in others) or (is_usual and not isinstance(rule, NumericReward | MathReward)):
        return _FINE
    told = f"; by {rule.column!r}, with which {rule.name} compares, no answer of another column is right: "
    return not is_usual, f"{told}{known.texts[others[0][1]][2][:80]!r}"


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
