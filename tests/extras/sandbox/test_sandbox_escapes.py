"""What holds in every kind of sandbox: limits, and what code must not get from the kernel (namespaces, sockets, …)."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quartet.extras.sandbox import run as sandbox
from quartet.extras.sandbox.run import (
    SandboxError,
    SandboxLimits,
    SolutionCheck,
    check_sandbox,
    run_program,
)
from sandboxes import needs_sandbox, run_tests

pytestmark = needs_sandbox

LIMITS = SandboxLimits(wall_s=20.0, memory_bytes=256 << 20, disk_bytes=4 << 20, processes=8)
MACHINE = {"x86_64": 0, "aarch64": 1}.get(platform.machine(), 0)

CLONE = (56, 220)[MACHINE]
# Numbers on x86-64 and ARM64, as the kernel's tables have them.
REFUSED = {
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "shmdt": (67, 197),
    "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "mq_timedsend": (242, 182), "mq_getsetattr": (245, 185),
    "memfd_create": (319, 279), "io_setup": (206, 0),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_by_handle_at": (304, 265), "personality": (135, 92),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "userfaultfd": (323, 282), "bpf": (321, 280),
    "perf_event_open": (298, 241), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "socket": (41, 198),
    "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "sendmsg": (46, 211), "setsid": (112, 157),
    "fanotify_init": (300, 262), "swapon": (167, 224), "reboot": (169, 142), "clock_settime": (227, 112),
}  # fmt: skip
MISSING = {
    "io_uring_setup": 425, "io_uring_enter": 426, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432,
    "pidfd_open": 434, "clone3": 435, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442,
    "memfd_secret": 447, "process_mrelease": 448, "one of a later kernel": 500,
}  # fmt: skip
BY_PYTHON = [
    "os.memfd_create('x')",
    "multiprocessing.shared_memory.SharedMemory(create=True, size=1 << 28)",
    "open('/dev/shm/planted', 'w')",
    "open('/dev/mqueue/planted', 'w')",
    "open('/proc/sys/kernel/shmmax', 'w')",
    "nonzero(libc.shmget(0x51, 1 << 20, 0o1600))",
    "nonzero(libc.semget(0x51, 1, 0o1600))",
    "nonzero(libc.msgget(0x51, 0o1600))",
    *(f"nonzero(libc.unshare({1 << bit}))" for bit in (7, 17, 25, 26, 27, 28, 29, 30)),
    *(f"nonzero(libc.syscall({CLONE}, {1 << bit} | 17, 0, 0, 0, 0))" for bit in (17, 25, 26, 27, 28, 29, 30)),
    "os.kill(os.getppid(), 0)",
    "os.kill(-1, 0)",
    "os.killpg(0, 0)",
    "os.setsid()",
    "os.chroot('.')",
    "os.setpriority(os.PRIO_PROCESS, 0, 5)",
    "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (1, 1))",
    "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "resource.setrlimit(resource.RLIMIT_NPROC, (-1, -1))",
    *(f"socket.socket({family}, {kind})" for family in (1, 2, 10, 16, 17, 38, 40) for kind in (1, 2, 3)),
    "socket.socketpair(socket.AF_INET)",
    "pair()[0].connect(ADDRESS)",
    "pair()[0].sendto(b'x', ADDRESS)",
    "pair()[0].sendmsg([b'x'], [], 0, ADDRESS)",
    "pair()[0].bind('\\0mine')",
    "socket.send_fds(pair()[0], [b'x'], [0])",
    *(f"pair()[0].setsockopt(socket.SOL_SOCKET, {size}, 1 << 20)" for size in (7, 8, 32, 33)),
    "fcntl.fcntl(os.pipe()[0], fcntl.F_SETPIPE_SZ, 1 << 20)",
    "open('large', 'wb').write(b'x' * (5 << 20))",
    "open('/usr/planted', 'w')",
    "os.setuid(0) if os.getuid() else os.setgroups([0])",
]
PROGRAM = """
import ctypes, errno, fcntl, multiprocessing.shared_memory, os, resource, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def nonzero(result):
    if result == -1: raise OSError(ctypes.get_errno(), "")
def pair():
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
for name, number in REFUSED.items():
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0, 0)
    if (result, ctypes.get_errno()) != (-1, errno.EPERM): print(name, result, ctypes.get_errno())
for name, number in MISSING.items():
    result = libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0, 0)
    if (result, ctypes.get_errno()) != (-1, errno.ENOSYS): print(name, result, ctypes.get_errno())
for attempt in ATTEMPTS:
    pid = os.getpid()
    try:
        eval(attempt)
        if os.getpid() != pid: os._exit(0)
        print(attempt, "worked")
    except (OSError, ValueError): pass
