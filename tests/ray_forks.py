"""One Ray for the files of a test process that need one, with workers forked from a process that has imported all.

A worker of Ray's own takes some six seconds of computing to import torch, transformers and the product; a forked one a
third of a second. All else is Ray's: the worker runs Ray's program, with the arguments, environment and output files
that Ray gave it, at the head of a group of processes. Three parts: ``SharedRay`` is what tests hold; the server
(``serve``) has imported everything and forks; and Ray runs this file in the place of its ``setup_worker.py``, where it
asks the server for a worker and stays until that has ended. Workers with an environment of their own start as Ray
starts them.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SERVER = "QUARTET_TESTS_FORK_SERVER"
"""Where the server listens; Ray's processes have it from the one that started them."""
CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="
"""What Ray says to ``setup_worker.py``; the rest is for the worker."""


class SharedRay:
    """Ray of four processors. Files connect to it, and what they started ends with their connection.

    Any other Ray that a test starts has workers of Ray's own.
    """

    def __init__(self) -> None:
        self._servers, self._ray = contextlib.ExitStack(), contextlib.ExitStack()
        self._server = ""

    def start(self) -> None:
        """Does nothing if it is there."""
        import ray

        from quartet.cluster import connect

        if ray.is_initialized():
            return
        self._server = self._server or self._servers.enter_context(_fork_server())
        with self._workers_forked():
            self._ray.enter_context(connect(num_cpus=4, log_to_driver=False))

    @contextlib.contextmanager
    def another_node(self, num_cpus: int, environment: dict[str, str]) -> Iterator[None]:
        """A second node of it, on this machine, whose workers have other variables as well; it ends with the block."""
        import ray
        from ray._private.node import Node
        from ray._private.parameter import RayParams

        with self._workers_forked():
            params = RayParams(
                gcs_address=ray.get_runtime_context().gcs_address,
                redis_address=ray.get_runtime_context().gcs_address,
                num_cpus=num_cpus,
                num_gpus=0,
                object_store_memory=200 * 2**20,
                min_worker_port=0,
                max_worker_port=0,
                node_manager_port=0,
                include_log_monitor=False,
                env_vars={SERVER: self._server, **environment},
            )
            params.dashboard_agent_listen_port = None
            node = Node(params, head=False, shutdown_at_exit=False, spawn_reaper=False)
        try:
            while sum(found["Alive"] for found in ray.nodes()) < 2:
                time.sleep(0.05)
            yield
        finally:
            node.kill_all_processes(check_alive=False, allow_graceful=True)

    @contextlib.contextmanager
    def _workers_forked(self) -> Iterator[None]:
        """What is started inside has its workers forked."""
        import pytest
        from ray._private.parameter import RayParams

        original = RayParams.__init__

        def pointed_here(params: Any, *args: Any, **options: Any) -> None:
            original(params, *args, **options)
            params.setup_worker_path = __file__

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RayParams, "__init__", pointed_here)
            patch.setenv(SERVER, self._server)
            # Ray's 15 leaves a worker three in a hundred parts of a processor that tests beside it keep busy.
            patch.setenv("RAY_worker_niceness", "0")
            yield

    def stop(self) -> None:
        self._ray.close()

    def close(self) -> None:
        self.stop()
        self._servers.close()


@contextlib.contextmanager
def _fork_server() -> Iterator[str]:
    """Where it listens; it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="quartet-forks-") as folder:
        path = str(Path(folder) / "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(path)
            listening.listen(64)
            descriptor = listening.fileno()
            command = [sys.executable, __file__, "serve", str(descriptor)]
            # numpy starts threads for as many cores as it finds, when it is imported.
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[descriptor], env=environment)
        try:
            yield path
        finally:
            server.communicate(timeout=60)


# The server --------------------------------------------------------------------------------------------------


class Server:
    """Forks a worker for each that asks; kills it when who asked is gone, and says when it has ended.

    One thread: others would be missing in what it forks.
    """

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._asking: dict[int, socket.socket] = {}
        self._ended, wakes = socket.socketpair()
        wakes.setblocking(False)
        self._own = [listening, self._ended, wakes]
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        self._selector = selectors.DefaultSelector()
        for source in (listening, self._ended, sys.stdin):
            self._selector.register(source, selectors.EVENT_READ)

    def serve(self) -> dict[str, Any] | None:
        """None at the end of standard input; in a forked process, what it has to be."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is sys.stdin:
                    for pid in self._asking:
                        os.kill(pid, signal.SIGKILL)
                    return None
                if key.fileobj is self._ended:
                    self._ended.recv(4096)
                    self._bury()
                elif key.fileobj is self._listening:
                    wanted = self._fork()
                    if wanted is not None:
                        return wanted
                elif key.data in self._asking:  # not waited for yet, so the number is its own
                    os.kill(key.data, signal.SIGKILL)
                    self._selector.unregister(key.fileobj)

    def _fork(self) -> dict[str, Any] | None:
        asking, _ = self._listening.accept()
        message, outputs, _, _ = socket.recv_fds(asking, 2**20, 3)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for target, descriptor in enumerate(outputs):
                os.dup2(descriptor, target)
            self._selector.close()
            for opened in (*self._own, *self._asking.values(), asking):
                opened.close()
        for descriptor in outputs:
            os.close(descriptor)
        if pid == 0:
            wanted: dict[str, Any] = json.loads(message)
            return wanted
        self._asking[pid] = asking
        self._selector.register(asking, selectors.EVENT_READ, pid)
        return None

    def _bury(self) -> None:
        while self._asking:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self._asking.pop(pid) as asking:
                if asking in self._selector.get_map():
                    self._selector.unregister(asking)
                with contextlib.suppress(BrokenPipeError):
                    asking.send(str(os.waitstatus_to_exitcode(status)).encode())


def serve(descriptor: int) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import preload

    preload.load()
    wanted = Server(socket.socket(fileno=descriptor)).serve()
    if wanted is not None:
        os.setpgrp()  # Ray ends whole groups of processes
        os.environ.clear()
        os.environ.update(wanted["environment"])
        os.chdir(wanted["folder"])
        sys.argv = wanted["arguments"]
        sys.path[:2] = [str(Path(sys.argv[0]).parent)]
        runpy.run_path(sys.argv[0], run_name="__main__")


# In the place of setup_worker.py -----------------------------------------------------------------------------


def ask(arguments: list[str]) -> int:
    """The exit status of the worker."""
    wanted = {
        "arguments": [given for given in arguments if not given.startswith((CONTEXT, LANGUAGE))],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(os.environ[SERVER])
        socket.send_fds(server, [json.dumps(wanted).encode()], [0, 1, 2])
        return int(server.recv(64) or -signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    elif any(given.startswith(CONTEXT) and given != CONTEXT + "{}" for given in sys.argv):
        # Ray's own file, beside the worker's program.
        own = str(Path(sys.argv[1]).with_name("setup_worker.py"))
        os.execv(sys.executable, [sys.executable, own, *sys.argv[1:]])
    else:
        raise SystemExit(ask(sys.argv[1:]))
