"""All sections of ``rewards``, Quartet's own and those of plug-ins; apart, since theirs are subclasses of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Union, get_args

from pydantic import Field

from quartet.config.plugins import RewardType, plugins, sections
from quartet.config.rewards import (
    ExactMatchReward,
    Fallible,
    FormatReward,
    FunctionReward,
    HTTPReward,
    JudgeReward,
    LengthReward,
    MathReward,
    ModelReward,
    NumericReward,
    ProcessModelReward,
    RegexReward,
)

PLUGIN_REWARDS: dict[str, RewardType] = {name: kind for plugin in plugins() for name, kind in plugin.rewards.items()}
"""Sources that plug-ins add, by ``type``."""

OwnReward = (
    ModelReward
    | ProcessModelReward
    | FunctionReward
    | ExactMatchReward
    | NumericReward
    | RegexReward
    | FormatReward
    | LengthReward
    | MathReward
    | HTTPReward
    | JudgeReward
)
if TYPE_CHECKING:
    RewardConfig = Annotated[OwnReward, Field(discriminator="type")]
else:
    _ADDED = sections("a type of reward", PLUGIN_REWARDS, Fallible, get_args(OwnReward))
    RewardConfig = Annotated[Union[(OwnReward, *_ADDED)], Field(discriminator="type")]
