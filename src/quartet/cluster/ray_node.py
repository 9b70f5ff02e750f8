"""A Ray node of this machine as a child process that takes what it has started with it."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from quartet.cluster.worker import free_port
from quartet.config.errors import UserError
from quartet.processes import beginning, descendants, ended, with_parent

RAY_ARGUMENTS = "QUARTET_RAY_ARGS"
"""Variable with further arguments of ``ray start`` on this node, ``--object-store-memory=1000000000`` say."""
_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_")
_LOG_LINES = 20


def without_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """Without the variables by which a program takes itself for one of torchrun's ranks."""
    return {k: v for k, v in environment.items() if k not in _PLACE and not k.startswith(_PREFIXES)}


class RayNode:
    """Ray on this machine, started as ``ray start --block``, which ends with what it has started.

    It has a session of its own, so that Ctrl-C does not take it from under the command, and dies with this process.
    """

    def __init__(self, cluster: str, address: str, token: str, *, is_head: bool, least_cpus: int) -> None:
        self.cluster = cluster
        # Without the token no code can be run on this cluster; a user's own setting stays.
        secret = {} if "RAY_AUTH_MODE" in os.environ else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        self.environment = {**without_torchrun(os.environ), **secret, "RAY_USAGE_STATS_ENABLED": "0"}
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

    def answers(self, num_nodes: int) -> bool:
        """Whether the cluster is there, with so many living nodes."""
        host, _, port = self.cluster.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError:
            return False
        return num_nodes == 0 or self._living() >= num_nodes

    def _living(self) -> int:
        import ray

        nodes = ray._raylet.GcsClient(address=self.cluster).get_all_node_info(timeout=5.0)
        alive = ray.core.generated.gcs_pb2.GcsNodeInfo.ALIVE
        return sum(node.state == alive for node in nodes.values())

    def stop(self, *, keep_logs: bool) -> None:
        """Ends exactly what was started: the process, and those that it says it has started."""
        started = descendants(self._started.pid)
        ended(self._started)
        for pid, began in started.items():
            if began == beginning(pid):
                os.kill(pid, signal.SIGKILL)
        if keep_logs:
            print(f"logs of Ray on {socket.gethostname()}: {self._folder}", file=sys.stderr)
        else:
            shutil.rmtree(self._folder, ignore_errors=True)


def _apart() -> None:
    """As ``with_parent``; what a scheduler sends to all processes of a job is for the command, not for its Ray."""
    with_parent()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
