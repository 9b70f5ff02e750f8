"""Answers that the data know: what a prompt's row says is right, what would be wrong, and parts of what is right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from quartet.config import UserError
from quartet.config.recipe import RLRecipe
from quartet.config.rewards import ExactMatchReward, MathReward, NumericReward, RegexReward
from quartet.data.datasets import PromptItem
from quartet.data.fields import column_at
from quartet.rewards.builtin import NUMBER, right_answers
from quartet.rewards.math_worker import stands_alone

_FIRST = ("completion", "chosen", "answer", "solution", "response", "output", "target", "ground_truth")
USUAL = (*_FIRST, "final_answer", "expected_answer", "correct_answer", "gold")
"""Names of columns with right answers."""
_UNITS = re.compile(
    r"\\(?:text|mathrm|mbox|textbf)\s*\{[^{}]*\}|\\[%$,!; ]|\^\{?\\circ\}?|_\{?\d+\}?|\\(?:left|right)\b"
)
_SENTENCE = re.compile(r"(?<![\\\w{])[A-Za-z]{4,}")
Compared = ExactMatchReward | NumericReward | RegexReward | MathReward


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
        """Kind and text of each."""
        elsewhere = [] if self.elsewhere is None else [("elsewhere", self.elsewhere)]
        return [("right", self.right), ("wrong", self.wrong), *(("part", part) for part in self.parts), *elsewhere]


def compared_reward(recipe: RLRecipe, items: Sequence[PromptItem]) -> Compared | None:
    """The first rule that compares with a column of the data."""
    for reward in recipe.rewards if items else ():
        if isinstance(reward, Compared) and reward.column and answer_text(items[0], reward.column) is not None:
            return reward
    return None


def answer_column(recipe: RLRecipe, items: Sequence[PromptItem]) -> str | None:
    """The column with right answers: what a rule compares with, else one with a usual name; None: there is none."""
    compared = compared_reward(recipe, items)
    return compared.column if compared is not None else _usual_column(items)


def known_answers(recipe: RLRecipe, items: Sequence[PromptItem], num: int) -> list[KnownAnswer]:
    """Of the first items that have any, at most ``num``."""
    column = answer_column(recipe, items)
    if column is None:
        return []
    other, is_math = _usual_column(items, but=column), isinstance(compared_reward(recipe, items), MathReward)
    rows = [(item, text) for item in items[: 8 * num] if (text := answer_text(item, column)) is not None]

    def given(text: str) -> str:
        """As a completion has it: of bare LaTeX math would read a part."""
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
    """Wrong answers made from a right one: its first and last number, and what stands before its first comma or sign.

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


def answer_text(item: PromptItem, column: str) -> str | None:
    """The first of the row's right answers in ``column``; None where that holds anything else."""
    try:
        value = column_at(item.columns, column)
        return None if isinstance(value, bool) else next(iter(right_answers(value)), None)
    except (KeyError, UserError):
        return None


def _usual_column(items: Sequence[PromptItem], but: str | None = None) -> str | None:
    return next((name for name in USUAL if name != but and items and answer_text(items[0], name) is not None), None)