print("end")
"""


def says(source: str, limits: SandboxLimits = LIMITS) -> str:
    run = run_program(source, "", limits)
    assert (run.ended, run.status) == ("by itself", 0), run
    return run.output.decode()


def planted() -> list[str]:
    """What of the code's shared memory, semaphores and queues is on this machine; their key is 0x51."""
    tables = [Path(f"/proc/sysvipc/{name}") for name in ("shm", "sem", "msg")]
    found = [line for path in tables if path.exists() for line in path.read_text().splitlines()]
    folders = [Path(path) for path in ("/dev/shm", "/dev/mqueue") if Path(path).is_dir()]
    named = [path.name for folder in folders for path in folder.iterdir() if path.name == "planted"]
    return [line for line in found if line.split()[0] == "81"] + named


def named(name: str) -> list[str]:
    """Processes that live and have called themselves so."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            found += [entry.name] if entry.name.isdigit() and (entry / "comm").read_text().strip() == name else []
    return found


def test_no_call_leads_out() -> None:
    name = f"\0quartet-escape-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outside:
        outside.bind(name)
        outside.setblocking(False)
        source = f"ADDRESS, ATTEMPTS, MISSING = {name!r}, {BY_PYTHON!r}, {MISSING!r}\n"
        source += f"REFUSED = { ({call: numbers[MACHINE] for call, numbers in REFUSED.items()})!r}\n{PROGRAM}"
        assert says(source) == "end\n"
        with pytest.raises(BlockingIOError):
            outside.recv(1)
    assert planted() == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other numberings of calls exist on x86-64")
def test_other_numberings_of_calls_are_no_way_around() -> None:
    source = """
import ctypes, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall(ctypes.c_long(0x40000000 | 39)), ctypes.get_errno())
child = os.fork()
if child == 0:
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20; int 0x80; ret
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
    os._exit(0)
