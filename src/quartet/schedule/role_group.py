"""The workers of a role, called the same way wherever they are.

::

    columns = await reference.call(ScoreWorker.forward, batch, needs)

A method is named by the function itself: type checkers compare the arguments with its signature, and editors lead from
the call to what computes. Its ``dispatch`` mark says how the call is spread over several workers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from quartet.batch.ragged import RaggedBatch
from quartet.cluster.dispatch import (
    BROADCAST,
    ONE_COPY,
    DispatchMode,
    FirstRanks,
    InLayout,
    OneRank,
    RankLayout,
    SplitBatch,
    dispatched_methods,
)
from quartet.cluster.errors import OutOfMemory
from quartet.cluster.futures import BatchFuture, StoredResult
from quartet.cluster.group import WorkerGroup
from quartet.cluster.ranks import TorchrunRanks
from quartet.cluster.worker import Worker, local_path
from quartet.config.common import ShardingConfig
from quartet.observe.spans import note_workers
from quartet.schedule.clock import ComputeThread, await_uncancelled

W_co = TypeVar("W_co", covariant=True)
V_co = TypeVar("V_co", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")


class RoleGroup(ABC, Generic[W_co]):
    """The workers of one role, of class ``W_co`` or one derived from it."""

    @abstractmethod
    async def call(self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the method and returns its result, as of one worker: split calls are joined, of others (broadcast) rank
        0's counts.

        Call it only inside the role's lease where it computes. Who is cancelled meanwhile is held until it has ended.
        An override in the worker's own class is what runs.

        Raises:
            whatever the method raises.
        """

    async def send(
        self, method: Callable[[W_co], R], to: RoleGroup[V_co], taken_by: Callable[[V_co, R], object]
    ) -> None:
        """Has the workers of ``to`` take by ``taken_by`` what ``method`` returns here (of several workers, rank 0's).

        Between workers elsewhere it goes without coming to this process. Raises as ``call``, of either group.
        """
        await to.call(taken_by, await self.call(method))

    async def leave(
        self, method: Callable[Concatenate[W_co, P], RaggedBatch], *args: P.args, **kwargs: P.kwargs
    ) -> RaggedBatch:
        """Returns the batch that one worker's method makes (of several workers, rank 0's), its token ids left where
        they are.

        From a worker in this process that is the batch itself; from one elsewhere an outline with all of the batch's
        fields. As an argument of a call it reaches a method with its ids, whatever was selected or joined in between.
        They are freed with the last outline that refers to them. Raises as ``call``.
        """
        return await self.call(method, *args, **kwargs)


