"""Runs untrusted code, on Linux: a program on an input, or a solution against tests.

Each run is a process of its own in namespaces of its own, which bubblewrap makes (``confine.py`` takes the rest away),
and gone with everything it started when it is over. Tests run in a second sandbox, so that the code under test shares
no memory with what judges it: verdicts come over a pipe that it does not have, and no exit status of it is taken for
success.

These functions wait; call them in threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from quartet.extras.sandbox.child import MAX_REASON

_SETUP_S = 60.0
"""Most seconds until a sandbox stands; it takes some hundredths of one where the machine is not busy."""
_FIRST_USER, _NUM_USERS = 61184, 4336
"""Numbers that systems keep for users who own no files (systemd's dynamic ones)."""
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64")
_SOURCES = "/sandbox/quartet/extras/sandbox"
"""Where this folder is shown: without the packages that it is in, which need libraries."""
_PROGRAM = """
import sys
sys.path.append("/sandbox")
from quartet.extras.sandbox import confine
sys.path.pop()
confine.main()
"""

EndReason = Literal["by itself", "time", "output"]


class SandboxError(Exception):
    """The sandbox could not be set up; the code was not run."""


@dataclass(frozen=True)
class SandboxLimits:
    """What one run may use: wall-clock seconds, bytes of output that is read, bytes written to disk in all; of each
    process its address space; processes and threads at a time.
    """

    wall_s: float = 5.0
    output_bytes: int = 1 << 18
    memory_bytes: int = 1 << 29
    disk_bytes: int = 1 << 24
    processes: int = 16


@dataclass(frozen=True)
class SolutionCheck:
    """Python source that passes unless it raises; ``counts``: it is a test, and not what tests need before them."""

    source: str
    counts: bool = True


@dataclass(frozen=True)
class ProgramRun:
    """What a program wrote to standard output, and what ended it. ``status`` is as the program wished: only a sign of
    failure.
    """

    output: bytes
    ended: EndReason
    status: int


@functools.cache
def _bubblewrap() -> list[str]:
    """Returns the command up to the arguments of one run: new namespaces; in them the system's programs and the
    interpreter, read-only, four harmless devices, an empty ``/tmp`` and no ``/proc``.

    Raises:
        SandboxError: it is not installed.
    """
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxError("bubblewrap (bwrap) is not installed")
    # Python is the first process of its namespace: when it ends, the kernel ends every other one in there.
    command = [path, "--die-with-parent", "--as-pid-1", "--new-session", "--clearenv", "--unshare-cgroup-try"]
    command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    links = {path: os.readlink(path) for path in _SYSTEM if os.path.islink(path)}
    shown: list[str] = []
    for folder in sorted({sys.base_prefix, sys.base_exec_prefix, *filter(os.path.isdir, _SYSTEM)} - {*links}):
        if not any(folder.startswith(f"{other}/") for other in shown):
            shown.append(folder)
    # Which bubblewrap itself would open to their owner alone.
    for parent in ["/dev", *sorted({str(up) for path in (*shown, _SOURCES) for up in Path(path).parents} - {"/"})]:
        command += ["--perms", "0755", "--dir", parent]
    for folder in shown:
        command += ["--ro-bind", folder, folder]
    for link, target in links.items():
        command += ["--symlink", target, link]
    for name in ("null", "zero", "random", "urandom"):
        command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    # Python mounts /tmp itself, since bubblewrap cannot limit how many files are in it.
    command += ["--dir", "/tmp", "--cap-add", "CAP_SYS_ADMIN", "--ro-bind", str(Path(__file__).parent), _SOURCES]
    return [*command, "--remount-ro", "/", "--chdir", "/tmp"]


class _Sandboxed:
    """One sandboxed process, gone with all it started when its ``with`` is over.

    Args:
        job: what the role needs; its entries ``…_fd`` are open there, too.
        stdout: a descriptor, or one of subprocess' constants.
        text: its standard input.
    """

    def __init__(self, role: str, job: dict[str, Any], limits: SandboxLimits, stdout: int, text: str = "") -> None:
        # For root a user id that no other user and no other run has.
        user = _FIRST_USER + secrets.randbelow(_NUM_USERS)
        told = json.dumps({**job, "role": role, "limits": asdict(limits), "user": user})
        interpreter = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        python = [interpreter, "-I", "-S", "-B", "-X", "utf8", "-c", _PROGRAM]
        self._status, status_fd = os.pipe()
        job_fd = _memory_file(told.encode())
        stdin = _memory_file(text.encode("utf-8", "surrogatepass"))
        try:
            self.process = subprocess.Popen(
                [*_bubblewrap(), "--", *python, str(job_fd), str(status_fd)],
                stdin=stdin,
                stdout=stdout,
                stderr=status_fd,
                env={},
                cwd="/",
                start_new_session=True,
                pass_fds=[job_fd, status_fd, *(fd for name, fd in job.items() if name.endswith("_fd"))],
            )
        except (OSError, SandboxError) as error:
            os.close(self._status)
            raise SandboxError(f"bubblewrap could not be started: {error}") from error
        finally:
            for fd in (status_fd, job_fd, stdin):
                os.close(fd)

    def wait_until_ready(self) -> None:
        said, ended = _read(self._status, time.monotonic() + _SETUP_S, 1 << 16, until=b"ok")
        if said != b"ok":
            slow = f"nothing was said within {_SETUP_S} s" if ended == "time" else "its process ended"
            raise SandboxError(said.decode(errors="replace").strip() or slow)

    def __enter__(self) -> _Sandboxed:
        return self

    def __exit__(self, *_: object) -> None:
        """Kills what is left."""
        self.process.kill()  # and the kernel what it has started: the first process in there asked for that
        self.process.wait()
        os.close(self._status)
        if self.process.stdout is not None:
            self.process.stdout.close()


def _memory_file(content: bytes) -> int:
    """Makes a descriptor of a file in memory that can no longer be changed."""
    fd = os.memfd_create("quartet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    return fd


def run_program(source: str, text: str, limits: SandboxLimits) -> ProgramRun:
    """Runs ``source`` as a program with ``text`` on its standard input.

    Raises:
        SandboxError: no sandbox could be set up.
    """
    with _Sandboxed("program", {"source": source}, limits, subprocess.PIPE, text) as program:
        program.wait_until_ready()
        deadline = time.monotonic() + limits.wall_s
        assert program.process.stdout is not None, "asked for above"
        output, ended = _read(program.process.stdout.fileno(), deadline, limits.output_bytes)
        if ended == "by itself":
            try:
                program.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                ended = "time"
    return ProgramRun(output, ended, program.process.returncode)


def judge(source: str, tests: Sequence[SolutionCheck], limits: SandboxLimits) -> list[str]:
    """Tells for each of the tests that count why it failed, partly in words of the code under test; empty where it
    passed. All of them have ``limits.wall_s``; what did not come to its turn failed.

    Raises:
        SandboxError: no sandbox could be set up.
    """
    to_solution, to_tests = os.pipe(), os.pipe()
    with contextlib.ExitStack() as stack:
        try:
            job = {"source": source, "read_fd": to_solution[0], "write_fd": to_tests[1]}
            solution = stack.enter_context(_Sandboxed("solution", job, limits, subprocess.DEVNULL))
            job = {"tests": [asdict(test) for test in tests], "read_fd": to_tests[0], "write_fd": to_solution[1]}
            judging = stack.enter_context(_Sandboxed("tests", job, limits, subprocess.PIPE))
        finally:
            for fd in (*to_solution, *to_tests):
                os.close(fd)
        for sandboxed in (solution, judging):
            sandboxed.wait_until_ready()
        stdout = judging.process.stdout
        assert stdout is not None, "asked for above"
        num = sum(test.counts for test in tests)
        # A character of a reason is at most two escapes of six bytes.
        said, ended = _read(stdout.fileno(), time.monotonic() + limits.wall_s, num * (12 * MAX_REASON + 8))
    missing = f"no verdict within {limits.wall_s} s" if ended == "time" else "the tests ended before this one"
    failures = [json.loads(line) for line in said.split(b"\n")[:-1][:num]]
    return failures + [missing] * (num - len(failures))


def _read(fd: int, deadline: float, most: int, until: bytes = b"") -> tuple[bytes, EndReason]:
    """Reads everything up to the end of the file, the deadline, one byte more than ``most`` or, where
    given, ``until``.
    """
    found = bytearray()
    while len(found) <= most and not (until and found.endswith(until)):
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return bytes(found), "time"
        part = os.read(fd, min(1 << 16, most + 1 - len(found)))
        if not part:
            return bytes(found), "by itself"
        found += part
    return bytes(found), "output"


_HELLO = "import threading\nthread = threading.Thread(target=print, args=('hello',))\nthread.start()\nthread.join()"


def check_sandbox() -> None:
    """Tries the sandbox: runs a program that prints a word from a thread of its own.

    Raises:
        SandboxError: this machine does not let us set up a sandbox; the message says which step failed.
    """
    if sys.platform != "linux":
        raise SandboxError(f"it needs Linux, this is {sys.platform}")
    run = run_program(_HELLO, "", SandboxLimits(wall_s=_SETUP_S))
    if run.output != b"hello\n":
        raise SandboxError(f"a program that prints hello printed {run.output!r} and ended with {run.status}")
