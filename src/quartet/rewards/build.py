"""From a recipe's sections to sources: the one table of the family."""

from __future__ import annotations

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
)
from quartet.rewards.code_tests import CodeSource
from quartet.rewards.http_reward import HTTPSource
from quartet.rewards.judge import judge_source
from quartet.rewards.mathematics import MathSource
from quartet.rewards.process_functions import ProcessFunction
from quartet.rewards.rules import rule_source
from quartet.rewards.source import GuardedReward, RewardSource

CallableReward = (
    FunctionReward
    | ExactMatchReward
    | NumericReward
    | RegexReward
    | FormatReward
    | LengthReward
    | MathReward
    | CodeReward
    | HTTPReward
    | JudgeReward
)
"""Sources that are asked with text. Models are roles of the trainer."""


def build_reward(config: CallableReward) -> GuardedReward:
    """The source of one section, under its rules for failures, deadline and concurrency.

    Raises:
        UserError: what it needs is not there: a function, a library, a key, a machine that allows sandboxes.
    """
    source: RewardSource
    batch_size: int | None = None
    match config:
        case FunctionReward():
            source, batch_size = ProcessFunction(config), config.batch_size
        case MathReward():
            source, batch_size = MathSource(config), 1
        case CodeReward():
            source, batch_size = CodeSource(config), 1
        case HTTPReward():
            source, batch_size = HTTPSource(config), config.batch_size
        case JudgeReward():
            source, batch_size = judge_source(config), 1
        case _:
            return GuardedReward(rule_source(config))
    return GuardedReward(
        source,
        on_error=config.on_error,
        deadline_s=config.deadline_s,
        batch_size=batch_size,
        concurrency=config.concurrency,
    )
