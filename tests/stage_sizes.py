"""What ranks of the doctor's test of memory run."""

from __future__ import annotations

import torch

from pipeline_ranks import Case, make_packed
from quartet.config.common import TrainConfig
from quartet.schedule.leases import LeaseMode
from quartet.schedule.model_worker import TrainWorker
from quartet.train.engine import TrainEngine
from quartet.train.parallel.mesh import DataParallelGroup, Mesh

CRITIC = Case("ppo-critic", dtype=torch.float32)


def critic_sizes(shard: int, pipeline: int) -> dict[LeaseMode, int]:
    """What this rank's worker of a critic that is cut says of its sizes."""
    mesh = Mesh.of(DataParallelGroup.of_world(), shard=shard, pipeline=pipeline)
    return TrainWorker(TrainEngine(make_packed(CRITIC), TrainConfig(), total_steps=1, mesh=mesh)).sizes()
