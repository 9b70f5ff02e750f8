"""What runs in a worker's process: the worker, and the calls on its methods."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from quartet.cluster.errors import Failure, Lost
from quartet.cluster.manifests import Noted, ObjectManifest, Upstream, fetched, is_large
from quartet.cluster.worker import reserved_port

USERS_OWN = (Exception, SystemExit)
"""What a worker's class may raise: it is the user's code, so anything, and all of it is reported to the caller.

A library that gives up with ``sys.exit`` would else end the process without a word.
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
        answers: this rank's result counts; otherwise it returns None.
        stays: the result comes in a tuple behind its manifest, to be stored by itself.
    """

    method: str
    names: tuple[str, ...] = ()
    answers: bool = True
    stays: bool = False


class WorkerProcess:
    """The worker of one process; a back end gives it a way to fetch references.

    Args:
        group: its name, for messages.
        rank: its rank.
        fetch: references → values.
    """

    def __init__(self, group: str, rank: int, fetch: Callable[[Sequence[Any]], list[Any]]) -> None:
        self._group = group
        self._rank = rank
        self._fetch = fetch
        self._worker: Any = None
        self._rendezvous: socket.socket | None = None
        self._host = socket.gethostname()

    def rendezvous_port(self) -> int:
        """A free port of this node, for the group to meet at; kept from others until then."""
        self._rendezvous = reserved_port()
        return int(self._rendezvous.getsockname()[1])

    def set_environment(self, environment: Mapping[str, str]) -> None:
        """Comes before ``build``, whose arguments may import what looks at the environment."""
        os.environ.update(environment)

    def build(self, deferred: ClassWithArgs) -> Failure | None:
        """Makes the worker."""
        made = self._caught("__init__", deferred)
        if isinstance(made, Failure):
            return made
        self._worker = made
        return None

    def ping(self) -> int:
        return self._rank

    # Calls -----------------------------------------------------------------------------------------------

    def call(self, head: CallHead, *values: Any) -> Any:
        """A method's result as ``head`` says; ``Failure`` or ``Lost`` in its place where there is none.

        Args:
            values: arguments; each by itself, so that a back end can put a stored value in the place of its reference.
        """

        def called() -> Any:
            given = fetched(self._fetch, values)
            last = len(given) - len(head.names)
            method = getattr(self._worker, head.method)
            result = method(*given[:last], **dict(zip(head.names, given[last:], strict=True)))
            if not head.answers:
                return None
            if not head.stays:
                return result
            value, note = (result.value, result.note) if isinstance(result, Noted) else (result, None)
            return ObjectManifest(not is_large(value), note), value

        outcome = self._caught(head.method, called)
        return (outcome, outcome) if head.stays and isinstance(outcome, Failure | Lost) else outcome

    def _caught(self, method: str, work: Callable[[], Any]) -> Any:
        """What ``work`` returns, ``Failure`` or ``Lost`` where it raised."""
        try:
            return work()
        except Upstream as error:
            return error.outcome
        except USERS_OWN as error:
            sys.stdout.flush()
            sys.stderr.flush()
            where, pid = f"{self._group}.{method}", os.getpid()
            return Failure.of(error, group=self._group, rank=self._rank, pid=pid, host=self._host, where=where)
