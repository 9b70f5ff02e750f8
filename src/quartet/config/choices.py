"""Sections that a ``type`` chooses among Quartet's own and those of plug-ins: of ``engine``, ``rewards`` and
``rollout.speculation``; apart, since those of plug-ins are subclasses of what ``engines`` and ``rewards`` have.

An engine whose ``type`` is left out is native.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import Discriminator, Field, Tag

from quartet.config.engines import NativeEngineConfig, RoutedEngine, Speculation, VLLMEngineConfig
from quartet.config.plugins import sections
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
    EngineConfig = NativeEngineConfig | RoutedEngine
    RewardConfig = Annotated[OwnReward, Field(discriminator="type")]
    SpeculationConfig = Speculation
else:

    def _engine_type(engine: Any) -> str | None:
        return str(engine.get("type", "native")) if isinstance(engine, dict) else getattr(engine, "type", None)

    _ENGINES = sections("engines", RoutedEngine, {"native": NativeEngineConfig, "vllm": VLLMEngineConfig})
    _TAGGED = tuple(Annotated[section, Tag(name)] for name, section in _ENGINES.items())
    EngineConfig = Annotated[reduce(or_, _TAGGED), Discriminator(_engine_type)]
    _REWARDS = sections(
        "rewards",
        lambda kind: Fallible if kind.model is None else ModelSource,
        {section.model_fields["type"].default: section for section in get_args(OwnReward)},
    )
    RewardConfig = Annotated[reduce(or_, _REWARDS.values()), Field(discriminator="type")]
    _DRAFTERS = tuple(sections("drafters", Speculation).values())
    SpeculationConfig = reduce(or_, _DRAFTERS or (Speculation,))
    if len(_DRAFTERS) > 1:
        SpeculationConfig = Annotated[SpeculationConfig, Field(discriminator="type")]