print(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""
    first, second = says(source).splitlines()
    assert first == "-1 1" and second in ("31", "11"), "ended by the filter, or by a kernel without such calls"


def test_memory_is_not_had_another_way() -> None:
    """Two GB of System V memory with a limit of 256 MB, and other kinds that no process' size shows."""
    source = """
import ctypes, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
got = 0
for _ in range(64):
    if libc.shmget(0, 32 << 20, 0o1600) != -1: got += 32 << 20
kept = []
try:
    for _ in range(64): kept.append(mmap.mmap(-1, 32 << 20))
except (OSError, MemoryError): pass
print(got + len(kept) * (32 << 20) <= 256 << 20)
"""
    assert says(source) == "True\n"


def test_files_are_limited_in_number() -> None:
    source = "n = 0\ntry:\n    while n < 9999:\n        open(str(n), 'w').close()\n        n += 1\n"
    source += "except OSError: pass\n"
    assert 4000 < int(says(source + "print(n)")) < 4200


def test_what_honest_programs_need_is_there() -> None:
    source = """
import asyncio, concurrent.futures, os, socket, subprocess, tempfile, threading
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    print(list(pool.map(len, ["a", "bc"])))
async def both(): return await asyncio.gather(asyncio.sleep(0, 1), asyncio.sleep(0, 2))
print(asyncio.run(both()))
print(subprocess.run(["/bin/sh", "-c", "echo sub"], capture_output=True, text=True).stdout.strip())
with tempfile.TemporaryFile() as file: print(file.write(b"abc"))
a, b = socket.socketpair()
a.sendall(b"over"); print(b.recv(9))
pid = os.fork()
if pid == 0: os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert says(source) == "[1, 2]\n[1, 2]\nsub\n3\nb'over'\n7\n"
    tests = [SolutionCheck("assert f(1) == 2"), SolutionCheck("assert f(1) == 1")]
    assert run_tests("def f(n): return n + 1", tests, LIMITS) == [True, False]


def test_everything_ends() -> None:
    name = f"qe{os.getpid() % 10**6}"
    bomb = f"import ctypes, os\nctypes.CDLL(None).prctl(15, {name.encode()!r})\nopen('left', 'w').write('x' * 1000)\n"
    bomb += "while True:\n    try: os.fork()\n    except OSError: pass"
    assert run_program(bomb, "", replace(LIMITS, wall_s=1.0)).ended == "time"
    assert eventually(lambda: not named(name))


def test_everything_ends_with_a_trainer_that_is_killed() -> None:
    name = f"qk{os.getpid() % 10**6}"
    spin = f"import ctypes, os\nctypes.CDLL(None).prctl(15, {name.encode()!r})\nos.fork()\nwhile True: pass"
    trainer = f"""
from quartet.extras.sandbox.run import SandboxLimits, run_program
run_program({spin!r}, "", {LIMITS!r})
"""
    with subprocess.Popen([sys.executable, "-c", trainer]) as process:
        assert eventually(lambda: len(named(name)) == 2)
        process.kill()
    assert eventually(lambda: not named(name))


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def test_the_number_of_processes_is_limited() -> None:
    source = (
        "import os, time\nn = 1\ntry:\n    while True:\n        if os.fork() == 0: time.sleep(60)\n        n += 1\n"
    )
    found = int(says(source + "except BlockingIOError:\n    os.write(1, b'%d' % n)\n    os._exit(0)\n"))
    assert found == LIMITS.processes


def test_time_is_limited() -> None:
    short = replace(LIMITS, wall_s=0.5)
    start = time.monotonic()
    assert run_program("import time; time.sleep(1e6)", "", short).ended == "time"
    ignore = "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    ignore += "    except (OSError, ValueError): pass\n"
    assert run_program(ignore + "while True: pass", "", short).ended == "time"
    assert time.monotonic() - start < 20


def test_output_is_limited() -> None:
    start = time.monotonic()
    run = run_program("import sys\nwhile True: sys.stdout.write('x' * 10**6)", "", LIMITS)
    assert run.ended == "output" and len(run.output) == LIMITS.output_bytes + 1
    assert time.monotonic() - start < 10
    assert len(says(f"print('x' * {LIMITS.output_bytes - 1})")) == LIMITS.output_bytes, "so much is allowed"
    assert says("import os\nfor _ in range(1000): os.write(2, b'x' * 10**6)\nprint('done')") == "done\n"


def test_memory_is_limited() -> None:
    run = run_program("x = bytearray(10**9)", "", LIMITS)
    assert run.ended == "by itself" and run.status != 0
    assert says("x = bytearray(10**8); print(len(x))", LIMITS) == "100000000\n"


def test_no_sandbox_is_an_error_and_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    test = [SolutionCheck("assert f(1) == 1")]
    monkeypatch.setattr(sandbox, "_bubblewrap", sandbox._bubblewrap.__wrapped__)
    for found, told in ((None, "bwrap. is not installed"), ("/bin/false", "its process ended")):
        monkeypatch.setattr(sandbox.shutil, "which", lambda name, found=found: found)
        for attempt in (check_sandbox, lambda: run_program("", "", LIMITS), lambda: run_tests("", test, LIMITS)):
            with pytest.raises(SandboxError, match=told):
                attempt()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_it_works_without_being_root() -> None:
    source = Path(__file__).parents[3] / "src"
    python = next((p for p in (sys.executable, "/usr/bin/python3.11") if _open_to_all(Path(p))), None)
    if python is None or not _open_to_all(source):
        pytest.skip("another user can run no interpreter here, or not read the sources")
    code = f'''
import ctypes, os, sys, types
sys.modules["quartet"] = package = types.ModuleType("quartet")  # its libraries may be missing here
package.__path__ = [{str(source / "quartet")!r}]
from quartet.extras.sandbox.run import SandboxLimits, SolutionCheck, judge, run_program
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
ctypes.CDLL(None).prctl(4, 1)  # as open to others of its user as a process that was never root
limits = SandboxLimits(wall_s=20)
print(run_program("import os; print(os.getuid(), os.path.exists('/proc'))", "", limits).output)
both = [SolutionCheck("assert f() == 1"), SolutionCheck("assert f() == 2")]
print([not failure for failure in judge("def f(): return 1", both, limits)])
bomb = "import os\\nwhile True:\\n    try: os.fork()\\n    except OSError: pass"
print(run_program(bomb, "", SandboxLimits(wall_s=0.5)).ended)
kill = f"import os\\ntry: os.kill({{os.getpid()}}, 9)\\nexcept OSError: print('refused')"
print(run_program(kill, "", limits).output)
forge = f"""
import os
def f():
    for fd in range(64):
        try: os.write(os.open("/proc/{{os.getpid()}}/fd/" + str(fd), os.O_WRONLY | os.O_NONBLOCK), b"PP")
        except OSError: pass
"""
print([not failure for failure in judge(forge, both, limits)])
'''
    done = subprocess.run([python, "-B", "-c", code], capture_output=True, text=True, timeout=120, cwd="/")
    told = ["b'65534 False\\n'", "[True, False]", "time", "b'refused\\n'", "[False, False]"]
    assert done.stdout.splitlines() == told, done.stderr


def _open_to_all(path: Path) -> bool:
    return path.exists() and all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents)
