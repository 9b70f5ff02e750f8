"""Handles: how the driver reaches what computes, be it an object of this process or one in workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from quartet.cluster.dispatch import BROADCAST, Mode, OneRank, Split, marks_of
from quartet.cluster.group import WorkerGroup
from quartet.schedule.worker import drained


class Handle(Protocol):
    """Calls methods of a *host*: the object beside the models or the engine."""

    async def call(self, method: str, *args: Any) -> Any:
        """The method's result, as on one host; raises what it raises. Where it computes, only inside the role's lease.

        On a host in this process nothing is awaited meanwhile, so calls of one order are computed in that order.
        """


@dataclass(frozen=True)
class Here:
    """A host in this process."""

    host: Any

    async def call(self, method: str, *args: Any) -> Any:
        return getattr(self.host, method)(*args)


@dataclass(frozen=True)
class There:
    """The hosts of one role in a group's workers, which have a method ``on(role, method, *args)``.

    A host's methods carry dispatch marks: split ones give the joined result, of others (broadcast) rank 0's counts.

    Args:
        host_class: whose marks say how a method is distributed.
        rank: one host among them; None for all.
    """

    group: WorkerGroup
    role: str
    host_class: type
    rank: int | None = None

    async def call(self, method: str, *args: Any) -> Any:
        mode = self._mode(method)
        if isinstance(mode, Split):
            return await drained(self.group.call("on", self.role, method, *args, mode=mode, blocking=False))
        result = await drained(self.group.ask("on", self.role, method, *args, mode=mode))
        return result[0] if mode == BROADCAST else result

    def _mode(self, method: str) -> Mode:
        if self.rank is not None:
            return OneRank(self.rank)
        mark = marks_of(self.host_class).get(method)
        return BROADCAST if mark is None else mark.mode
