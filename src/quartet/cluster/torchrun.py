"""Ray inside an allocation: ``torchrun --nnodes 4 --nproc-per-node 8 … quartet rl recipe.yaml``.

torchrun starts the same command in many processes. The first of each node (its *leader*) starts a Ray node there, all
of them one cluster. Rank 0 then runs the command itself, in a process of its own that sees the cluster as
``RAY_ADDRESS`` and nothing of torchrun. All others wait for its end and leave with its exit status. A process that
fails or is killed ends all: torchrun ends the processes of a node together, their keeper tells the others and ends the
Ray node that it has started.

A signal to any of them (SIGINT, SIGTERM, SIGUSR1; torchrun passes on what it gets, and sends SIGTERM when a process of
its node has ended) is passed on to the command, which saves and ends; its Ray stays until then, ``GRACE_S`` at most.

A Ray node of this machine as a child process that takes what it has started with it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from torch import distributed

from quartet.cluster.worker import LOOPBACK, NUM_NODES, free_port
from quartet.config.errors import UserError
from quartet.processes import descendant_processes, die_with_parent, prepare_child, process_start_time, terminating

RAY_ARGUMENTS = "QUARTET_RAY_ARGS"
"""Variable with further arguments of ``ray start`` on this node, ``--object-store-memory=1000000000`` say."""
_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_")
_LOG_LINES = 20


def without_torchrun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Leaves out the variables by which a program takes itself for one of torchrun's ranks."""
    return {k: v for k, v in environment.items() if k not in _PLACE and not k.startswith(_PREFIXES)}


class RayNode:
    """Ray on this machine, started as ``ray start --block``, which ends with what it has started.

    It has a session of its own, so that Ctrl-C does not take it from under the command, and dies with this process.
    """

    def __init__(self, cluster: str, address: str, token: str, *, is_head: bool, least_cpus: int) -> None:
        self.cluster = cluster
        # Without the token no code can be run on this cluster; a user's own setting stays.
        secret = {} if "RAY_AUTH_MODE" in os.environ else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        self.environment = {**without_torchrun_variables(os.environ), **secret, "RAY_USAGE_STATS_ENABLED": "0"}
        os.environ.update(secret)
        self._folder = Path(tempfile.mkdtemp(prefix="quartet-ray-", dir="/tmp"))  # sockets: a short path
        self._log = self._folder / "start.log"
        cpus = max(len(os.sched_getaffinity(0)), least_cpus)
        port = cluster.rpartition(":")[2]
        head = ["--head", f"--port={port}", "--include-dashboard=false", f"--ray-client-server-port={free_port()}"]
        arguments = [
            *(head if is_head else [f"--address={cluster}"]),
            f"--node-ip-address={address}",
            f"--num-cpus={cpus}",
            # Any free ones: several nodes may share a machine.
            "--min-worker-port=0",
            "--max-worker-port=0",
            f"--temp-dir={self._folder}",
            "--block",
            *shlex.split(os.environ.get(RAY_ARGUMENTS, "")),
        ]
        with self._log.open("wb") as log:
            self._started = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_apart,
            )

    def check(self) -> None:
        """
        Raises:
            UserError: Ray has ended.
        """
        if (status := self._started.poll()) is not None:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
            said = [line for line in lines if line.strip()][-_LOG_LINES:]
            raise UserError(
                f"Ray ended on {socket.gethostname()} (exit status {status})",
                found="\n    ".join(["its last words:", *said]),
                remedy=f"see {self._folder}; arguments of `ray start` can be given in {RAY_ARGUMENTS}",
            )

    def answers(self) -> bool:
        """Tells whether the cluster's first node is there."""
        host, _, port = self.cluster.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError:
            return False
        return True

    def stop(self, *, keep_logs: bool) -> None:
        """Ends exactly what was started: the process, and those that it says it has started."""
        started = descendant_processes(self._started.pid)
        terminating(self._started)
        for pid, began in started.items():
            if began == process_start_time(pid):
                os.kill(pid, signal.SIGKILL)
        if keep_logs:
            print(f"logs of Ray on {socket.gethostname()}: {self._folder}", file=sys.stderr)
        else:
            shutil.rmtree(self._folder, ignore_errors=True)


