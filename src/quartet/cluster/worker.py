"""What runs in a worker's process: the worker, which knows its place from environment variables alone, and the calls
on its methods."""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import distributed

from quartet.cluster.errors import LostResult, WorkerFailure
from quartet.cluster.futures import StoredResult, UpstreamFailed, fetch_arguments

_NUMBERS = {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1, "master_port": 0}
"""Numbers of a ``RankInfo``, named in the environment in capitals, with what holds where there is none."""
T = TypeVar("T")
PATHS = "QUARTET_PATHS"
"""Variable of one machine: where it has what the driver has elsewhere, ``/of/the/driver:/of/this/machine``."""
NUM_NODES = "QUARTET_NUM_NODES"
"""Variable of the driver in an allocation: how many machines join its cluster."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class RankInfo:
    """Where a worker stands: what ``torchrun`` or a worker group puts into the environment.

    Attributes:
        master_addr, master_port: where rank 0 waits for the others to form a process group.
        devices: ``CUDA_VISIBLE_DEVICES``; None leaves it as it is.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    devices: str | None = None

    def environment(self) -> dict[str, str]:
        found = {name.upper(): str(getattr(self, name)) for name in (*_NUMBERS, "master_addr")}
        return found if self.devices is None else {**found, "CUDA_VISIBLE_DEVICES": self.devices}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> RankInfo:
        """Returns the place that the variables of ``torchrun`` name; without any of them a world of one."""
        env = os.environ if environment is None else environment
        if not any(name in env for name in ("RANK", "WORLD_SIZE")):
            return cls(0, 1, 0, 1, LOOPBACK, free_port(), env.get("CUDA_VISIBLE_DEVICES"))
        numbers = {name: int(env.get(name.upper(), default)) for name, default in _NUMBERS.items()}
        return cls(**numbers, master_addr=env["MASTER_ADDR"], devices=env.get("CUDA_VISIBLE_DEVICES"))


class Worker:
    """Base class of everything that runs in a group's processes.

    The place is known before ``__init__`` begins, and the environment is set before the class is even unpickled, so
    that no CUDA or process-group call can come too early. Methods marked with ``dispatch`` can be called on the group.
    """

    place: RankInfo

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        worker = super().__new__(cls)
        worker.place = RankInfo.from_environment()
        return worker

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world_size(self) -> int:
        return self.place.world_size

    @property
    def local_rank(self) -> int:
        """Among the group's workers on this node."""
        return self.place.local_rank

    @property
    def device(self) -> torch.device:
        """The GPU that this worker was given, or the CPU.

        A worker that sees all GPUs of its node takes the one of its local rank; one that sees a single GPU takes that.
        """
        count = torch.cuda.device_count()
        return torch.device("cuda", self.local_rank % count) if count else torch.device("cpu")

    def init_process_group(self, backend: str | None = None, *, timeout_s: float = 600.0) -> None:
        """Forms the process group of all workers (``nccl`` with a GPU, else ``gloo``); a second call does nothing."""
        if distributed.is_initialized():
            return
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        is_one_node = self.place.local_world_size == self.world_size
        with _gloo_on_loopback(LOOPBACK if is_one_node else self.place.master_addr):
            address = f"tcp://{self.place.master_addr}:{self.place.master_port}"
            timeout = timedelta(seconds=timeout_s)
            store = next(iter(distributed.rendezvous(address, self.rank, self.world_size, timeout=timeout)))[0]
            store.set_timeout(timeout)
            # torchrun may have one store for all of its restarts: addresses of dead processes are in it then.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            distributed.init_process_group(
                backend or ("nccl" if self.device.type == "cuda" else "gloo"),
                store=distributed.PrefixStore(f"attempt {attempt}", store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=timeout,
            )


