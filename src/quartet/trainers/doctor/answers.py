"""Answers that the data know: what a prompt's row says is right, and what would be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quartet.config.recipe import RLRecipe
from quartet.config.rewards import ExactMatchReward, MathReward, NumericReward, RegexReward
from quartet.data.datasets import PromptItem

_USUAL = ("completion", "chosen", "answer", "solution", "response", "output", "target", "ground_truth")


@dataclass(frozen=True)
class KnownAnswer:
    """A row's answer, and one that is not: its ``rejected``, else what another row is answered by."""

    item: PromptItem
    right: str
    wrong: str


def answer_column(recipe: RLRecipe, items: Sequence[PromptItem]) -> str | None:
    """The column with right answers: what a rule compares with, else one with a usual name; None: there is none."""
    compared = [
        reward.column
        for reward in recipe.rewards
        if isinstance(reward, ExactMatchReward | NumericReward | RegexReward | MathReward)
    ]
    names = [*(name for name in compared if name is not None), *_USUAL]
    return next((name for name in names if items and _text(items[0], name) is not None), None)


def known_answers(recipe: RLRecipe, items: Sequence[PromptItem], num: int) -> list[KnownAnswer]:
    """Of the first items that have any, at most ``num``."""
    column = answer_column(recipe, items)
    if column is None:
        return []
    rows = [(item, text) for item in items[: 8 * num] if (text := _text(item, column)) is not None]
    found = []
    for place, (item, right) in enumerate(rows):
        others = (text for _, text in [*rows[place + 1 :], *rows[:place]] if text.strip() != right.strip())
        wrong = _text(item, "rejected") or next(others, None)
        if wrong is not None:
            found.append(KnownAnswer(item, right, wrong))
    return found[:num]


def _text(item: PromptItem, column: str) -> str | None:
    value = item.columns.get(column)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return str(value)
