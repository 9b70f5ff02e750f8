"""Where the processes of a run are, and how weights and parts of models travel between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from quartet.config.common import Strict


class LocalCluster(Strict):
    """Every role in the one process of the command; they take turns."""

    type: Literal["local"] = "local"


class RayCluster(Strict):
    """A process per device of each pool, started by Ray: on this machine, or on a cluster that is there."""

    type: Literal["ray"] = "ray"
    address: str | None = Field(
        None, description="Address of a running cluster; left out: RAY_ADDRESS, else Ray starts here."
    )
    cpus_per_process: float = Field(1.0, ge=0, description="CPUs that Ray grants each process; parts are allowed.")
    gpus_per_process: float = Field(
        0.0, ge=0, description="GPUs that Ray grants each process; with 1 models go there, with 0 they are on the CPU."
    )
    strategy: Literal["pack", "spread"] = Field("pack", description="Nodes of a pool: as few as possible, or apart.")
    start_timeout_s: float = Field(
        300.0, gt=0, description="Longest wait until a pool is granted and its processes run."
    )
    max_restarts: int = Field(3, ge=0, description="How often a run replaces workers that died.")


class TorchrunCluster(Strict):
    """The processes that torchrun has started: a recipe becomes one for them by being started so."""

    type: Literal["torchrun"] = "torchrun"


ClusterConfig = Annotated[LocalCluster | RayCluster, Field(discriminator="type")]
SupervisedClusterConfig = Annotated[LocalCluster | RayCluster | TorchrunCluster, Field(discriminator="type")]


def device_misfits(cluster: LocalCluster | RayCluster | TorchrunCluster, device: str) -> Iterator[str]:
    """Why a recipe cannot have this ``device``, if it cannot. Ray gives each process its GPUs already."""
    if isinstance(cluster, TorchrunCluster) and device.startswith("cuda:"):
        yield f"each process of a torchrun takes a GPU of its own: set device: cuda in place of {device}"
    if isinstance(cluster, RayCluster):
        if device.startswith("cuda:"):
            yield f"Ray decides which GPU a process sees: set device: cuda in place of {device}"
        if device == "cuda" and cluster.gpus_per_process == 0:
            yield "device is cuda, but cluster.gpus_per_process is 0: set it to 1, or leave device out"
        if device == "cpu" and cluster.gpus_per_process > 0:
            yield f"device is cpu, but cluster.gpus_per_process is {cluster.gpus_per_process:g}: leave out either"


class WeightSyncConfig(Strict):
    """How new weights come to engines that have their own copy."""

    transport: Literal["auto", "shared_memory", "collective", "cuda_ipc"] = Field(
        "auto", description="auto: shared_memory on one machine, collective between several."
    )
    timeout_s: float = Field(120.0, gt=0, description="Longest silence of either end.")


class OffloadConfig(Strict):
    """Where parts go that must leave their device for others; only pools with budget_bytes ever move any."""

    to: Literal["mapped_files", "pinned_memory"] = Field(
        "mapped_files", description="Files mapped into memory, or host memory that a GPU reads fastest."
    )
    directory: str | None = Field(
        None, description="Folder of the mapped files; the system's temporary one when left out."
    )
