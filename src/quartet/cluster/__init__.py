"""Workers in many processes behind one handle on the driver.

- ``worker``: a process's place among others, from environment variables; process groups; calls on its methods
- ``resource_pool``: processes per node and what each needs, checked before anything starts
- ``group``, ``errors``: worker groups: starting, calling, watching, naming what went wrong
- ``dispatch``: how a call becomes calls on workers, and results one; who gets which part of a batch
- ``futures``: calls in flight, results that travel from worker to worker
- ``ranks``: the processes of a torchrun as one group
- ``torchrun``: Ray inside an allocation that torchrun has started
- ``ray_backend``: the processes, in Ray; only this needs it
"""

from quartet.cluster.dispatch import BROADCAST, RANK_ZERO, SPLIT, CustomDispatch, OneRank, RankLayout, dispatch
from quartet.cluster.errors import ClusterError, WorkerDied, WorkerError
from quartet.cluster.futures import BatchFuture
from quartet.cluster.group import WorkerGroup, connect
from quartet.cluster.resource_pool import ResourcePool
from quartet.cluster.worker import ClassWithArgs, Worker

__all__ = [
    "BROADCAST",
    "RANK_ZERO",
    "SPLIT",
    "BatchFuture",
    "ClassWithArgs",
    "ClusterError",
    "CustomDispatch",
    "OneRank",
    "RankLayout",
    "ResourcePool",
    "Worker",
    "WorkerDied",
    "WorkerError",
    "WorkerGroup",
    "connect",
    "dispatch",
]
