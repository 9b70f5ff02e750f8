"""All sections of ``rewards``, Quartet's own and those of plug-ins; apart, since theirs are subclasses of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Union, get_args

from pydantic import Field

from quartet.config.errors import UserError
from quartet.config.plugins import RewardType, load, plugins
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
    _ADDED = {name: load(kind.section) for name, kind in PLUGIN_REWARDS.items()}
    if both := {each.model_fields["type"].default for each in get_args(OwnReward)} & _ADDED.keys():
        raise UserError(
            "a plug-in adds a type of reward that is Quartet's own", found=", ".join(both), remedy="uninstall it"
        )
    for _name, _section in _ADDED.items():
        _base = Fallible if PLUGIN_REWARDS[_name].model is None else ModelSource
        _fields = _section.model_fields if isinstance(_section, type) and issubclass(_section, _base) else {}
        if "type" not in _fields or _fields["type"].default != _name:
            is_one = f'a subclass of {_base.__name__} with type: Literal["{_name}"] = "{_name}"'
            raise UserError(
                f"the section of the reward type {_name}, which a plug-in adds, is none",
                found=PLUGIN_REWARDS[_name].section,
                remedy=f"mend it: {is_one}; or uninstall it",
            )
    RewardConfig = Annotated[Union[(OwnReward, *_ADDED.values())], Field(discriminator="type")]
