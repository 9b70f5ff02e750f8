"""Takes everything away from this process that code under test must not have. Linux; standard library only.

In the order of the calls, where the kernel allows all of it: namespaces of its own for users, processes, network,
mounts, System V objects and names; a root directory in memory that holds the system's programs read-only, an empty
``/tmp``, four harmless devices and no ``/proc``; no capability, now or later; limits on memory, processor time, files
and processes.
"""

from __future__ import annotations

import _socket  # without what the module socket needs
import ctypes
import errno
import os
import resource
import signal
from collections.abc import Sequence
from pathlib import Path

NOBODY = 65534
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_NEW_NAMESPACES = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWNET
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_READ_ONLY = 0x1 | 0x2 | 0x4  # and without set-user-id programs and devices
_CAPABILITY_VERSION_3 = 0x20080522
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64")
_NUM_FILES = 64  # open at a time
DEVICES = ("null", "zero", "random", "urandom")

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def enter_namespaces() -> None:
    checked(libc.unshare(_NEW_NAMESPACES), "unshare (new user, process, network and mount namespaces)")


def write_id_maps(pid: int) -> None:
    """Which users exist in the namespace of ``pid``: the one that runs this, and for root also ``nobody``."""
    for name, own in (("uid", os.geteuid()), ("gid", os.getegid())):
        lines = f"{own} {own} 1\n"
        if os.geteuid() == 0:
            lines += f"{NOBODY} {NOBODY} 1\n"
        elif name == "gid":
            Path(f"/proc/{pid}/setgroups").write_text("deny")
        Path(f"/proc/{pid}/{name}_map").write_text(lines)  # in one call: the kernel takes a map whole or not at all


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    arguments = [value.encode() if value is not None else None for value in (source, target, kind)]
    data = options.encode() if options is not None else None
    checked(libc.mount(*arguments, ctypes.c_ulong(flags), data), f"mount {target}")


def change_root(mount_point: str, prefixes: Sequence[str], disk_bytes: int) -> None:
    """A root directory of its own, at most ``disk_bytes`` large, and ``/tmp`` in it the working directory.

    Args:
        mount_point: any folder; it is covered for this process alone.
        prefixes: folders of the interpreter, shown read-only beside those of the system.
    """
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    # Opened before the mount point is covered, which may hold some of them.
    sources = {path: os.open(path, os.O_PATH) for path in visible(prefixes)}
    devices = {f"/dev/{name}": os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES}
    mount_memory(mount_point, disk_bytes, "0755")
    for path, fd in sources.items():
        os.makedirs(mount_point + path, exist_ok=True)
        _mount(f"/proc/self/fd/{fd}", mount_point + path, None, _MS_BIND | _MS_REC)
        _make_read_only(mount_point + path)
    os.makedirs(f"{mount_point}/dev")
    for path, fd in devices.items():
        os.close(os.open(mount_point + path, os.O_CREAT | os.O_WRONLY, 0o600))
        _mount(f"/proc/self/fd/{fd}", mount_point + path, None, _MS_BIND)
    for path, link_target in links():
        os.symlink(link_target, mount_point + path)
    for fd in (*sources.values(), *devices.values()):
        os.close(fd)
    os.mkdir(f"{mount_point}/tmp")
    os.chmod(f"{mount_point}/tmp", 0o777)
    os.chdir(mount_point)
    checked(libc.pivot_root(b".", b"."), "pivot_root")
    checked(libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/tmp")


def mount_memory(target: str, disk_bytes: int, mode: str) -> None:
    """A file system in memory. Its files are limited in number, too: each takes some of the kernel's memory."""
    _mount("tmpfs", target, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={disk_bytes},nr_inodes=4096,mode={mode}")


def visible(prefixes: Sequence[str]) -> list[str]:
    """Folders to show, none inside another."""
    found: list[str] = []
    for path in sorted({*prefixes, *(p for p in _SYSTEM if os.path.isdir(p) and not os.path.islink(p))}):
        if not any(path.startswith(other + "/") for other in found):
            found.append(path)
    return found


def links() -> list[tuple[str, str]]:
    """System folders that are links, and where they lead."""
    return [(path, os.readlink(path)) for path in _SYSTEM if os.path.islink(path)]


def _make_read_only(path: str) -> None:
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
    arguments = (ctypes.c_long(_SYS_MOUNT_SETATTR), ctypes.c_int(_AT_FDCWD), path.encode(), _AT_RECURSIVE)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    checked(libc.syscall(*arguments, ctypes.byref(attributes), size), f"mount_setattr {path}")


def drop_privileges(user: int = NOBODY) -> None:
    """Root becomes ``user``; no process keeps a capability or gets one by running a program."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    checked(libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")
    checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl (no new privileges)")


def end_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """This process, and nothing that it starts, gets the signal when its parent ends."""
    checked(libc.prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0), "prctl (end with parent)")


def forbid_tracing() -> None:
    """No process of the same user may read or steer this one."""
    checked(libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl (not dumpable)")


def adopt_orphans() -> None:
    """Children of this process' descendants become its own when their parent ends, so that it can wait for them."""
    checked(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl (adopt orphans)")


def num_tasks(user: int) -> int:
    """Processes and threads of a user, as far as they can be seen from here."""
    found = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
                fields = dict(line.split(":", 1) for line in file if ":" in line)
        except OSError:  # It has ended meanwhile.
            continue
        if int(fields["Uid"].split()[0]) == user:
            found += int(fields.get("Threads", 1))
    return found


def limit(*, cpu_s: int, memory_bytes: int, disk_bytes: int, processes: int, others: int) -> None:
    """Limits of this process and of what it starts.

    Args:
        memory_bytes: address space and what sockets may hold, which is the kernel's memory, together.
        others: processes that the kernel counts together with these.

    Raises:
        OSError: sockets may hold more than half of the memory.
    """
    in_sockets = _NUM_FILES * _socket_bytes()
    if in_sockets > memory_bytes // 2:
        raise OSError(
            errno.ENOMEM, f"{_NUM_FILES} sockets may hold {in_sockets} bytes here, of a limit of {memory_bytes}"
        )
    for which, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, disk_bytes),
        (resource.RLIMIT_NOFILE, _NUM_FILES),
        (resource.RLIMIT_NPROC, processes + others),
        (resource.RLIMIT_AS, memory_bytes - in_sockets),
    ):
        resource.setrlimit(which, (most, most))


def _socket_bytes() -> int:
    """What may wait in a pair's socket to be read: the sender's buffer, and one message that it has just room for."""
    pair = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
    found = 2 * pair[0].getsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF)
    for end in pair:
        end.close()
    return int(found)
