"""Takes from this process, inside bubblewrap's namespaces, what code under test must not have; then runs it.

Run as a program by :mod:`quartet.extras.sandbox.run`, on Linux (x86-64, ARM64), with the standard library alone. The
job comes as JSON on descriptor ``argv[1]``. Descriptor ``argv[2]`` gets ``ok`` once the code is about to start, or what
went wrong, and is closed before it does. What is taken cannot be had back, by nothing that the process starts.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterator, Sequence

from quartet.extras.sandbox import child

_NUM_FILES = 64  # open at a time
_PR_SET_PDEATHSIG = 1
_CAPABILITY_VERSION_3 = 0x20080522
_MS_NOSUID, _MS_NODEV = 0x2, 0x4

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    job_fd, status_fd = map(int, sys.argv[1:])
    del sys.argv[1:]  # the code is started without arguments
    with open(job_fd, encoding="utf-8") as file:
        job = json.load(file)
    try:
        _become_init(job["limits"]["disk_bytes"])
        # The first process is counted, too, where it is of the same user.
        others = 0 if os.geteuid() == 0 else 1
        _drop_privileges(job["user"])
        _limit(job["limits"], others)
        _refuse_calls()
    except OSError as error:
        os.write(status_fd, str(error).encode())
        os._exit(1)
    # bubblewrap's complaints, too, went to whoever waits for the sandbox.
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    os.write(status_fd, b"ok")
    os.close(status_fd)
    child.ROLES[job["role"]](job)


def _become_init(disk_bytes: int) -> None:
    """Returns in a child. This process, the first of its namespace, ends when bubblewrap or the child does, and then
    the kernel ends every other one in there.
    """
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl (end with parent)")
    # Files are limited in number, too, which bubblewrap cannot do: each takes some of the kernel's memory.
    options = f"size={disk_bytes},nr_inodes=4096,mode=1777".encode()
    mounted = _libc.mount(b"tmpfs", b"/tmp", b"tmpfs", ctypes.c_ulong(_MS_NOSUID | _MS_NODEV), options)
    _check(mounted, "mount /tmp")
    os.chdir("/tmp")
    worker = os.fork()
    while worker:
        pid, status = os.wait()
        if pid == worker:
            os._exit(abs(os.waitstatus_to_exitcode(status)))


def _drop_privileges(user: int) -> None:
    """Makes root ``user``; no capability is kept, and bubblewrap lets no program bring one."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _limit(limits: dict[str, int], others: int) -> None:
    """Limits this process and what it starts.

    Args:
        others: processes that the kernel counts together with these.
    """
    for which, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
        (resource.RLIMIT_NOFILE, _NUM_FILES),
        (resource.RLIMIT_NPROC, limits["processes"] + others),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
    ):
        resource.setrlimit(which, (most, most))


# Refused system calls, by name, each with its numbers on x86-64 and ARM64 -----------------------------------

_NONE = 0xFFFF  # there is no such call


def _by_name(*rows: str) -> dict[str, tuple[int, int]]:
    calls = [call.split() for row in rows for call in row.split(", ")]
    return {name: (int(x86), _NONE if arm == "-" else int(arm)) for name, x86, arm in calls}


_CALLS = _by_name(
    # Connections. Pairs of connected sockets remain; they may not be led elsewhere, by an address or by a file handed
    # over.
    "socket 41 198, connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242, sendmsg 46 211",
    "sendmmsg 307 269",
    # Memory that no limit of a process counts, and that outlives it; io_setup is counted machine-wide.
    "shmget 29 194, shmctl 31 195, shmat 30 196, shmdt 67 197, semget 64 190, semctl 66 191, semtimedop 220 192",
    "semop 65 193, msgget 68 186, msgctl 71 187, msgrcv 70 188, msgsnd 69 189, mq_open 240 180, mq_unlink 241 181",
    "mq_timedsend 242 182, mq_timedreceive 243 183, mq_notify 244 184, mq_getsetattr 245 185",
    "memfd_create 319 279, io_setup 206 0",
    # Signals to, memory, open files and scheduling of other processes.
    "kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240",
    "ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, migrate_pages 256 238",
    "move_pages 279 239, sched_setparam 142 118, sched_setscheduler 144 119, sched_setattr 314 274",
    "sched_setaffinity 203 122, setpriority 141 140, ioprio_set 251 30",
    # Ways out of the process group.
    "setsid 112 157, setpgid 109 154",
    # Namespaces, mounts and other roots.
    "unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51",
    "name_to_handle_at 303 264, open_by_handle_at 304 265",
    # Keys of the user, and parts of the kernel that no honest program needs.
    "add_key 248 217, request_key 249 218, keyctl 250 219, bpf 321 280, perf_event_open 298 241",
    "userfaultfd 323 282, fanotify_init 300 262, personality 135 92, modify_ldt 154 -, iopl 172 -, ioperm 173 -",
    "uselib 134 -, lookup_dcookie 212 18, syslog 103 116, vhangup 153 58, acct 163 89, quotactl 179 60",
    "swapon 167 224, swapoff 168 225, reboot 169 142, kexec_load 246 104, kexec_file_load 320 294",
    "init_module 175 105, finit_module 313 273, delete_module 176 106, sethostname 170 161, setdomainname 171 162",
    "settimeofday 164 170, adjtimex 159 171, clock_settime 227 112, clock_adjtime 305 266",
)
_FIRST_COMMON = 424
"""From this number on calls have one number everywhere. New ones come with every kernel: those below are allowed, the
others do not exist, as on an older kernel. Among these are io_uring, pidfd, clone3, memfd_secret and those that mount.
"""
_COMMON = (
    436,  # close_range
    437,  # openat2
    439,  # faccessat2
    441,  # epoll_pwait2
    *(444, 445, 446),  # Landlock, which only takes away
    449,  # futex_waitv
    451,  # cachestat
    452,  # fchmodat2
    *(454, 455, 456),  # futex_wake, futex_wait, futex_requeue
)
_NEW_NAMESPACES = 0x7E020000  # flags of clone
_UNIX = (1,)
_SIGNAL_OWNERS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to whom one likes, by way of a file
_PIPE_SIZE = (1031,)  # F_SETPIPE_SZ: memory of the kernel, as is what follows
_BUFFER_SIZES = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE
_SIGNAL_OWNER_CONTROLS = (0x8901, 0x8902, 0x5412, 0x541C)  # the same by ioctl, and typing into a terminal
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000  # x86-64's other numbering of calls

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _MISSING, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
_PR_SET_SECCOMP, _FILTER_MODE = 22, 2

