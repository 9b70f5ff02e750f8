"""What every recipe has that trains one model on rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from quartet.config.cluster import LocalCluster, SupervisedClusterConfig, device_misfits
from quartet.config.common import DataConfig, ModelConfig, SamplingConfig, ShardingConfig, TrainConfig
from quartet.config.run import TrainingRecipe
from quartet.config.strict import Processes


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
        yield from device_misfits(self.cluster, self.device)
