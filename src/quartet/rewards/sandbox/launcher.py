"""Becomes the sandbox: run by :mod:`quartet.rewards.sandbox.run` as a program, never imported by it.

::

    launcher        writes the maps of users, waits
    └─ builder      namespaces, root directory, no privileges
       └─ init      first process of its process namespace: when it ends, the kernel ends every other one in there
          └─ worker limits, then the code

With ``isolation: process``, where the kernel gives no namespaces::

    launcher        ends the worker's process group, which none of its members can leave
    └─ worker       another user if this one is root, limits, refused system calls, then the code

The job comes as JSON in a file on descriptor 0. ``status_fd`` gets ``ok`` once the code is about to start, or what went
wrong, and is closed before it does. Exit statuses are those of the worker, which the code under test sets as it likes.
SIGTERM to the launcher ends all of it; when the launcher has ended, all the others have.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

_SOURCES = os.path.abspath(__file__ + "/../../../..")


def main() -> None:
    sys.path.insert(0, _SOURCES)
    from quartet.rewards.sandbox import confine, refuse, work  # noqa: F401 - all modules, while they can be found

    sys.path.remove(_SOURCES)
    job = json.loads(sys.stdin.buffer.read())
    _or_report(job["status_fd"], confine.end_with_parent)
    {"namespaces": _in_namespaces, "process": _in_group}[job["isolation"]](job)
    os.write(job["status_fd"], b"ok")
    os.close(job["status_fd"])
    work.ROLES[job["role"]](job)


def _in_namespaces(job: dict[str, Any]) -> None:
    """Returns in the worker, confined; the other processes never do."""
    from quartet.rewards.sandbox import confine

    status = int(job["status_fd"])
    ready, told = os.pipe(), os.pipe()
    builder = _fork()
    if builder:
        os.close(ready[1])
        os.close(told[0])
        if os.read(ready[0], 1):
            _or_report(status, lambda: confine.write_id_maps(builder))
            os.write(told[1], b"1")
        os.close(status)
        _end_as(builder, signal.SIGTERM)
    os.close(told[1])

    def build() -> None:
        confine.end_with_parent()
        confine.enter_namespaces()
        os.write(ready[1], b"1")
        if not os.read(told[0], 1):
            os._exit(1)  # the launcher has said why
        prefixes = [sys.base_prefix, sys.base_exec_prefix]
        confine.change_root(job["mount_point"], prefixes, job["limits"]["disk_bytes"])
        confine.drop_privileges()
        confine.end_with_parent()  # forgotten when the user changes

    _or_report(status, build)
    for fd in (*ready, told[0]):
        os.close(fd)
    init = _fork()
    if init:
        os.close(status)
        _end_as(init, signal.SIGKILL)
    _or_report(status, confine.end_with_parent)
    _or_report(status, confine.forbid_tracing)
    worker = _fork()
    if worker:
        os.close(status)
        _end_as(worker, signal.SIGKILL)
    # Counted in the user namespace, where two more keep house.
    _or_report(status, lambda: confine.limit(**job["limits"], others=2))


def _in_group(job: dict[str, Any]) -> None:
    """Returns in the worker, confined as far as that goes without namespaces; the launcher never does."""
    from quartet.rewards.sandbox import confine, refuse

    status = int(job["status_fd"])

    def prepare() -> int:
        confine.adopt_orphans()
        confine.forbid_tracing()
        # The kernel counts all processes of a user together; nobody else is this one, where it is not the trainer's.
        return 0 if os.geteuid() == 0 else confine.num_tasks(os.geteuid())

    others: int = _or_report(status, prepare)
    worker = _fork()
    if worker:
        os.close(status)
        os.setpgid(worker, worker)
        _end_group(worker)

    def confined() -> None:
        os.setpgid(0, 0)
        os.chdir(job["folder"])
        shown = confine.visible([sys.base_prefix, sys.base_exec_prefix])
        opened = {path: os.open(path, os.O_PATH) for path in shown}
        if refuse.has_landlock():
            _import_through(opened)
        confine.drop_privileges(job["user"])
        confine.end_with_parent()
        confine.forbid_tracing()
        confine.limit(**job["limits"], others=others)
        # "." because folders above it need not be open to the code's user.
        refuse.restrict_files(list(opened.values()), ".")
        refuse.refuse_calls()
        os.listdir(sys.path[-1])  # an error where the code's user cannot read the interpreter's modules

    _or_report(status, confined)


def _import_through(opened: dict[str, int]) -> None:
    """Modules are found through open folders: another user may not get by name to an interpreter in root's home."""

    def through(path: str) -> str:
        for folder, fd in opened.items():
            if path.startswith(f"{folder}/"):
                return f"/proc/self/fd/{fd}{path.removeprefix(folder)}"
        return path

    sys.path = [through(path) for path in sys.path]
    for module in list(sys.modules.values()):
        if hasattr(module, "__path__"):
            module.__path__ = [through(path) for path in module.__path__]


def _fork() -> int:
    sys.stdout.flush()
    return os.fork()


def _or_report(status: int, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except (OSError, ValueError) as error:
        os.write(status, f"{error}".encode())
        os._exit(1)


def _end_as(child: int, passed_on: signal.Signals) -> None:
    """Waits for the child, reaping whatever else ends meanwhile, and ends with its exit status. SIGTERM goes on to the
    child as ``passed_on``.
    """
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, passed_on))
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(abs(os.waitstatus_to_exitcode(status)))


def _end_group(worker: int) -> None:
    """Waits for the worker, kills its group, and ends with its exit status when everything of it is gone. SIGTERM kills
    the group at once.
    """
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(worker, signal.SIGKILL))
    # Not yet reaped, so that the number of the group stays its own.
    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(worker, signal.SIGKILL)
    _, status = os.waitpid(worker, 0)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(abs(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
