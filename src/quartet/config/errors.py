"""The error for mistakes a user can make and mend, and the one that says a run was stopped.

Values and errors of user code and servers: read as scores, or described for messages.

Why a file could not be written or read: the usual causes, each with its own remedy.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import shutil
import signal
import traceback
from pathlib import Path
from typing import Any

_UNSAFE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls: terminal escapes begin with \x1b or \x9b, \r goes back over a line
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # directions: text after them is shown in another order
    "\u2028\u2029"  # line and paragraph separators
    "\u200b\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # seen by programs and not by people
    "\ud800-\udfff"  # halves of characters, which no stream can encode
    "]"
)


def printable(text: str) -> str:
    r"""Writes ``text`` with every control, direction and invisible character as Python does (``\x1b``, ``\u202e``).

    Line feeds and tabs stay, and so do the joiners that scripts and emoji need. What is safe comes back unchanged, so
    that doing it twice does nothing more.
    """
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


_MAX_SHOWN = 4000
"""Characters of a part of a message; a row may have a million columns."""
_MAX_FOUND = 20_000
"""Of what was found: a recipe of another system has a hundred keys, each with its remedy."""


class UserError(Exception):
    """A three-part message: what is wrong, what was found, what to do instead.

    The command line prints it without a traceback and exits with status 2; Python users catch it. What was found may be
    foreign text of any length: the message holds the beginning of each part, as ``printable`` writes it.
    """

    def __init__(self, problem: str, *, found: str, remedy: str) -> None:
        self.problem = problem
        self.found = found
        self.remedy = remedy
        super().__init__(f"{_shown(problem)}\n  found: {_shown(found, _MAX_FOUND)}\n  do: {_shown(remedy)}")

    def __reduce__(self) -> Any:
        # By default pickle would call __init__ with the message.
        return Exception.__new__, (type(self), *self.args), vars(self)


def _shown(text: str, most: int = _MAX_SHOWN) -> str:
    if len(text) > most:
        text = f"{text[:most]}… ({len(text):,} characters)"
    return printable(text)


class Interrupted(Exception):
    """A signal stopped the run; everything up to ``step`` is saved under ``path`` (None: to the last checkpoint).

    Args:
        number: of the signal: Ctrl-C (SIGINT), SIGTERM or SIGUSR1.
    """

    def __init__(self, path: Path, step: int | None, number: int = signal.SIGINT) -> None:
        self.path = path
        self.step = step
        self.number = number
        super().__init__(f"stopped{'' if step is None else f' after step {step}'}; saved in {path}")

    @property
    def exit_status(self) -> int:
        """128 + the signal's number, as a shell has it: 130, 143, 138."""
        return 128 + self.number


_PACKAGE = str(Path(__file__).parents[1])
_LONGEST_TRACEBACK = 20_000
_LARGEST = 3.4028234663852886e38
"""Of float32, in which scores are kept; what lies beyond would become an infinity there."""


def as_score(value: Any) -> float | str:
    """Reads ``value`` as a float: a number of Python, or a scalar of numpy or torch. Where it is no number that float32
    holds, returns a description of what it is.
    """
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if not isinstance(value, int | float):
        return f"{excerpt(value)} ({type_name(value)})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}"
    return float(value) if abs(value) <= _LARGEST else "a number beyond what float32 holds"


def excerpt(value: Any) -> str:
    """Returns ``repr(value)``, its middle left out where it is long."""
    if isinstance(value, str) and len(value) > 1000:
        value = value[:500] + value[-500:]  # its middle would not be shown
    try:
        text = repr(value)
    except Exception as error:  # its own code, which may raise anything
        return f"{type_name(value)} that cannot be shown ({type_name(error)} in its repr)"
    return text if len(text) <= 160 else text[:110] + " … " + text[-40:]


def described(error: BaseException) -> str:
    """Returns ``Type: message``, the message cut where it is long."""
    text, name = str(error), type_name(error)
    return f"{name}: {text if len(text) <= 2000 else text[:1500] + ' … ' + text[-500:]}" if text else name


def type_name(value: Any) -> str:
    return type(value).__name__


def raised_at(error: BaseException) -> str | None:
    """Says where it was raised, ``file, line n, in function``, in code that is not the package's own; None where that
    cannot be told.
    """
    for raised in (error, error.__cause__):
        for frame in reversed(traceback.extract_tb(raised.__traceback__ if raised else None)):
            if not frame.filename.startswith(_PACKAGE):
                return f"{frame.filename}, line {frame.lineno}, in {frame.name}"
    return None


def full_traceback(error: BaseException) -> str:
    """Returns it as Python prints it, its middle left out where it is very long."""
    text, half = "".join(traceback.format_exception(error)), _LONGEST_TRACEBACK // 2
    return text if len(text) <= _LONGEST_TRACEBACK else f"{text[:half]} … {text[-half:]}"


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
    remedy = "make it readable for you (chmod or chown), or restore it from a copy"
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
