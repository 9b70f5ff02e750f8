"""What a sandboxed process may ask of the kernel, and which files it may open. For processes without namespaces of
their own (:mod:`quartet.rewards.sandbox.launcher`); Linux on x86-64 and ARM64, standard library only.

Both hold for everything that the process starts, and cannot be taken back.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence

from quartet.rewards.sandbox.confine import DEVICES, checked, libc

# Calls by name with their numbers on (x86-64, ARM64) -------------------------------------------------------

_CALLS = {
    # Connections, and a way around this list.
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    # Signals to, memory, open files and scheduling of other processes.
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    # Ways out of the process group, which is ended as a whole.
    "setsid": (112, 157),
    "setpgid": (109, 154),
    # Keys of the user, and parts of the kernel that no honest program needs.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
}
_SIGNAL_OWNERS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to whom one likes, by way of a file
_SIGNAL_OWNER_CONTROLS = (0x8901, 0x8902, 0x5412)  # the same by ioctl, and typing into a terminal
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000  # x86-64's other numbering of calls

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
_PR_SET_SECCOMP, _FILTER_MODE = 22, 2

Instruction = tuple[int, int, int, int]


def refuse_calls() -> None:
    """The calls above fail with EPERM from here on. Needs ``no_new_privs``.

    Raises:
        OSError: the kernel takes no filter, or this is another processor.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"the numbers of system calls on {machine} are not known")
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in _program(*_ARCHITECTURES[machine]))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    checked(libc.prctl(_PR_SET_SECCOMP, _FILTER_MODE, program, 0, 0), "prctl (seccomp)")


def _program(column: int, architecture: int) -> list[Instruction]:
    """In the language of Berkeley packet filters: ``(operation, jump if true, jump if false, operand)``."""
    found: list[Instruction] = [
        (_LOAD, 0, 0, 4),
        (_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_IF_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _REFUSE),
    ]
    for numbers in _CALLS.values():
        found += [(_IF_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _REFUSE)]
    found += _by_argument((302, 261)[column], 0, (0,), then=_ALLOW, otherwise=_REFUSE)  # prlimit64: of itself alone
    found += _by_argument((72, 25)[column], 1, _SIGNAL_OWNERS, then=_REFUSE, otherwise=_ALLOW)  # fcntl
    found += _by_argument((16, 29)[column], 1, _SIGNAL_OWNER_CONTROLS, then=_REFUSE, otherwise=_ALLOW)  # ioctl
    return [*found, (_RETURN, 0, 0, _ALLOW)]


def _by_argument(call: int, place: int, values: Sequence[int], *, then: int, otherwise: int) -> list[Instruction]:
    """``then`` where the call's argument is among the values; its lower half, all that the kernel reads of these."""
    block: list[Instruction] = [(_LOAD, 0, 0, 16 + 8 * place)]
    for value in values:
        block += [(_IF_EQUAL, 0, 1, value), (_RETURN, 0, 0, then)]
    block.append((_RETURN, 0, 0, otherwise))
    return [(_IF_EQUAL, 0, len(block), call), *block]


# Files -----------------------------------------------------------------------------------------------------

_CREATE_RULES, _ADD_RULE, _RESTRICT = 444, 445, 446
_READ, _DEVICE = 0b1101, 0b110
_RIGHTS = ((1, (1 << 13) - 1), (2, 1 << 13), (3, 1 << 14), (5, 1 << 15))
"""Rights of files that the kernel knows from this version of Landlock on."""


def has_landlock() -> bool:
    return _version() >= 1


def _version() -> int:
    return int(libc.syscall(_CREATE_RULES, None, ctypes.c_size_t(0), 1))


def restrict_files(readable: Sequence[int], writable: str) -> None:
    """From here on nothing but what lies in ``readable`` (open folders) can be read, in ``writable`` changed. Needs
    ``no_new_privs``. Does nothing where the kernel has no Landlock.
    """
    if not has_landlock():
        return
    rights = sum(bits for since, bits in _RIGHTS if _version() >= since)
    wanted = struct.pack("=Q", rights)
    rules = libc.syscall(_CREATE_RULES, wanted, ctypes.c_size_t(len(wanted)), 0)
    checked(min(rules, 0), "landlock_create_ruleset")
    devices = [os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES]
    own = os.open(writable, os.O_PATH)
    allowed = {own: rights, **dict.fromkeys(readable, _READ), **dict.fromkeys(devices, _DEVICE)}
    for fd, bits in allowed.items():
        checked(libc.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", bits, fd), 0), "landlock_add_rule")
    checked(libc.syscall(_RESTRICT, rules, 0), "landlock_restrict_self")
    for fd in (*devices, own, rules):
        os.close(fd)