class LocalGroup(RoleGroup[W_co]):
    """One worker in this process.

    Args:
        compute: the process's compute thread. None computes in the event loop: on a virtual clock, say.
    """

    def __init__(self, worker: W_co, compute: ComputeThread | None = None) -> None:
        self.worker = worker
        self._compute = compute

    async def call(self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        bound: Callable[..., R] = getattr(self.worker, method.__name__)
        if self._compute is None:
            return bound(*args, **kwargs)
        return await self._compute.run(partial(bound, *args, **kwargs))


class ColocatedWorker(Worker):
    """A process with the workers of one or several roles, by the roles' names; its main thread computes."""

    roles: Mapping[str, Any]

    def run_role(self, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a method of a role's worker; paths of the driver come to it as this machine has them."""
        try:
            return getattr(self.roles[role], method)(
                *map(local_path, args), **{name: local_path(value) for name, value in kwargs.items()}
            )
        except OutOfMemory as error:
            error.smaller = replace(error.smaller, role=role)
            raise

    def leave_role(self, role: str, method: str, *args: Any, **kwargs: Any) -> StoredResult:
        """Returns the segments and token ids of the batch that a role's method makes, noted with the batch's
        outline."""
        made: RaggedBatch = self.run_role(role, method, *args, **kwargs)
        return StoredResult(made.bare(), made.outline([role]))  # the caller knows the reference


class TorchrunGroup(RoleGroup[W_co]):
    """One worker in each process of a torchrun, of which this is rank 0.

    Args:
        process: with this process's worker of the role.
        worker_class, sharding: as of ``RemoteGroup``.
    """

    def __init__(
        self,
        ranks: TorchrunRanks,
        process: ColocatedWorker,
        role: str,
        worker_class: type[W_co],
        compute: ComputeThread,
        *,
        sharding: ShardingConfig | None = None,
    ) -> None:
        self._ranks = ranks
        self._run = partial(process.run_role, role)
        self._modes = _Modes(worker_class, ranks.world_size, sharding)
        self._compute = compute

    async def call(self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        name = method.__name__
        mode = self._modes.of(name)
        plan = mode.plan(self._modes.layout, args, kwargs)
        results = await self._compute.run(partial(self._ranks.ask, self._run, name, plan.calls))
        result: Any = plan.collect([results[rank] for rank in plan.answers], plan.shares)
        found: R = result[0] if mode == BROADCAST else result
        return found


class RemoteGroup(RoleGroup[W_co]):
    """The workers of one role in the processes of a group of ``ColocatedWorker``.

    Args:
        worker_class: whose marks say how a method is distributed.
        rank: one worker among them; None for all.
        sharding: how the workers hold the role's model: which of them get the same part of a batch, and which together
            have a copy. None where each has a copy and a part of its own.
    """

    def __init__(
        self,
        group: WorkerGroup,
        role: str,
        worker_class: type[W_co],
        rank: int | None = None,
        *,
        sharding: ShardingConfig | None = None,
    ) -> None:
        self.group = group
        self.role = role
        self.rank = rank
        self._modes = _Modes(worker_class, group.world_size, sharding)

    async def call(self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        name = method.__name__
        mode = self._mode(name)
        future: BatchFuture
        if isinstance(mode, SplitBatch):
            within = InLayout(mode, self._modes.layout)
            future = self.group.call(
                ColocatedWorker.run_role, self.role, name, *args, mode=within, blocking=False, **kwargs
            )
        else:
            future = self.group.ask(ColocatedWorker.run_role, self.role, name, *args, mode=mode, **kwargs)
        result: Any = await await_uncancelled(future)
        note_workers(self.role, future.seconds)
        found: R = result[0] if mode == BROADCAST else result
        return found

    async def send(
        self, method: Callable[[W_co], R], to: RoleGroup[V_co], taken_by: Callable[[V_co, R], object]
    ) -> None:
        assert isinstance(to, RemoteGroup), "a run's workers are all here or all elsewhere"
        first: DispatchMode = OneRank(self.rank or 0)
        if isinstance(mode := self._mode(method.__name__), FirstRanks):
            first = FirstRanks(mode.num, awaits_all=False)
        sent = self.group.call(ColocatedWorker.run_role, self.role, method.__name__, mode=first, blocking=False)
        name, taking = taken_by.__name__, to._mode(taken_by.__name__)
        await await_uncancelled(
            to.group.call(ColocatedWorker.run_role, to.role, name, sent, mode=taking, blocking=False)
        )

    async def leave(
        self, method: Callable[Concatenate[W_co, P], RaggedBatch], *args: P.args, **kwargs: P.kwargs
    ) -> RaggedBatch:
        # One call with two results: this process reads the first. Ray carries small ones with its own messages, as
        # bytes that nothing here unpickles, and larger ones not at all.
        name, mode = method.__name__, OneRank(self.rank or 0)
        future: BatchFuture = self.group.call(
            ColocatedWorker.leave_role, self.role, name, *args, mode=mode, blocking=False, **kwargs
        )
        outline: RaggedBatch
        (outline,) = await await_uncancelled(future.finished())
        return outline.outline([future.reference()])

    def _mode(self, name: str) -> DispatchMode:
        if self.rank is not None:
            return OneRank(self.rank)
        return self._modes.of(name)


class _Modes:
    """How the methods of a role's workers are distributed, by their marks.

    Attributes:
        layout: of the ranks, for calls that are split.
    """

    def __init__(self, worker_class: type, world_size: int, sharding: ShardingConfig | None) -> None:
        self._marks = dispatched_methods(worker_class)
        sharding = sharding if sharding is not None else ShardingConfig()
        self._copy_size = sharding.copy_size
        self.layout = RankLayout(world_size, math.prod(sharding.peers.values()))

    def of(self, name: str) -> DispatchMode:
        mode = self._marks[name].mode if name in self._marks else BROADCAST
        return FirstRanks(self._copy_size) if mode == ONE_COPY else mode