def local_path(value: T) -> T:
    """Returns ``value``, but a path of the driver as this machine has it, where ``QUARTET_PATHS`` names another
    directory.
    """
    theirs, _, ours = os.environ.get(PATHS, "").partition(":")
    if not (ours and isinstance(value, Path) and value.is_relative_to(theirs)):
        return value
    return type(value)(ours, value.relative_to(theirs))


@contextmanager
def _gloo_on_loopback(address: str) -> Iterator[None]:
    """Keeps Gloo from looking up the machine's own name, which often resolves to nothing; on one node there is no need
    to.

    Only while the group is formed: a later group of this process may span nodes.
    """
    if address != LOOPBACK or "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def free_port() -> int:
    """Finds a port that is free at the moment; see ``reserved_port``."""
    with reserved_port() as taken:
        return int(taken.getsockname()[1])


def reserved_port() -> socket.socket:
    """Binds a socket to a free port, below those that the system hands to outgoing connections.

    While it is open, the port is given to no other process, and a server of this machine that sets ``SO_REUSEADDR``, as
    torch's store does, can still listen there. Ray's own workers take ports from 10002 to 19999.
    """
    draw = random.Random()  # from the system's entropy: several workers ask at once
    for _ in range(100):
        port = draw.randrange(20000, 32768)
        candidate = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            candidate.bind(("", port))
        except OSError:
            candidate.close()
            continue
        # Only now: before, it would let two take the same port.
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return candidate
    raise OSError("no free port between 20000 and 32767 found in 100 attempts")


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
    """

    pid: int
    host: str
    node: str
    devices: str | None


class CallHeader(NamedTuple):
    """A call but for its arguments; one value, since every argument of a remote call costs time.

    Args:
        names: of the last arguments, which are passed by keyword.
        answers: this rank's result counts; otherwise it returns None.
        stays: the result comes in a tuple behind the note about it (``StoredResult``), to be stored by itself.
    """

    method: str
    names: tuple[str, ...] = ()
    answers: bool = True
    stays: bool = False


class WorkerWrapper:
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
        """Reserves a free port of this node, for the group to meet at; kept from others until then."""
        self._rendezvous = reserved_port()
        return int(self._rendezvous.getsockname()[1])

    def set_environment(self, environment: Mapping[str, str]) -> None:
        """Comes before ``build``, whose arguments may import what looks at the environment."""
        os.environ.update(environment)

    def build(self, deferred: ClassWithArgs) -> WorkerFailure | None:
        """Makes the worker."""
        self._worker = made = self._caught("__init__", deferred)
        return made if isinstance(made, WorkerFailure) else None

    def ping(self) -> int:
        return self._rank

    # Calls -----------------------------------------------------------------------------------------------

    def call(self, head: CallHeader, *values: Any) -> Any:
        """Returns a method's result as ``head`` says; ``WorkerFailure`` or ``LostResult`` in its place where there is
        none.

        Args:
            values: arguments; each by itself, so that a back end can put a stored value in the place of its reference.
        """

        def called() -> Any:
            given = fetch_arguments(self._fetch, values)
            last = len(given) - len(head.names)
            method = getattr(self._worker, head.method)
            result = method(*given[:last], **dict(zip(head.names, given[last:], strict=True)))
            if not head.answers:
                return None
            if not head.stays:
                return result
            value, note = (result.value, result.note) if isinstance(result, StoredResult) else (result, None)
            return note, value

        outcome = self._caught(head.method, called)
        return (outcome, outcome) if head.stays and isinstance(outcome, WorkerFailure | LostResult) else outcome

    def _caught(self, method: str, work: Callable[[], Any]) -> Any:
        """Returns what ``work`` returns, ``WorkerFailure`` or ``LostResult`` where it raised."""
        try:
            return work()
        except UpstreamFailed as error:
            return error.outcome
        except USERS_OWN as error:
            sys.stdout.flush()
            sys.stderr.flush()
            where, pid = f"{self._group}.{method}", os.getpid()
            return WorkerFailure.of(error, group=self._group, rank=self._rank, pid=pid, host=self._host, where=where)
