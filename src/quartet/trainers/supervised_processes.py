"""The workers of a supervised job in processes of Ray: one per device, each with a copy of the model."""

from __future__ import annotations

import os
from typing import Any, TypeAlias

from quartet.cluster import ClusterError, ResourcePool, WorkerGroup, connect
from quartet.config import UserError
from quartet.config.cluster import RayCluster
from quartet.config.supervised import SupervisedRecipe
from quartet.schedule.role_group import RemoteGroup, RolesWorker
from quartet.train.data_parallel import Peers
from quartet.trainers.devices import worker_device
from quartet.trainers.run import use_threads
from quartet.trainers.signals import take_back_signals
from quartet.trainers.supervised_worker import Given, SupervisedWorker

Kind: TypeAlias = type[SupervisedWorker[Any, Any, Any]]
_ROLE = "model"
_PATIENCE_S = 5.0
"""So long a worker may take to say that it lives; one that is busy counts as living."""


class SupervisedProcess(RolesWorker):
    """A process with one worker, which loads the model and reads the rows.

    Args:
        directory: of the driver; paths of the recipe begin there, where a node has it.
    """

    def __init__(self, kind: Kind, recipe: SupervisedRecipe, given: Given, directory: str) -> None:
        if os.path.isdir(directory):
            os.chdir(directory)
        use_threads(recipe.threads)
        peers = None
        if self.world_size > 1:
            self.init_process_group()
            peers = Peers.of_world()
        self.roles = {_ROLE: kind(recipe, given, worker_device(self.device, recipe), peers)}


class SupervisedProcesses:
    """The processes of a run, granted and started by ``start``, ended by ``close``.

    Args:
        kind: of the worker in each.
    """

    def __init__(self, kind: Kind, recipe: SupervisedRecipe, given: Given) -> None:
        self._made = (kind, recipe, given)
        self._group: WorkerGroup | None = None
        assert isinstance(recipe.cluster, RayCluster)
        self._cluster = recipe.cluster
        self._backend = connect("ray", address=recipe.cluster.address)
        take_back_signals()

    def start(self) -> RemoteGroup[Any]:
        """
        Raises:
            UserError: the cluster has no room, or a worker refused the recipe, the data or the objects.
            WorkerError, WorkerDied: a worker failed while it was made.
        """
        kind, recipe, given = self._made
        cluster = self._cluster
        cpus, gpus = cluster.cpus_per_process, cluster.gpus_per_process
        pool = ResourcePool([recipe.processes] * recipe.nodes, cpus=cpus, gpus=gpus, strategy=cluster.strategy)
        self._group = WorkerGroup(
            pool,
            SupervisedProcess,
            *(kind, recipe, given, os.getcwd()),
            name=recipe.job,
            backend=self._backend,
            start_timeout_s=cluster.start_timeout_s,
        )
        return RemoteGroup(self._group, _ROLE, kind)

    def explained(self, error: ClusterError) -> Exception:
        """``error``, or where a worker died who that was and of what, and how to go on."""
        deaths = self._group.dead(_PATIENCE_S) if self._group is not None else []
        if not deaths:
            return error
        last = deaths[0].last_error or "it left no error, so it was killed from outside"
        return UserError(
            "a worker of the run died",
            found=f"{deaths[0].brief()}: {last}",
            remedy="mend what kills it, and go on from the last checkpoint with --resume",
        )

    def close(self) -> None:
        self._backend.close()
