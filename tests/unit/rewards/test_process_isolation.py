"""``isolation: process``: the sandbox without namespaces. What it keeps from the code, and that all of it ends.

That it forges no verdict is tested with the strong sandbox's cheats, and what every kind of sandbox has in
``test_sandbox_escapes.py``.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quartet.extras.sandbox.kernel_filters import has_landlock
from quartet.extras.sandbox.run import (
    SandboxError,
    SandboxLimits,
    SolutionCheck,
    check_sandbox,
    remove_tree,
    run_program,
    run_tests,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="made of Linux' system calls")

LIMITS = SandboxLimits(
    wall_s=3.0,
    cpu_s=2,
    memory_bytes=256 << 20,
    disk_bytes=4 << 20,
    output_bytes=1 << 16,
    processes=8,
    isolation="process",
)
ADD = "def add(a, b):\n    return a + b\n"
TWO_TESTS = [SolutionCheck("assert add(2, 3) == 5"), SolutionCheck("assert add(10, 1) == 11")]


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the runs' own folders are made; a test that leaves anything there fails."""
    path = tmp_path / "folders"
    path.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(path))
    return path


@pytest.fixture(autouse=True)
def nothing_is_left(folders: Path) -> Iterator[None]:
    yield
    assert list(folders.iterdir()) == []


def says(source: str, text: str = "", limits: SandboxLimits = LIMITS) -> str:
    run = run_program(source, text, limits)
    assert (run.ended, run.status) == ("by itself", 0), run
    return run.output.decode()


def named(name: str) -> list[int]:
    """Processes that live and have called themselves so."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "comm").read_text().strip() == name:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def marked(source: str) -> tuple[str, str]:
    """The source, and the name by which the processes that it makes are found."""
    name = f"q{os.getpid()}.{time.monotonic_ns() % 10**6}"
    return f"import ctypes\nctypes.CDLL(None).prctl(15, {name.encode()!r})\n{source}", name


def refused(*attempts: str) -> None:
    """Each of the statements raises an OSError in the sandbox, and so the last line is all that is printed."""
    source = "import ctypes, fcntl, os, resource, signal, socket, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    source += "def call(*arguments):\n    if libc.syscall(*arguments) == -1: raise OSError(ctypes.get_errno(), '')\n"
    for attempt in attempts:
        source += f"try:\n    {attempt}\n    print({attempt!r}, 'worked')\nexcept OSError: pass\n"
    assert says(source + "print('end')") == "end\n"


# Honest code -----------------------------------------------------------------------------------------------


def test_the_machine_allows_it() -> None:
    check_sandbox("process")


def test_honest_code_runs_as_ever() -> None:
    assert says("print(sum(map(int, input().split())))", "1 2 3\n") == "6\n"
    assert says("import math, json, re, collections, ctypes, decimal; print(math.comb(5, 2))") == "10\n"
    assert says("open('x', 'w').write('y'); print(open('x').read())") == "y\n"
    assert says("import threading as t; t.Thread(target=lambda: print('late')).start()") == "late\n"
    assert says("import os; open('child', 'w').close(); os.system('ls')") == "child\n"
    assert says("import asyncio; asyncio.run(asyncio.sleep(0)); print(1)") == "1\n"
    run = run_program("print('half'); raise ValueError", "", LIMITS)
    assert (run.output, run.ended, run.status) == (b"half\n", "by itself", 1)


# Everything ends -------------------------------------------------------------------------------------------


def test_orphans_end_with_the_program() -> None:
    source, name = marked(
        "import os, time\nif os.fork() == 0:\n    if os.fork() == 0:\n        time.sleep(60)\n    os._exit(0)\n"
        "time.sleep(0.5)"
    )
    start = time.monotonic()
    assert run_program(source, "", LIMITS).ended == "by itself"
    assert time.monotonic() - start < 20 and named(name) == []


def test_the_names_by_which_processes_are_looked_for_do_find_them() -> None:
    """So that the test above sees what it looks for."""
    source, name = marked("import time; time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", source]) as process:
        deadline = time.monotonic() + 20
        while named(name) != [process.pid] and time.monotonic() < deadline:
            time.sleep(0.02)
        assert named(name) == [process.pid]
        process.kill()


def test_no_process_leaves_the_group() -> None:
    refused("os.setsid()", "os.setpgid(0, 0)", "os.setpgrp()", f"call({_number('setsid')})")


def test_nothing_is_left_of_its_files(folders: Path) -> None:
    """However deep, and whatever their permissions."""
    source = """
import os
for n in range(300):
    os.mkdir("d" * 100)
    os.chdir("d" * 100)