Instruction = tuple[int, int, int, int]


def _refuse_calls() -> None:
    """Makes the calls above fail with EPERM or ENOSYS from here on. Needs ``no_new_privs``.

    Raises:
        OSError: the kernel takes no filter, or this is another processor.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"the numbers of system calls on {machine} are not known")
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in _program(*_ARCHITECTURES[machine]))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(_PR_SET_SECCOMP, _FILTER_MODE, program, 0, 0), "prctl (seccomp)")


def _program(column: int, architecture: int) -> list[Instruction]:
    """Writes the filter for Berkeley's packet filters: ``(operation, jump if true, jump if false, operand)``."""
    found: list[Instruction] = [
        (_LOAD, 0, 0, 4),
        (_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),  # among others the calls of 32-bit programs
        (_LOAD, 0, 0, 0),
        (_IF_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _REFUSE),
    ]
    for number in _COMMON:
        found += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    found += [(_IF_AT_LEAST, 0, 1, _FIRST_COMMON), (_RETURN, 0, 0, _MISSING)]
    for numbers in _CALLS.values():
        found += [(_IF_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _REFUSE)]
    found += _by_argument((302, 261)[column], 0, (0,), then=_ALLOW, otherwise=_REFUSE)  # prlimit64: of itself alone
    found += _by_argument((72, 25)[column], 1, _SIGNAL_OWNERS + _PIPE_SIZE, then=_REFUSE, otherwise=_ALLOW)  # fcntl
    found += _by_argument((54, 208)[column], 2, _BUFFER_SIZES, then=_REFUSE, otherwise=_ALLOW)  # setsockopt
    found += _by_argument((16, 29)[column], 1, _SIGNAL_OWNER_CONTROLS, then=_REFUSE, otherwise=_ALLOW)  # ioctl
    found += _by_argument((53, 199)[column], 0, _UNIX, then=_ALLOW, otherwise=_REFUSE)  # socketpair
    found += _where((56, 220)[column], [_argument(0), (_IF_ANY_BIT, 0, 1, _NEW_NAMESPACES), (_RETURN, 0, 0, _REFUSE)])
    found += _where((44, 206)[column], [*_unless_zero(_argument(4)), *_unless_zero(_argument(4, upper=True))])  # sendto
    return [*found, (_RETURN, 0, 0, _ALLOW)]


def _argument(place: int, *, upper: bool = False) -> Instruction:
    """Loads half of an argument; of most the lower half is all that the kernel reads."""
    return (_LOAD, 0, 0, 16 + 8 * place + 4 * upper)


def _where(call: int, block: list[Instruction]) -> list[Instruction]:
    """Does the block for this call alone, which it allows in the end."""
    block = [*block, (_RETURN, 0, 0, _ALLOW)]
    return [(_IF_EQUAL, 0, len(block), call), *block]


def _unless_zero(load: Instruction) -> Iterator[Instruction]:
    yield from (load, (_IF_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _REFUSE))


def _by_argument(call: int, place: int, values: Sequence[int], *, then: int, otherwise: int) -> list[Instruction]:
    """Makes instructions that return ``then`` where the call's argument is among the values, else ``otherwise``."""
    block = [_argument(place)]
    for value in values:
        block += [(_IF_EQUAL, 0, 1, value), (_RETURN, 0, 0, then)]
    return _where(call, [*block, (_RETURN, 0, 0, otherwise)])


if __name__ == "__main__":
    main()
