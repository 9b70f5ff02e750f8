"""Runs untrusted code, on Linux: a program on an input, or a solution against tests.

Each run is a process of its own in namespaces of its own (see ``launcher.py``) and gone with everything it started when
it is over. They are made by bubblewrap where that is installed and works, else by the launcher itself. ``isolation:
process`` does without namespaces, where a machine refuses them, and is weaker. Tests run in a
second sandbox, so that the code under test shares no memory with what judges it: verdicts come over a pipe that it does
not have, and no exit status of it is taken for success.

These functions wait; call them in threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from quartet.extras.sandbox.child import FAILED, MAX_REASON, REFUSED, UNASKED, UNCHECKED

_LAUNCHER = Path(__file__).with_name("launcher.py")
_SETUP_S = 60.0
"""Most seconds until a sandbox stands; it takes some hundredths of one where the machine is not busy."""

_FIRST_USER, _NUM_USERS = 61184, 4336
"""Numbers that systems keep for users who own no files (systemd's dynamic ones)."""

# As in config.py, which needs libraries; the other modules do with Python alone.
Isolation = Literal["namespaces", "process"]
Confinement = Literal["bubblewrap", "namespaces", "process"]
EndReason = Literal["by itself", "time", "output"]


class SandboxError(Exception):
    """The sandbox could not be set up; the code was not run."""


class NothingTested(Exception):
    """The tests passed without a check, and without a question to the code: they would pass any code."""


@dataclass(frozen=True)
class SandboxLimits:
    """What one run may use: wall-clock seconds, bytes of output that is read, bytes written to disk (in all, or of each
    file with ``isolation`` process); of each process its processor seconds and address space; processes and threads at
    a time.
    """

    wall_s: float = 5.0
    output_bytes: int = 1 << 18
    cpu_s: int = 5
    memory_bytes: int = 1 << 29
    disk_bytes: int = 1 << 24
    processes: int = 16
    isolation: Isolation = "namespaces"

    def of_process(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("cpu_s", "memory_bytes", "disk_bytes", "processes")}


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


@dataclass(frozen=True)
class SandboxVerdict:
    """Whether a test passed, and if not, why not, partly in words of the code under test. ``is_refused``: what the code
    gave, or was given, cannot be judged.
    """

    passed: bool
    reason: str = ""
    is_refused: bool = False


@dataclass(frozen=True)
class Tool:
    """What makes the sandbox: its name in the launcher, bubblewrap's path, and how to tell users of it."""

    confinement: Confinement
    told: str
    bwrap: str = ""


_PROCESS = Tool("process", "limits and refused system calls alone (isolation: process)")


@functools.cache
def tool_for_namespaces() -> Tool:
    """bubblewrap where it is installed and a trial shows that it works on this machine, else the launcher itself."""
    why = "bubblewrap is not installed"
    if path := shutil.which("bwrap"):
        tool = Tool("bubblewrap", f"bubblewrap ({path})", path)
        try:
            _check_hello("namespaces", tool)
            return tool
        except SandboxError as error:
            why = f"{path} does not work here: {error}"
    return Tool("namespaces", f"Quartet's own namespaces ({why})")


class _Sandboxed:
    """One sandboxed process, gone with all it started when its ``with`` is over.

    Args:
        job: what the role needs; its entries ``…_fd`` are open there, too.
        stdout: a descriptor, or one of subprocess' constants.
    """

    def __init__(
        self, role: str, job: dict[str, Any], limits: SandboxLimits, stdout: int, tool: Tool | None = None
    ) -> None:
        tool = tool or (_PROCESS if limits.isolation == "process" else tool_for_namespaces())
        # For root a user id that no other user and no other run has.
        self._user = _FIRST_USER + secrets.randbelow(_NUM_USERS) if os.geteuid() == 0 else os.geteuid()
        self._folder = _own_folder(self._user) if tool.confinement == "process" else None
        self._status, status_fd = os.pipe()
        job = {
            **job,
            "role": role,
            "confinement": tool.confinement,
            "bwrap": tool.bwrap,
            "limits": limits.of_process(),
            "status_fd": status_fd,
            "mount_point": tempfile.gettempdir(),
            "folder": str(self._folder),
            "user": self._user,
            "trainer": os.geteuid(),
        }
        job_fd = _memory_file(json.dumps(job).encode())
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(_LAUNCHER)],
                stdin=job_fd,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
                pass_fds=[fd for name, fd in job.items() if name.endswith("_fd")],
            )
        except OSError as error:
            os.close(self._status)
            self._remove_folder()
            raise SandboxError(f"the interpreter could not be started: {error}") from error
        finally:
            os.close(job_fd)
            os.close(status_fd)

    def _remove_folder(self) -> None:
        if self._folder is not None:
            remove_tree(self._folder)

    def wait_until_ready(self) -> None:
        said, ended = _read(self._status, time.monotonic() + _SETUP_S, 1 << 16)
        if said != b"ok":
            slow = f"nothing was said within {_SETUP_S} s" if ended == "time" else "its process ended"
            raise SandboxError(said.decode(errors="replace") or slow)

    def __enter__(self) -> _Sandboxed:
        return self

    def __exit__(self, *_: object) -> None:
        """Kills what is left, and returns when all of it is gone."""
        self.process.terminate()
        try:
            self.process.wait(_SETUP_S)
        except subprocess.TimeoutExpired:  # It was not yet far enough to pass the signal on, or is stuck in the kernel.
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._status)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._remove_folder()


