"""Answers that the data know: what a prompt's row says is right, what would be wrong, and parts of what is right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from quartet.config.recipe import RLRecipe
from quartet.config.rewards import MathReward
from quartet.data.datasets import PromptItem
from quartet.extras.doctor.checks import answer_column, answer_text, compared_reward, usual_column
from quartet.rewards.builtin import NUMBER
from quartet.rewards.math_worker import stands_alone

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
        """Kind and text of each."""
        elsewhere = [] if self.elsewhere is None else [("elsewhere", self.elsewhere)]
        return [("right", self.right), ("wrong", self.wrong), *(("part", part) for part in self.parts), *elsewhere]


def known_answers(recipe: RLRecipe, items: Sequence[PromptItem], num: int) -> list[KnownAnswer]:
    """Of the first items that have any, at most ``num``."""
    column = answer_column(recipe, items)
    if column is None:
        return []
    other, is_math = usual_column(items, but=column), isinstance(compared_reward(recipe, items), MathReward)
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
