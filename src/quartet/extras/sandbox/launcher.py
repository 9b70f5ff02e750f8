"""Becomes the sandbox: run by :mod:`quartet.extras.sandbox.run` as a program, never imported by it.

Three ways, by ``job["confinement"]``. ``bubblewrap``, where that program is installed and works::

    launcher        waits
    └─ bwrap        namespaces, root directory
       └─ bwrap     first process of its process namespace: when it ends, the kernel ends every other one in there
          └─ worker this program again: no privileges, limits, refused system calls, then the code

``namespaces``, the same without it::

    launcher        writes the maps of users, waits
    └─ builder      namespaces, root directory, no privileges
       └─ init      first process of its process namespace
          └─ worker limits, refused system calls, then the code

``process``, where the kernel gives no namespaces::

    launcher        ends the worker's process group, which none of its members can leave
    └─ worker       another user if this one is root, limits, refused system calls and files, then the code

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
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SOURCES = os.path.dirname(os.path.abspath(__file__))
_INSIDE = "/sandbox"
"""Where bubblewrap shows the sources of this folder."""


def _make_importable() -> None:
    """The sandbox's own modules by their names, without the packages that they are in: these need libraries, which a
    bare interpreter does not have.
    """
    for name, folder in (("quartet", None), ("quartet.rewards", None), ("quartet.extras.sandbox", _SOURCES)):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [folder] if folder else []


if __name__ == "__main__":
    _make_importable()

from quartet.extras.sandbox import kernel_filters, namespaces  # noqa: E402 - only now can they be found


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    with _reported(job["status_fd"]):
        namespaces.end_with_parent()
    if job["confinement"] == "bubblewrap":
        _in_bubblewrap(job)
    from quartet.extras.sandbox import child  # while it can be found; not above, since bubblewrap does without

    {"namespaces": _in_namespaces, "process": _in_group, "inside": _inside}[job["confinement"]](job)
    os.write(job["status_fd"], b"ok")
    os.close(job["status_fd"])
    child.ROLES[job["role"]](job)


def _in_bubblewrap(job: dict[str, Any]) -> None:
    """Never returns: this program is started again inside."""
    status = int(job["status_fd"])
    with _reported(status):
        namespaces.adopt_orphans()
    bwrap = _fork()
    if bwrap:
        os.close(status)
        _end_as(bwrap, signal.SIGKILL, wait_for_all=True)

    with _reported(status):
        namespaces.end_with_parent()
        again = os.memfd_create("job", 0)
        os.write(again, json.dumps({**job, "confinement": "inside"}).encode())
        os.lseek(again, 0, os.SEEK_SET)
        os.dup2(again, 0)
        os.close(again)
        shown = namespaces.visible([sys.base_prefix, sys.base_exec_prefix])
        command = [job["bwrap"], "--die-with-parent", "--new-session", "--clearenv", "--unshare-cgroup-try"]
        command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
        # Which bubblewrap itself would open to their owner alone.
        for parent in ["/dev", *sorted({str(parent) for path in shown for parent in Path(path).parents} - {"/"})]:
            command += ["--perms", "0755", "--dir", parent]
        for path in shown:
            command += ["--ro-bind", path, path]
        for path, target in namespaces.links():
            command += ["--symlink", target, path]
        for name in namespaces.DEVICES:
            command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        # The worker mounts /tmp itself, since bubblewrap cannot limit how many files are in it.
        command += ["--dir", "/tmp", "--cap-add", "CAP_SYS_ADMIN"]
        command += ["--ro-bind", _SOURCES, _INSIDE, "--remount-ro", "/", "--chdir", "/tmp", "--"]
        interpreter = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        os.execv(command[0], [*command, interpreter, *sys.orig_argv[1 : -len(sys.argv)], f"{_INSIDE}/launcher.py"])


def _inside(job: dict[str, Any]) -> None:
    """What bubblewrap leaves to do in the worker."""
    with _reported(int(job["status_fd"])):
        namespaces.mount_memory("/tmp", job["limits"]["disk_bytes"], "1777")
        os.chdir("/tmp")
        namespaces.drop_privileges(job["user"])
        namespaces.end_with_parent()
        namespaces.forbid_tracing()
        # Where this user made the namespace, bubblewrap's own process in it is counted, too.
        _limit_worker(job, others=0 if job["user"] != job["trainer"] else 1)


def _limit_worker(job: dict[str, Any], others: int) -> None:
    namespaces.limit(**job["limits"], others=others)
    kernel_filters.refuse_calls()


def _in_namespaces(job: dict[str, Any]) -> None:
    """Returns in the worker, confined; the other processes never do."""
    status = int(job["status_fd"])
    ready, told = os.pipe(), os.pipe()
    builder = _fork()
    if builder:
        os.close(ready[1])
        os.close(told[0])
        if os.read(ready[0], 1):
            with _reported(status):
                namespaces.write_id_maps(builder)
            os.write(told[1], b"1")
        os.close(status)
        _end_as(builder, signal.SIGTERM)
    os.close(told[1])

    with _reported(status):
        namespaces.end_with_parent()
        namespaces.enter_namespaces()
        os.write(ready[1], b"1")
        if not os.read(told[0], 1):
            os._exit(1)  # the launcher has said why
        prefixes = [sys.base_prefix, sys.base_exec_prefix]
        namespaces.change_root(job["mount_point"], prefixes, job["limits"]["disk_bytes"])
        namespaces.drop_privileges()
        namespaces.end_with_parent()  # forgotten when the user changes
    for fd in (*ready, told[0]):
        os.close(fd)
    init = _fork()
    if init:
        os.close(status)
        _end_as(init, signal.SIGKILL)
    with _reported(status):
        namespaces.end_with_parent()
        namespaces.forbid_tracing()
    worker = _fork()
    if worker:
        os.close(status)
        _end_as(worker, signal.SIGKILL)
    # Counted in the user namespace, where two more keep house.
    with _reported(status):
        _limit_worker(job, others=2)


def _in_group(job: dict[str, Any]) -> None:
    """Returns in the worker, confined as far as that goes without namespaces; the launcher never does."""
    status = int(job["status_fd"])

    with _reported(status):
        namespaces.adopt_orphans()
        namespaces.forbid_tracing()
        # The kernel counts all processes of a user together; no other process has this one, unless it is the trainer's.
        others = 0 if os.geteuid() == 0 else namespaces.num_tasks(os.geteuid())
    worker = _fork()
    if worker:
        os.close(status)
        os.setpgid(worker, worker)
        _end_group(worker)

    with _reported(status):
        os.setpgid(0, 0)
        os.chdir(job["folder"])
        shown = namespaces.visible([sys.base_prefix, sys.base_exec_prefix])
        opened = {path: os.open(path, os.O_PATH) for path in shown}
        if kernel_filters.has_landlock():
            _import_through(opened)
        namespaces.drop_privileges(job["user"])
        namespaces.end_with_parent()
        namespaces.forbid_tracing()
        # "." because folders above it need not be open to the code's user.
        kernel_filters.restrict_files(list(opened.values()), ".")
        _limit_worker(job, others)
        os.listdir(sys.path[-1])  # an error where the code's user cannot read the interpreter's modules


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


@contextlib.contextmanager
def _reported(status: int) -> Iterator[None]:
    """What goes wrong inside is told, and ends this process."""
    try:
        yield
    except (OSError, ValueError) as error:
        os.write(status, f"{error}".encode())
        os._exit(1)


def _end_as(child: int, passed_on: signal.Signals, *, wait_for_all: bool = False) -> None:
    """Waits for the child, reaping whatever else ends meanwhile, and ends with its exit status. SIGTERM goes on to the
    child as ``passed_on``.
    """
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, passed_on))
    status = -1
    while status < 0:
        pid, ended = os.wait()
        status = ended if pid == child else -1
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(ChildProcessError):
        while wait_for_all:
            os.wait()
    os._exit(abs(os.waitstatus_to_exitcode(status)))


def _end_group(worker: int) -> None:
    """Waits for the worker, kills its group, and ends with its exit status when everything of it is gone. SIGTERM kills
    the group at once.
    """
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(worker, signal.SIGKILL))
    namespaces.end_with_parent(signal.SIGTERM)  # The kernel would end the worker, and not what that has started.
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