def _own_folder(user: int) -> Path:
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="quartet-code-"))
        if user != os.geteuid():
            os.chown(folder, user, user)
    except OSError as error:
        if folder is not None:
            remove_tree(folder)
        raise SandboxError(f"no folder for its files could be made: {error}") from error
    return folder


def _memory_file(content: bytes) -> int:
    """A descriptor of a file in memory that can no longer be changed."""
    fd = os.memfd_create("quartet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    return fd


def run_program(source: str, text: str, limits: SandboxLimits, tool: Tool | None = None) -> ProgramRun:
    """Runs ``source`` as a program with ``text`` on its standard input.

    Args:
        tool: what to make the sandbox with; None: what this machine has.

    Raises:
        SandboxError: no sandbox could be set up.
    """
    input_fd = _memory_file(text.encode("utf-8", "surrogatepass"))
    try:
        job = {"source": source, "input_fd": input_fd}
        program = _Sandboxed("program", job, limits, subprocess.PIPE, tool)
    finally:
        os.close(input_fd)
    with program:
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


def run_tests(source: str, tests: Sequence[SolutionCheck], limits: SandboxLimits) -> list[bool]:
    """Whether each of the tests that count passed: :func:`judge` without the reasons."""
    return [verdict.passed for verdict in judge(source, tests, limits)]


def judge(source: str, tests: Sequence[SolutionCheck], limits: SandboxLimits) -> list[SandboxVerdict]:
    """A verdict on each of the tests that count, all within ``limits.wall_s``; what did not come to its turn failed.

    Tests in which no check at all was executed have not passed: they may loop over what the code returned.

    Raises:
        SandboxError: no sandbox could be set up.
        NothingTested: nothing was executed that depends on the code.
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
    lines = said.split(b"\n")[:-1][:num]
    if len(lines) == num and all(line in (UNASKED, UNCHECKED) for line in lines):
        if UNCHECKED not in lines:
            raise NothingTested("none of it executes a check")
        lines = [REFUSED + b'"no check was executed"'] * num
    found = [_verdict(line) for line in lines]
    missing = f"no verdict within {limits.wall_s} s" if ended == "time" else "the tests ended before this one"
    return found + [SandboxVerdict(False, missing)] * (num - len(found))


def _verdict(line: bytes) -> SandboxVerdict:
    is_failure = line[:1] in (FAILED, REFUSED)
    return SandboxVerdict(False, json.loads(line[1:]), line[:1] == REFUSED) if is_failure else SandboxVerdict(True)


def _read(fd: int, deadline: float, most: int) -> tuple[bytes, EndReason]:
    """Everything up to the end of the file, the deadline or one byte more than ``most``."""
    found = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while len(found) <= most:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return bytes(found), "time"
            part = os.read(fd, min(1 << 16, most + 1 - len(found)))
            if not part:
                return bytes(found), "by itself"
            found += part
    return bytes(found), "output"


def remove_tree(folder: Path) -> None:
    """Deletes a folder however deep and whatever the permissions of what is in it. What cannot be deleted stays.

    Subfolders are moved up before their folder goes, so that no path grows long and nothing is recursive.
    """
    pending = [folder]
    numbers = itertools.count()
    with contextlib.suppress(OSError):
        while pending:
            current = pending[-1]
            os.chmod(current, 0o700)
            for name in os.listdir(current):
                path = current / name
                if path.is_symlink() or not path.is_dir():
                    path.unlink()
                    continue
                os.chmod(path, 0o700)  # or it could not be moved
                pending.insert(0, path.rename(folder.with_name(f"{folder.name}.{next(numbers)}")))
            os.rmdir(pending.pop())


_HELLO = "import threading\nthread = threading.Thread(target=print, args=('hello',))\nthread.start()\nthread.join()"


def check_sandbox(isolation: Isolation = "namespaces") -> str:
    """Tries the sandbox, and returns in words what makes it.

    Raises:
        SandboxError: this machine does not let us set up a sandbox; the message says which step failed.
    """
    if sys.platform != "linux":
        raise SandboxError(f"it needs Linux, this is {sys.platform}")
    tool = _PROCESS if isolation == "process" else tool_for_namespaces()
    _check_hello(isolation, tool)
    return tool.told


def _check_hello(isolation: Isolation, tool: Tool) -> None:
    """Runs a program that prints a word from a thread of its own."""
    run = run_program(_HELLO, "", SandboxLimits(wall_s=_SETUP_S, isolation=isolation), tool)
    if run.output != b"hello\n":
        raise SandboxError(f"a program that prints hello printed {run.output!r} and ended with {run.status}")