open("file", "w").close()
os.mkdir("closed")
os.symlink("/usr", "link")
os.chmod("closed", 0)
os.chmod(".", 0)
print("deep")
"""
    assert says(source) == "deep\n"
    assert list(folders.iterdir()) == []


def test_a_link_is_not_followed_where_files_are_removed(tmp_path: Path) -> None:
    kept, folder = tmp_path / "kept", tmp_path / "folder"
    kept.mkdir()
    (kept / "file").write_text("x")
    folder.mkdir()
    (folder / "link").symlink_to(kept)
    remove_tree(folder)
    assert (kept / "file").read_text() == "x" and not folder.exists()


# Limits ----------------------------------------------------------------------------------------------------


def test_the_size_of_a_file_is_limited() -> None:
    grow = (
        "file = open('one', 'wb')\ntry:\n    while True: file.write(b'x' * 100_000)\nexcept OSError:\n    print('full')"
    )
    assert says(grow) == "full\n"


# The rest of the machine -----------------------------------------------------------------------------------


def _number(call: str) -> int:
    from quartet.extras.sandbox import kernel_filters

    return kernel_filters._CALLS[call][kernel_filters._ARCHITECTURES[os.uname().machine][0]]


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        refused(
            f"socket.create_connection(('127.0.0.1', {port}))",
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
            "socket.socket(socket.AF_INET6)",
            "socket.socket(socket.AF_UNIX)",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
            "call(425, 8, ctypes.create_string_buffer(256))",  # io_uring_setup
        )


def test_no_other_process_can_be_harmed() -> None:
    """Neither the trainer nor the launcher: no signal on any way, no tracing, no limit."""
    for pid in (str(os.getpid()), "os.getppid()"):
        refused(
            f"os.kill({pid}, signal.SIGTERM)",
            f"os.killpg(os.getpgid({pid}), signal.SIGTERM)",
            f"os.close(os.pidfd_open({pid}))",
            f"resource.prlimit({pid}, resource.RLIMIT_CPU, (1, 1))",
            f"fcntl.fcntl(os.pipe()[0], 8, {pid})",
            f"call({_number('ptrace')}, 16, {pid}, 0, 0)",
            f"call({_number('tkill')}, {pid}, 15)",
            f"os.sched_setaffinity({pid}, {{0}})",
            f"os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
        )
    assert says("import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1)); print(1)") == "1\n", "but its own"


def test_nothing_of_the_trainers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its processes are another user's, or the kernel has Landlock."""
    monkeypatch.setenv("QUARTET_SECRET", "hunter2")
    assert says("import os; print('QUARTET_SECRET' in os.environ, len(os.environ) < 3)") == "False True\n"
    if os.geteuid() == 0 or has_landlock():
        files = [f"/proc/{pid}/{name}" for pid in (os.getpid(), os.getppid()) for name in ("environ", "mem", "maps")]
        refused(*(f"open({path!r}, 'rb').read(1)" for path in files))
        refused("open(f'/proc/{os.getppid()}/environ').read()", "os.open(f'/proc/{os.getppid()}/fd/1', os.O_WRONLY)")


def test_files_of_the_machine_are_not_there_where_the_kernel_has_landlock(tmp_path: Path) -> None:
    if not has_landlock():
        pytest.skip("this kernel has no Landlock")
    secret, target = tmp_path / "secret", tmp_path / "open-to-all"
    secret.write_text("token")
    target.mkdir()
    for path in (*tmp_path.parents, tmp_path, target, secret):
        if path.stat().st_uid == os.geteuid() and path.is_relative_to("/tmp/") and path != Path("/tmp"):
            path.chmod(0o777)
    refused(
        f"open({str(secret)!r}).read()",
        f"open({str(target / 'planted')!r}, 'w')",
        f"os.truncate({str(secret)!r}, 0)",
        "open('/etc/passwd').read()",
        "open('/dev/shm/planted', 'w')",
        "open('/tmp/planted', 'w')",
        "os.listdir('/')",
        "os.listdir('..')",
    )
    assert secret.read_text() == "token" and list(target.iterdir()) == []


def test_privileges_are_gone() -> None:
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(os.getuid() != 0 and os.getgroups() == [] or os.getuid(), libc.setuid(0))
print(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.chroot(b"."), libc.unshare(0x10000000))
"""
    first, second = says(source).splitlines()
    assert second == "-1 -1 -1"
    assert os.geteuid() != 0 or first == "True -1", "root becomes somebody else"


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone makes other users")
def test_two_runs_are_two_users() -> None:
    assert len({says("import os; print(os.getuid(), os.getgid())") for _ in range(4)}) > 1


def test_what_cannot_be_set_up_is_an_error_and_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(SandboxError, match="no folder"):
        run_tests(ADD, TWO_TESTS, LIMITS)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "nothing"))
    with pytest.raises(SandboxError, match="could not be started"):
        run_program("print(1)", "", LIMITS)
    assert [path.name for path in tmp_path.iterdir()] == ["folders"]
