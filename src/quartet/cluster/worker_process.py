"""What runs in a worker's process, whatever started it: the roles, and the calls on their methods."""

from __future__ import annotations

import itertools
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quartet.cluster.errors import Failure, Lost
from quartet.cluster.items import Share
from quartet.cluster.manifests import (
    Gather,
    Upstream,
    divide,
    fetch_manifests,
    fetch_part,
    fetch_whole,
    share_of,
    with_ids,
)
from quartet.cluster.worker import reserved_port

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
        self._results = itertools.count()
        self._note: Any = None
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

    def build(self, roles: Mapping[str, ClassWithArgs]) -> Failure | None:
        """Makes the roles' objects, in order."""
        for name, deferred in roles.items():
            made = self._caught(f"{name}.__init__", deferred)
            if isinstance(made, Failure):
                return made
            self._roles[name] = made
        return None

    def remember(self, note: Any) -> None:
        """Keeps what another driver needs that finds the group by its name."""
        self._note = note

    def recall(self) -> Any:
        return self._note

    def ping(self) -> int:
        return self._rank

    # Calls -----------------------------------------------------------------------------------------------

    def call(self, head: tuple[str, str, bool, tuple[str, ...]], *values: Any) -> Any:
        """A method's result, None where this rank does not answer; ``Failure`` or ``Lost`` where there is none.

        Args:
            head: role, method, whether this rank answers, and the names of the last arguments, which are passed by
                keyword; one value, since every argument of a remote call costs time.
            values: arguments; each by itself, so that a back end can put a stored value in the place of its reference.
        """
        role, method, answers, names = head

        def called() -> Any:
            given, _ = self._resolved(list(values))
            result = self._invoke(role, method, names, given)
            return result if answers else None

        return self._caught(f"{role}.{method}", called)

    def call_parts(
        self,
        head: tuple[str, str, int, tuple[str, ...]],
        share: Share | None,
        *values: Any,
    ) -> Any:
        """A method's result as a manifest and so many chunks, one tuple; without chunks None: others answer.

        Args:
            head: role, method, number of chunks, and the names of the last arguments.
            share: the items among the arguments; None where the call is not split, or fetches its items.
        """
        role, method, chunks, names = head

        def called() -> Any:
            given, own = self._resolved(list(values), share)
            result = self._invoke(role, method, names, given)
            if not chunks:
                return None
            origin = f"{self._group}-{self._rank}-{os.getpid()}-{next(self._results)}"
            manifest, pieces = divide(result, own, chunks, origin)
            return (manifest, *pieces)

        outcome = self._caught(f"{role}.{method}", called)
        return (outcome,) * (chunks + 1) if chunks and isinstance(outcome, Failure | Lost) else outcome

    def _caught(self, where: str, work: Callable[[], Any]) -> Any:
        """What ``work`` returns, ``Failure`` or ``Lost`` where it raised."""
        try:
            return work()
        except Upstream as error:
            return error.outcome
        except USERS_OWN as error:
            return self._failure(error, where)

    def _invoke(self, role: str, method: str, names: tuple[str, ...], values: list[Any]) -> Any:
        bound = getattr(self._roles[role], method)
        if not names:
            return bound(*values)
        return bound(*values[: -len(names)], **dict(zip(names, values[-len(names) :], strict=True)))

    def _resolved(self, values: list[Any], share: Share | None = None) -> tuple[list[Any], Share | None]:
        """Arguments with what they refer to, and this part's share of the items."""
        gathers = {i: value for i, value in enumerate(values) if isinstance(value, Gather)}
        manifests = fetch_manifests(self._fetch, list(gathers.values())) if gathers else []
        # The first that is split decides who gets what, the others follow.
        for gather, of_gather in zip(gathers.values(), manifests, strict=True):
            if gather.part is not None:
                share = share_of(of_gather, gather)
                break
        for (i, gather), of_gather in zip(gathers.items(), manifests, strict=True):
            if gather.part is None or share is None:
                values[i] = fetch_whole(self._fetch, gather, of_gather)
            else:
                values[i] = fetch_part(self._fetch, gather, of_gather, share)
        return with_ids(self._fetch, values), share

    def _failure(self, error: BaseException, where: str) -> Failure:
        sys.stdout.flush()
        sys.stderr.flush()
        return Failure.of(error, group=self._group, rank=self._rank, pid=os.getpid(), host=self._host, where=where)
