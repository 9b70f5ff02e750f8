"""What every recipe has: where a run's figures go, what it calls on the way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, JsonValue, field_validator

from quartet.config.common import (
    DEVICES,
    BaseTrackerConfig,
    CheckpointConfig,
    DataConfig,
    LocalCluster,
    ModelConfig,
    SamplingConfig,
    ShardingConfig,
    SupervisedClusterConfig,
    TensorBoardConfig,
    TrainConfig,
    device_conflicts,
)
from quartet.config.plugins import config_classes_by_type
from quartet.config.strict import Processes, Rows, Steps, StrictModel


def _by_name(value: Any) -> Any:
    """Makes a tracker's section of its name alone, with its defaults."""
    if isinstance(value, str):
        return {"type": value}
    # What a validator returns is no longer read as JSON, which has no tuples.
    return {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()} if isinstance(value, dict) else value


if TYPE_CHECKING:
    AnyTracker = BaseTrackerConfig
else:
    _TRACKERS = tuple(
        config_classes_by_type("trackers", BaseTrackerConfig, {"tensorboard": TensorBoardConfig}).values()
    )
    _Union = Annotated[reduce(or_, _TRACKERS), Field(discriminator="type")] if _TRACKERS[1:] else TensorBoardConfig
    AnyTracker = Annotated[_Union, BeforeValidator(_by_name)]


class LogConfig(StrictModel):
    """What is written and told beside metrics.jsonl."""

    trackers: tuple[AnyTracker, ...] = Field(
        (TensorBoardConfig(),), description="Where metrics and samples also go; a name, or a type with its keys."
    )
    tensorboard: bool = Field(True, description="false leaves tensorboard out of trackers.")
    samples: Rows = Field(
        8, ge=0, description="Rows of the tables that trackers get of kept rollouts and of evaluations."
    )
    rollouts_every: Steps = Field(1, ge=1, description="Steps between kept rollouts.")
    level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="Least severity that Python's logger `quartet` writes to stderr, in every process."
    )

    def _misfits(self) -> Iterator[str]:
        kinds = [tracker.type for tracker in self.trackers]
        if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
            yield f"trackers names {twice[0]} twice"

    @property
    def chosen_trackers(self) -> tuple[BaseTrackerConfig, ...]:
        return tuple(t for t in self.trackers if self.tensorboard or t.type != "tensorboard")


class CallbackConfig(StrictModel):
    """A Python class that is told of a run's steps, and may end it."""

    target: str = Field(description="path/to/file.py:Class or package.module:Class, derived from quartet.Callback.")
    options: dict[str, JsonValue] = Field(default_factory=dict, description="Keyword arguments of the class.")


class PicturesConfig(StrictModel):
    """What is kept of the pictures that prompts have, in each process and on the disk of the run."""

    memory_bytes: int = Field(1 << 30, ge=0, description="Features of pictures in memory, those last used.")
    disk_bytes: int = Field(16 << 30, ge=0, description="Features on disk; what is beyond it is computed again.")


class Recipe(StrictModel):
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
    pictures: PicturesConfig = PicturesConfig()

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


class SupervisedRecipe(TrainingRecipe):
    """What every job has that trains one model on rows."""

    job: str
    is_scalar: ClassVar[bool] = False
    """Whether what is trained is a model with a scalar head."""

    model: ModelConfig | None = Field(None, description="Where it starts; left out where Python passes a model.")
    data: DataConfig | None = Field(None, description="Rows to train on; left out where Python passes them.")
    evaluation_data: DataConfig | None = Field(None, description="Held-out rows; no evaluation when left out.")
    evaluate_every_steps: int = Field(50, ge=1, description="Steps between evaluations; one more at the end.")
    train: TrainConfig = TrainConfig()
    steps: int | None = Field(None, ge=1, description="Optimizer steps; `epochs` over the data when left out.")
    epochs: int = Field(1, ge=1, description="Passes over the data where steps is left out.")
    cluster: SupervisedClusterConfig = Field(LocalCluster(), description="Where the processes of the run are.")
    processes: Processes = Field(
        1,
        ge=1,
        description="Processes on each node, which share every update; each has a copy of the model, or a shard.",
    )
    nodes: int = Field(1, ge=1, description="Machines.")
    sharding: ShardingConfig = ShardingConfig()

    @property
    def answered_by(self) -> SamplingConfig | None:
        """How the model answers the rows; None where they have their answers."""
        return None

    def _misfits(self) -> Iterator[str]:
        if self.cluster.type == "local" and self.processes * self.nodes > 1:
            yield (
                f"processes {self.processes} on nodes {self.nodes}, but cluster.type local has one process: set "
                "cluster.type: ray, start it by torchrun, or leave processes and nodes out"
            )
        reason = self.sharding.misfit("sharding", self.processes * self.nodes, compiles=self.train.compile)
        if reason is not None:
            yield reason
        yield from device_conflicts(self.cluster, self.device)
