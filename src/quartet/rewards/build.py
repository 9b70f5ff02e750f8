"""From a recipe's sections to sources of reward, by their ``type``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from quartet.config.choices import RewardConfig
from quartet.config.plugins import load_object, plugin_entries
from quartet.config.rewards import FallibleReward, RewardSourceConfig
from quartet.rewards import builtin
from quartet.rewards.builtin import MathSource
from quartet.rewards.functions import SubprocessFunction
from quartet.rewards.judge import HTTPSource, judge_source
from quartet.rewards.source import Columns, GuardedReward, RewardSource, Scores
from quartet.text.examples import PromptText

RULES: dict[str, Callable[..., list[float | None]]] = {
    "exact_match": builtin.exact_match,
    "numeric": builtin.numeric,
    "regex": builtin.regex,
    "format": builtin.format_match,
    "length": builtin.length,
}
"""Rules about the text; a section's keys are the function's options."""
FALLIBLE: dict[str, Callable[[Any], RewardSource]] = {
    "function": SubprocessFunction,
    "math": MathSource,
    "http": HTTPSource,
    "judge": judge_source,
}
"""Sources that may fail or take long; each is made of its section, as are those of plug-ins."""


def build_reward(config: RewardConfig) -> GuardedReward:
    """Makes the source of one section, under its rules for failures, deadline and concurrency. Reward models have none:
    they are roles of the trainer.

    Raises:
        UserError: what it needs is not there: a function, a library, a key, a machine that allows sandboxes.
    """
    if isinstance(config, FallibleReward):
        make = FALLIBLE.get(config.type) or load_object(plugin_entries("rewards")[config.type].source)
        return GuardedReward.of(make(config), config)
    return GuardedReward(RuleSource(config))


class RuleSource(RewardSource):
    """A rule with a recipe's options; ``column`` holds the right answers, where it compares with any.

    Attributes:
        opened: the tag that the chat template opens in its generation prompt, of which the completion is the rest.
    """

    compares = True
    opened = ""

    def __init__(self, config: RewardConfig) -> None:
        self.name, self.column = config.name or "", getattr(config, "column", None)
        options = config.model_dump(exclude={"type", "column", *RewardSourceConfig.model_fields})
        self._rule, self._is_format = partial(RULES[config.type], **options), config.type == "format"

    async def score(self, prompts: Sequence[PromptText], completions: Sequence[str], columns: Columns) -> Scores:
        if self._is_format:
            opened = [
                builtin.open_tag_of_prompt(prompt) if isinstance(prompt, str) else self.opened for prompt in prompts
            ]
            return self._rule(completions, opened=opened)
        return self._rule(completions) if self.column is None else self._rule(completions, columns[self.column])
