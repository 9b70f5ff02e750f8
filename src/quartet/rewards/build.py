"""From a recipe's sections to sources: the tables of the family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from quartet.config.rewards import (
    CodeReward,
    ExactMatchReward,
    FormatReward,
    FunctionReward,
    HTTPReward,
    JudgeReward,
    LengthReward,
    MathReward,
    NumericReward,
    RegexReward,
    RewardSourceConfig,
)
from quartet.rewards import builtin
from quartet.rewards.code_tests import CodeSource
from quartet.rewards.judge import judge_source
from quartet.rewards.mathematics import MathSource
from quartet.rewards.remote import HTTPSource
from quartet.rewards.source import GuardedReward, RewardSource
from quartet.rewards.subprocess_functions import SubprocessFunction
from quartet.text.examples import PromptText

RULES: dict[type[RewardSourceConfig], Callable[..., list[float | None]]] = {
    ExactMatchReward: builtin.exact_match,
    NumericReward: builtin.numeric,
    RegexReward: builtin.regex,
    FormatReward: builtin.format_match,
    LengthReward: builtin.length,
}
"""Rules about the text; a section's keys are the function's options."""


def build_reward(config: RewardSourceConfig) -> GuardedReward:
    """The source of one section, under its rules for failures, deadline and concurrency. Reward models have none: they
    are roles of the trainer.

    Raises:
        UserError: what it needs is not there: a function, a library, a key, a machine that allows sandboxes.
    """
    match config:
        case FunctionReward():
            return GuardedReward.of(SubprocessFunction(config), config)
        case MathReward():
            return GuardedReward.of(MathSource(config), config)
        case CodeReward():
            return GuardedReward.of(CodeSource(config), config)
        case HTTPReward():
            return GuardedReward.of(HTTPSource(config), config)
        case JudgeReward():
            return GuardedReward.of(judge_source(config), config)
    return GuardedReward(RuleSource(config))


class RuleSource(RewardSource):
    """A rule with a recipe's options; ``column`` holds the right answers, where it compares with any."""

    def __init__(self, config: RewardSourceConfig) -> None:
        self.name, self.column = config.name or "", getattr(config, "column", None)
        options = config.model_dump(exclude={"type", "column", *RewardSourceConfig.model_fields})
        self._rule = partial(RULES[type(config)], **options)

    async def score(
        self, prompts: Sequence[PromptText], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[float | None]:
        return self._rule(completions) if self.column is None else self._rule(completions, columns[self.column])
