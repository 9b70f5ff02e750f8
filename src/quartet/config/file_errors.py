"""Why a file could not be written or read, told apart by cause, each cause with its own remedy."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path

from quartet.config.errors import UserError

ELSEWHERE = "choose another output_dir"
_AGAIN = "then go on with --resume"

_REMEDIES = {
    errno.ENOSPC: f"free some space, {_AGAIN}, or {ELSEWHERE}",
    errno.EDQUOT: f"your quota there is used up: delete files of your own or ask for a larger one, {_AGAIN}",
    errno.EFBIG: f"raise the limit of a file's size (ulimit -f), {_AGAIN}, or {ELSEWHERE} on a file system without it",
    errno.EROFS: f"the file system is read-only: mount it writable (a fault of the disk can cause this; see dmesg), "
    f"{_AGAIN}, or {ELSEWHERE}",
    errno.EACCES: f"get the permission to write there (chmod or chown), {_AGAIN}, or {ELSEWHERE}",
    errno.EPERM: f"get the permission to change it (chown; lsattr shows what is immutable), {_AGAIN}, or {ELSEWHERE}",
    errno.ENOENT: f"a directory on the way there is missing: put it back (or mount it again), {_AGAIN}",
    errno.ENOTDIR: f"a file stands where a directory must be: move it away, {_AGAIN}, or {ELSEWHERE}",
    errno.EEXIST: f"something else has that name: move it away, {_AGAIN}, or {ELSEWHERE}",
    errno.EISDIR: f"a directory stands where a file must be: move it away, {_AGAIN}, or {ELSEWHERE}",
    errno.ENOTEMPTY: f"a directory stands where a file must be: move it away, {_AGAIN}, or {ELSEWHERE}",
    errno.ELOOP: f"a symbolic link stands where a file must be: move it away, {_AGAIN}, or {ELSEWHERE}",
    errno.ENXIO: f"no ordinary file stands there: move it away, {_AGAIN}, or {ELSEWHERE}",
    errno.EIO: f"the disk reports an error: look at dmesg, copy what is there to another disk, {_AGAIN}",
    errno.ESTALE: f"the network file system has lost the directory: mount it again, {_AGAIN}",
    errno.ENAMETOOLONG: "choose a shorter output_dir",
    errno.EMFILE: f"raise the number of files a process may open (ulimit -n), {_AGAIN}",
    errno.ENFILE: f"the machine has too many open files: close programs or raise fs.file-max, {_AGAIN}",
}
_NO_FILES_LEFT = f"the file system can hold no more files (df -i): delete some, {_AGAIN}, or {ELSEWHERE}"
_READ_REMEDIES = {
    errno.EACCES: "make it readable for you (chmod or chown)",
    errno.EPERM: "make it readable for you (chmod or chown)",
    errno.EISDIR: "a directory stands where a file must be: put the file back",
    errno.ENOTDIR: "a file stands where a directory must be: move it away",
    errno.ENOENT: "put it back from a copy",
    errno.ENXIO: "put the file itself there",
    errno.ELOOP: "its symbolic links lead in a circle: put the file itself there",
    errno.EIO: "the disk reports an error: look at dmesg, and restore the file from a copy",
    errno.ESTALE: "the network file system has lost it: mount it again",
}
_UNKNOWN = f"see that there is space and that the disk is well, {_AGAIN}, or {ELSEWHERE}"


def write_error(path: Path, error: BaseException, *, what: str = "") -> UserError:
    """The error for ``path``, which could not be written.

    Args:
        what: before the path in the message (``"checkpoint "``).
    """
    number = _number(error)
    found = str(error)
    if number is not None and not isinstance(error, OSError) and os.strerror(number) not in found:
        found = f"{os.strerror(number)} ({found})"
    remedy = _REMEDIES.get(number, _UNKNOWN) if number is not None else _UNKNOWN
    if number in (None, errno.ENOSPC):
        there = next(each for each in (path, *path.absolute().parents) if each.exists())
        free = "unknown space"
        with contextlib.suppress(OSError):
            system, free = os.statvfs(there), f"{shutil.disk_usage(there).free / 2**20:.0f} MiB"
            if system.f_favail == 0 and system.f_files > 0:  # some file systems count no files and say 0 of 0
                remedy = _NO_FILES_LEFT
        found = f"{found}; {free} free"
    return UserError(f"{what}{path} could not be written", found=found, remedy=remedy)


def read_error(path: Path, error: OSError) -> UserError:
    """The error for ``path``, which could not be read."""
    remedy = _READ_REMEDIES.get(error.errno or 0, "mend what the message names, or restore it from a copy")
    return UserError(f"{path} could not be read", found=error.strerror or str(error), remedy=remedy)


def read_file(path: Path) -> bytes:
    """The content of a file; UserError where it cannot be read."""
    try:
        refuse_pipe(path)
        return path.read_bytes()
    except OSError as error:
        raise read_error(path, error) from error


def refuse_pipe(path: Path) -> None:
    """OSError where ``path`` is a pipe or a device: who opens it would wait for a writer."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.ENXIO, "it is a pipe or a device")


def _number(error: BaseException | None) -> int | None:
    """The system's number of what went wrong; libraries hide it in a cause, or in their text as ``os error 28``."""
    if error is None:
        return None
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    told = re.search(r"os error (\d+)", str(error))
    return int(told[1]) if told else _number(error.__cause__)
