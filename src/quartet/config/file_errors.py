"""Why a file could not be written or read: the usual causes, each with its own remedy."""

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
_IN_THE_WAY = (
    f"something else stands there (a file, a directory, a symbolic link): move it away, {_AGAIN}, or {ELSEWHERE}"
)
_REMEDIES = {
    errno.ENOSPC: f"free some space, {_AGAIN}, or {ELSEWHERE}",
    errno.EDQUOT: f"your quota there is used up: delete files of your own or ask for a larger one, {_AGAIN}",
    errno.EFBIG: f"raise the limit of a file's size (ulimit -f), {_AGAIN}, or {ELSEWHERE} on another file system",
    errno.EROFS: f"the file system is read-only: mount it writable, {_AGAIN}, or {ELSEWHERE}",
    errno.EACCES: f"get the permission to write there (chmod or chown), {_AGAIN}, or {ELSEWHERE}",
    errno.EPERM: f"get the permission to change it (chown; lsattr shows what is immutable), {_AGAIN}, or {ELSEWHERE}",
    errno.ENOENT: f"a directory on the way there is missing: put it back (or mount it again), {_AGAIN}",
    errno.EIO: f"the disk reports an error: look at dmesg, copy what is there to another disk, {_AGAIN}",
    errno.EMFILE: f"raise the number of files a process may open (ulimit -n), {_AGAIN}",
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENOTEMPTY, errno.ELOOP), _IN_THE_WAY),
}
_READ_REMEDIES = {
    errno.EACCES: "make it readable for you (chmod or chown)",
    errno.ENOENT: "put it back from a copy",
    errno.EISDIR: "a directory stands where a file must be: put the file back",
}
_UNKNOWN = f"see that there is space and that the disk is well, {_AGAIN}, or {ELSEWHERE}"


def write_error(path: Path, error: BaseException, *, what: str = "") -> UserError:
    """Makes the error for ``path``, which could not be written.

    Args:
        what: before the path in the message (``"checkpoint "``).
    """
    number = _number(error)
    found = str(error)
    if number is not None and os.strerror(number) not in found:
        found = f"{os.strerror(number)} ({found})"
    if number in (None, errno.ENOSPC):
        there = next(each for each in (path, *path.absolute().parents) if each.exists())
        with contextlib.suppress(OSError):
            found += f"; {shutil.disk_usage(there).free / 2**20:.0f} MiB free"
    remedy = _UNKNOWN if number is None else _REMEDIES.get(number, _UNKNOWN)
    return UserError(f"{what}{path} could not be written", found=found, remedy=remedy)


def read_error(path: Path, error: OSError) -> UserError:
    """Makes the error for ``path``, which could not be read."""
    remedy = _READ_REMEDIES.get(error.errno or 0, "mend what the message names, or restore it from a copy")
    return UserError(f"{path} could not be read", found=error.strerror or str(error), remedy=remedy)


def read_file(path: Path) -> bytes:
    """Returns the content of a file; UserError where it cannot be read."""
    try:
        refuse_pipe(path)
        return path.read_bytes()
    except OSError as error:
        raise read_error(path, error) from error


def refuse_pipe(path: Path) -> None:
    """Raises OSError where ``path`` is a pipe or a device: who opens it would wait for a writer."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.ENXIO, "it is a pipe or a device")


def _number(error: BaseException | None) -> int | None:
    """Returns the system's number of the failure; libraries hide it in a cause, or in their text: ``os error 28``."""
    if error is None or (isinstance(error, OSError) and error.errno is not None):
        return error.errno if isinstance(error, OSError) else None
    told = re.search(r"os error (\d+)", str(error))
    return int(told[1]) if told else _number(error.__cause__)
