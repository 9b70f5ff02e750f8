"""Sections that a ``type`` chooses among Quartet's own and those of plug-ins: of ``engine``, ``rewards`` and
``rollout.speculation``; apart, since those of plug-ins are subclasses of what ``engines`` and ``rewards`` have.

An engine whose ``type`` is left out is native.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Discriminator, Field, Tag

from quartet.config import rewards
from quartet.config.engines import BaseSpeculationConfig, NativeEngineConfig, RoutedEngineConfig, VLLMEngineConfig
from quartet.config.plugins import config_classes_by_type
from quartet.config.rewards import BaseModelReward, FallibleReward, RewardSourceConfig

if TYPE_CHECKING:
    EngineConfig = NativeEngineConfig | RoutedEngineConfig
    RewardConfig = RewardSourceConfig
    SpeculationConfig = BaseSpeculationConfig
else:

    def _engine_type(engine: Any) -> str | None:
        return str(engine.get("type", "native")) if isinstance(engine, dict) else getattr(engine, "type", None)

    _ENGINES = config_classes_by_type(
        "engines", RoutedEngineConfig, {"native": NativeEngineConfig, "vllm": VLLMEngineConfig}
    )
    _TAGGED = tuple(Annotated[section, Tag(name)] for name, section in _ENGINES.items())
    EngineConfig = Annotated[reduce(or_, _TAGGED), Discriminator(_engine_type)]
    _SOURCES = [
        each for each in vars(rewards).values() if isinstance(each, type) and issubclass(each, RewardSourceConfig)
    ]
    _OWN = {each.model_fields["type"].default: each for each in _SOURCES if "type" in each.model_fields}
    _REWARDS = config_classes_by_type(
        "rewards", lambda kind: FallibleReward if kind.model is None else BaseModelReward, _OWN
    )
    RewardConfig = Annotated[reduce(or_, _REWARDS.values()), Field(discriminator="type")]
    _DRAFTERS = tuple(config_classes_by_type("drafters", BaseSpeculationConfig).values())
    SpeculationConfig = reduce(or_, _DRAFTERS or (BaseSpeculationConfig,))
    if len(_DRAFTERS) > 1:
        SpeculationConfig = Annotated[SpeculationConfig, Field(discriminator="type")]