def _apart() -> None:
    """Does what ``prepare_child`` does; what a scheduler sends to all processes of a job is for the command alone."""
    prepare_child()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


POLL_S = 0.2
START_S = 180.0
LEAVE_S = 10.0
GRACE_S = max(1.0, float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")) - 5.0)
"""For the command to save and end after a signal; torchrun kills so many seconds after it has passed one on."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
EXPECTED = (0, 2, *(128 + number for number in STOP_SIGNALS))
"""Exit statuses for which Ray's logs are not needed: done, a mistake of the user, stopped by a signal."""


@dataclass(frozen=True)
class TorchrunRank:
    """A process of torchrun's: its rank, its place on its node, and its node among all nodes."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    num_nodes: int

    @classmethod
    def found(cls, environment: Mapping[str, str]) -> TorchrunRank:
        """Returns the rank that torchrun's variables name."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
        return cls(*(int(environment[name]) for name in names))

    @property
    def is_node_leader(self) -> bool:
        return self.local_rank == 0


def run_under_torchrun(command: Sequence[str], launcher: TorchrunRank) -> int:
    """Runs the command once, on rank 0, with a Ray cluster of all nodes; returns when it has ended.

    Returns:
        The command's exit status, in every process; 1 where something else ended.

    Raises:
        UserError: Ray is not installed, or does not start (in the leader of that node; the others return 2 or 1).
    """
    die_with_parent(signal.SIGTERM)  # torchrun, killed, would leave us behind
    if importlib.util.find_spec("ray") is None:
        if not launcher.is_node_leader:
            return 2
        raise UserError(
            "an allocation of torchrun needs Ray to place the roles",
            found=f"Ray is not installed on node {launcher.node} ({sys.executable})",
            remedy="pip install 'quartet-rl[ray]' on every node, or run without torchrun on one machine",
        )
    return _NodeAgent(launcher).run(command)


class _NodeAgent:
    """One process of the allocation. What the processes tell each other stands in torchrun's store:

    ``host/<node>`` (machine and address), ``ray`` (the cluster's address and token), ``stop`` (the signal that one of
    them got), ``end`` (exit status), ``left`` (how many processes have seen it).
    """

    def __init__(self, launcher: TorchrunRank) -> None:
        self.launcher = launcher
        self.store = next(iter(distributed.rendezvous("env://", timeout=timedelta(seconds=30))))[0]
        self.stopped_by: int | None = None
        self._told_s = 0.0
        self._running: subprocess.Popen[bytes] | None = None
        self.node: RayNode | None = None

    def run(self, command: Sequence[str]) -> int:
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)
        status = 1
        try:
            if self.launcher.is_node_leader:
                self._join()
            status = self._command(command) if self.launcher.rank == 0 else self._await(lambda: None)
        except UserError:
            status = 2
            raise
        except _Ended as end:
            status = end.status
        except distributed.DistError:
            status = 1  # the process that held the store is gone
        finally:
            self._leave(status)
        return status

    def _stop(self, number: int, *_: object) -> None:
        self.stopped_by = self.stopped_by or number

    # Together --------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Starts this node's Ray, in the cluster that rank 0 begins."""
        launcher = self.launcher
        master = os.environ["MASTER_ADDR"]
        self.store.set(f"host/{launcher.node}", json.dumps([machine_name(), local_address_towards(master)]))
        hosts = [json.loads(self._told(f"host/{node}")) for node in range(launcher.num_nodes)]
        address = own_address(launcher.node, hosts)
        if launcher.rank == 0:
            cluster, token = f"{address}:{free_port()}", secrets.token_hex(32)
        else:
            cluster, token = json.loads(self._told("ray"))
        self.node = RayNode(cluster, address, token, is_head=launcher.rank == 0, least_cpus=launcher.local_world_size)
        if launcher.rank == 0:
            self._await(self.node.answers)
            self.store.set("ray", json.dumps([cluster, token]))

    def _read(self, key: str) -> bytes | None:
        return bytes(self.store.get(key)) if self.store.check([key]) else None

    def _told(self, key: str) -> bytes:
        """Waits for what another process will say, and returns it."""
        return bytes(self._await(partial(self._read, key), START_S))

    def _command(self, command: Sequence[str]) -> int:
        """Runs it; when it connects to Ray, it waits until all nodes are there."""
        assert self.node is not None
        place = {"RAY_ADDRESS": self.node.cluster, NUM_NODES: str(self.launcher.num_nodes)}
        environment = {**self.node.environment, **place}
        running = self._running = subprocess.Popen(list(command), env=environment, preexec_fn=prepare_child)
        try:
            status = int(self._await(running.poll))
        finally:
            terminating(running)
            self._running = None
        return status if status >= 0 else 128 - status  # a signal's number, as a shell gives it

    def _await(self, found: Callable[[], Any], timeout_s: float | None = None) -> Any:
        """Waits until ``found`` no longer returns None (or False), and returns what it does.

        Raises:
            _Ended: the allocation has come to its end meanwhile.
            DistError: the store is gone, with the process that held it.
            UserError: not within the time.
        """
        deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        while (value := found()) is None or value is False:
            self._check()
            if deadline is not None and time.monotonic() > deadline:
                raise UserError(
                    "the nodes of the allocation did not come together",
                    found=f"node {self.launcher.node} of {self.launcher.num_nodes} waited for {timeout_s:g} s",
                    remedy="look at the output of the others; every node must reach the first one's ports",
                )
            time.sleep(POLL_S)
        return value

    def _check(self) -> None:
        """Raises ``_Ended`` where there is nothing left to wait for."""
        if self.stopped_by is not None and not self._told_s:
            self._pass_on(self.stopped_by)
        if self._told_s and time.monotonic() - self._told_s > GRACE_S:
            raise _Ended(128 + (self.stopped_by or signal.SIGTERM))
        if self.node is not None:
            self.node.check()
        if (status := self._read("end")) is not None:
            raise _Ended(int(status))
        if self.launcher.rank == 0 and self.stopped_by is None and (number := self._read("stop")) is not None:
            self.stopped_by = int(number)

    def _pass_on(self, number: int) -> None:
        """Tells the command to save and end, and the others that it was told."""
        self._told_s = time.monotonic()
        self.store.compare_set("stop", "", str(number))
        if self._running is not None:
            # Not as SIGINT: the terminal sends that to the command, too, and a second one stops it at once.
            self._running.send_signal(signal.SIGTERM if number == signal.SIGINT else number)
        elif self.launcher.rank == 0:
            raise _Ended(128 + number)  # there is no command yet

    def _leave(self, status: int) -> None:
        """Tells the others, ends this node's Ray, and lets rank 0, whose machine may hold the store, go last."""
        try:
            # The first status counts: the others fail because one has.
            self.store.compare_set("end", "", str(status))
        except distributed.DistError:
            status = status or 1
        if self.node is not None:
            self.node.stop(keep_logs=status not in EXPECTED)
        with contextlib.suppress(distributed.DistError):
            self.store.add("left", 1)
            deadline = time.monotonic() + LEAVE_S
            while self.launcher.rank == 0 and time.monotonic() < deadline:
                if self.store.add("left", 0) >= self.launcher.world_size:
                    break
                time.sleep(POLL_S)


class _Ended(Exception):
    """The allocation has ended with this status."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(status)


# Addresses -----------------------------------------------------------------------------------------------


def machine_name() -> str:
    """Returns a name for this machine, or for this container of it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


def local_address_towards(host: str) -> str:
    """Returns this machine's address on the network by which it reaches ``host``; nothing is sent."""
    family = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family[0], socket.SOCK_DGRAM) as probe:
        probe.connect(family[4])
        return str(probe.getsockname()[0])


def own_address(
    node: int, hosts: Sequence[tuple[str, str]], towards: Callable[[str], str] = local_address_towards
) -> str:
    """Returns the address by which the other nodes reach this one.

    Args:
        hosts: per node its machine, and its address towards torchrun's rendezvous. The node of the rendezvous
            itself often says that it is at a loopback address there.
    """
    if len({name for name, _ in hosts}) == 1:
        return LOOPBACK
    if not ip_address(hosts[node][1]).is_loopback:
        return hosts[node][1]
    return towards(next(address for _, address in hosts if not ip_address(address).is_loopback))
