"""All sections of ``engine``, Quartet's own and those of plug-ins; apart, since theirs are subclasses of its own.

Where ``type`` is left out the engine is native.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Discriminator, Tag

from quartet.config.engines import NativeEngineConfig, RoutedEngine, VLLMEngineConfig
from quartet.config.plugins import EngineType, plugins, sections

PLUGIN_ENGINES: dict[str, EngineType] = {name: kind for plugin in plugins() for name, kind in plugin.engines.items()}
"""Engines that plug-ins add, by ``type``."""


def _type(engine: Any) -> str | None:
    return str(engine.get("type", "native")) if isinstance(engine, dict) else getattr(engine, "type", None)


if TYPE_CHECKING:
    EngineConfig = NativeEngineConfig | RoutedEngine
else:
    _OWN = (NativeEngineConfig, VLLMEngineConfig)
    _ALL = (*_OWN, *sections("a type of engine", PLUGIN_ENGINES, RoutedEngine, _OWN))
    _TAGGED = tuple(Annotated[section, Tag(section.model_fields["type"].default)] for section in _ALL)
    EngineConfig = Annotated[Union[(*_TAGGED,)], Discriminator(_type)]
