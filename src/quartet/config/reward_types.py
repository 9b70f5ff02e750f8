"""All sections of ``rewards``, Quartet's own and those of plug-ins; apart, since theirs are subclasses of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Union, get_args

from pydantic import Field

from quartet.config.errors import UserError
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
    if both := {each.model_fields["type"].default for each in get_args(OwnReward)} & PLUGIN_REWARDS.keys():
        raise UserError(
            "a plug-in adds a type of reward that is Quartet's own", found=", ".join(both), remedy="uninstall it"
        )
    _ADDED = sections("reward type", Fallible, PLUGIN_REWARDS)
    RewardConfig = Annotated[Union[(OwnReward, *_ADDED)], Field(discriminator="type")]
