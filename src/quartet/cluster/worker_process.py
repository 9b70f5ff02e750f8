"""What runs in a worker's process, whatever started it: the roles, and the calls on their methods."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from quartet.cluster.errors import Failure, Lost
from quartet.cluster.items import Share
from quartet.cluster.manifests import Gather, Upstream, divide, fetch_manifests, fetch_value, share_of, with_ids
from quartet.cluster.worker import reserved_port

if TYPE_CHECKING:
    from quartet.cluster.processes import GroupSpec

USERS_OWN = (Exception, SystemExit)
"""What a worker's class may raise: it is the user's code, so anything, and all of it is reported to the caller.

A library that gives up with ``sys.exit`` would else end the process (or, locally, the driver) without a word.
"""


class ClassWithArgs:
    """A class and what to call it with, to be made in another process: ``ClassWithArgs(Actor, "path", lr=1e-6)``."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Any:
        return self.cls(*self.args, **self.kwargs)


@dataclass(frozen=True)
class ProcessInfo:
    """A started process.

    Attributes:
        host: its node's address.
        node: the back end's name of that node.
        devices: ``CUDA_VISIBLE_DEVICES`` as granted; None to leave it as it is.
        logs: files on that node that hold its output.
    """

    pid: int
    host: str
    node: str
    devices: str | None
    logs: tuple[str, ...]


class CallHead(NamedTuple):
    """A call but for its arguments; one value, since every argument of a remote call costs time.

    Args:
        names: of the last arguments, which are passed by keyword.
        chunks: into so many a result is divided, and comes as one tuple behind its manifest; 0: this rank does not
            answer; None: the result comes as it is.
        share: the items among the arguments; None where the call is not split, or fetches its items.
    """

    role: str
    method: str
    names: tuple[str, ...] = ()
    chunks: int | None = None
    share: Share | None = None


class WorkerProcess:
    """The roles of one worker process; a back end gives it a way to fetch references.

    Args:
        group: its name, for messages.
        rank: its rank.
        fetch: references → values.
    """

    def __init__(self, group: str, rank: int, fetch: Callable[[Sequence[Any]], list[Any]]) -> None:
        self._group = group
        self._rank = rank
        self._fetch = fetch
        self._roles: dict[str, Any] = {}
        self._spec: GroupSpec | None = None
        self._rendezvous: socket.socket | None = None
        self._host = socket.gethostname()

    def process_info(self) -> ProcessInfo:
        return ProcessInfo(os.getpid(), self._host, self._host, None, ())

    def rendezvous_port(self) -> int:
        """A free port of this node, for the group to meet at; kept from others until then."""
        self._rendezvous = reserved_port()
        return int(self._rendezvous.getsockname()[1])

    def set_environment(self, environment: Mapping[str, str]) -> None:
        """Comes before ``build``, whose arguments may import what looks at the environment."""
        os.environ.update(environment)

    def build(self, spec: GroupSpec) -> Failure | None:
        """Makes the roles' objects, in order."""
        for name, deferred in spec.roles.items():
            made = self._caught(f"{name}.__init__", deferred)
            if isinstance(made, Failure):
                return made
            self._roles[name] = made
        self._spec = spec if spec.detached else None  # arguments may be large: not kept for nothing
        return None

    def recall(self) -> GroupSpec | None:
        """What another driver needs that finds a detached group by its name; None while that is only being started."""
        return self._spec

    def ping(self) -> int:
        return self._rank

    # Calls -----------------------------------------------------------------------------------------------

    def call(self, head: CallHead, *values: Any) -> Any:
        """A method's result as ``head.chunks`` says; ``Failure`` or ``Lost`` in its place where there is none.

        Args:
            values: arguments; each by itself, so that a back end can put a stored value in the place of its reference.
        """
        names, num = head.names, head.chunks or 0

        def called() -> Any:
            given, own = self._resolved(list(values), head.share)
            last = len(given) - len(names)
            method = getattr(self._roles[head.role], head.method)
            result = method(*given[:last], **dict(zip(names, given[last:], strict=True)))
            if not num:
                return result if head.chunks is None else None
            manifest, pieces = divide(result, own, num)
            return (manifest, *pieces)

        outcome = self._caught(f"{head.role}.{head.method}", called)
        return (outcome,) * (num + 1) if num and isinstance(outcome, Failure | Lost) else outcome

    def _caught(self, where: str, work: Callable[[], Any]) -> Any:
        """What ``work`` returns, ``Failure`` or ``Lost`` where it raised."""
        try:
            return work()
        except Upstream as error:
            return error.outcome
        except USERS_OWN as error:
            sys.stdout.flush()
            sys.stderr.flush()
            return Failure.of(error, group=self._group, rank=self._rank, pid=os.getpid(), host=self._host, where=where)

    def _resolved(self, values: list[Any], share: Share | None) -> tuple[list[Any], Share | None]:
        """Arguments with what they refer to, and this part's share of the items."""
        gathers = {i: value for i, value in enumerate(values) if isinstance(value, Gather)}
        manifests = fetch_manifests(self._fetch, list(gathers.values())) if gathers else []
        pairs = list(zip(gathers.items(), manifests, strict=True))
        # The first that is split decides who gets what, the others follow.
        for (_, gather), of_gather in pairs:
            if gather.part is not None:
                share = share_of(of_gather, gather)
                break
        for (i, gather), of_gather in pairs:
            values[i] = fetch_value(self._fetch, gather, of_gather, None if gather.part is None else share)
        return with_ids(self._fetch, values), share
