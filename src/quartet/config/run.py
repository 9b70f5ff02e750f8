"""What every recipe has: where a run's figures go, what it says when it ends, what it calls on the way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import BeforeValidator, Field, JsonValue, SecretStr, field_validator

from quartet.config.common import DEVICES, CheckpointConfig, TensorBoardConfig, TrackerConfig
from quartet.config.plugins import TrackerType, plugins, sections
from quartet.config.strict import Rows, Steps, Strict

PLUGIN_TRACKERS: dict[str, TrackerType] = {name: kind for plugin in plugins() for name, kind in plugin.trackers.items()}
"""Trackers that plug-ins add, by ``type``."""


def _by_name(value: Any) -> Any:
    """A tracker's name alone stands for it with its defaults."""
    if isinstance(value, str):
        return {"type": value}
    # What a validator returns is no longer read as JSON, which has no tuples.
    return {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()} if isinstance(value, dict) else value


if TYPE_CHECKING:
    AnyTracker = TrackerConfig
else:
    _ALL = (TensorBoardConfig, *sections("a tracker", PLUGIN_TRACKERS, TrackerConfig, (TensorBoardConfig,)))
    _Union = Annotated[Union[(*_ALL,)], Field(discriminator="type")] if len(_ALL) > 1 else TensorBoardConfig
    AnyTracker = Annotated[_Union, BeforeValidator(_by_name)]


class NotifyConfig(Strict):
    """Messages about the run, through apprise; needs the extra `notify`."""

    urls: tuple[SecretStr, ...] = Field(
        (), description="Apprise addresses (slack://…, mailto://…); kept out of the saved recipe, which shows stars."
    )
    urls_env: str | None = Field(
        None, description="Environment variable with addresses, separated by spaces; never saved or logged."
    )
    on: tuple[Literal["end", "failure", "alarm"], ...] = Field(
        ("end", "failure", "alarm"), min_length=1, description="What is told; a run that a signal stops has ended."
    )

    def _misfits(self) -> Iterator[str]:
        if not self.urls and self.urls_env is None:
            yield "messages need an address: set urls_env or urls"


class LogConfig(Strict):
    """What is written and told beside metrics.jsonl."""

    trackers: tuple[AnyTracker, ...] = Field(
        (TensorBoardConfig(),), description="Where metrics and samples also go; a name, or a type with its keys."
    )
    tensorboard: bool = Field(True, description="false leaves tensorboard out of trackers.")
    samples: Rows = Field(
        8, ge=0, description="Rows of the tables that trackers get of kept rollouts and of evaluations."
    )
    rollouts_every: Steps = Field(1, ge=1, description="Steps between kept rollouts.")
    notify: NotifyConfig | None = Field(None, description="Messages when the run ends or fails, or of an alarm; none.")
    level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="Least severity that Python's logger `quartet` writes to stderr, in every process."
    )

    def _misfits(self) -> Iterator[str]:
        kinds = [tracker.type for tracker in self.trackers]
        if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
            yield f"trackers names {twice[0]} twice"

    @property
    def chosen_trackers(self) -> tuple[TrackerConfig, ...]:
        return tuple(t for t in self.trackers if self.tensorboard or t.type != "tensorboard")


class CallbackConfig(Strict):
    """A Python class that is told of a run's steps, and may end it."""

    target: str = Field(description="path/to/file.py:Class or package.module:Class, derived from quartet.Callback.")
    options: dict[str, JsonValue] = Field(default_factory=dict, description="Keyword arguments of the class.")


class Recipe(Strict):
    """What every job has."""

    seed: int = Field(0, ge=0, lt=2**32, description="Decides data order, new weights and sampling.")
    output_dir: str | None = Field(
        None, description="Directory or URL where the run is kept; runs/<job>-<date>-<time> when left out."
    )
    device: str = Field(
        "auto", description="auto, cpu, cuda or cuda:N; auto: the GPU if there is one, or where a model passed lies."
    )
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads of torch; all when left out.")
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, value: str) -> str:
        if not re.fullmatch(DEVICES, value):
            raise ValueError(f"{value!r} is no device: use auto, cpu, cuda, or cuda:N with the number of a GPU")
        return value


class TrainingRecipe(Recipe):
    """What every job has that trains."""

    callbacks: tuple[CallbackConfig, ...] = Field(
        (), description="Classes that are told of steps, and may end the run."
    )
