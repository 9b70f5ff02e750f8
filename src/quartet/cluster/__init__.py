"""Workers in many processes behind one handle on the driver.

- ``worker``: a process's place among others, from environment variables; process groups
- ``resource_pool``: processes per node and what each needs, checked before anything starts
- ``group``: worker groups
- ``dispatch``: how a call becomes calls on workers, and results one; ``layout`` and ``split`` say who gets what
- ``futures``, ``manifests``: calls in flight, results that travel from worker to worker
- ``processes``, ``errors``: starting, calling, watching, naming what went wrong
- ``torchrun``, ``ray_node``: Ray inside an allocation that torchrun has started
- ``backend``: the interface; ``ray_backend`` fills it
"""

from quartet.cluster.backend import connect
from quartet.cluster.dispatch import BROADCAST, RANK_ZERO, SPLIT, Custom, OneRank, dispatch
from quartet.cluster.errors import ClusterError, WorkerDied, WorkerError
from quartet.cluster.futures import BatchFuture
from quartet.cluster.group import WorkerGroup
from quartet.cluster.layout import Layout
from quartet.cluster.resource_pool import ResourcePool
from quartet.cluster.worker import Worker
from quartet.cluster.worker_process import ClassWithArgs

__all__ = [
    "BROADCAST",
    "RANK_ZERO",
    "SPLIT",
    "BatchFuture",
    "ClassWithArgs",
    "ClusterError",
    "Custom",
    "Layout",
    "OneRank",
    "ResourcePool",
    "Worker",
    "WorkerDied",
    "WorkerError",
    "WorkerGroup",
    "connect",
    "dispatch",
]
