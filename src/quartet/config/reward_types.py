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
    ModelSource,
    NumericReward,
    RegexReward,
)

PLUGIN_REWARDS: dict[str, RewardType] = {name: kind for plugin in plugins() for name, kind in plugin.rewards.items()}
"""Sources that plug-ins add, by ``type``."""

OwnReward = (
    ModelReward
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
    _OWN = get_args(OwnReward)
    _ADDED = sections("a type of reward", {n: k for n, k in PLUGIN_REWARDS.items() if k.model is None}, Fallible, _OWN)
    _MODELS = {name: kind for name, kind in PLUGIN_REWARDS.items() if kind.model is not None}
    _ADDED += sections("a type of reward", _MODELS, ModelSource, _OWN)
    RewardConfig = Annotated[Union[(OwnReward, *_ADDED)], Field(discriminator="type")]
