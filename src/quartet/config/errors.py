"""The error for mistakes a user can make and mend, and the one that says a run was stopped.

Values and errors of user code and servers: read as scores, or described for messages.

Why a file could not be written or read.
"""

from __future__ import annotations

import math
import re
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


def escape_control(text: str) -> str:
    r"""Writes ``text`` with every control, direction and invisible character as Python does (``\x1b``, ``\u202e``).

    Line feeds and tabs stay, and so do the joiners that scripts and emoji need. What is safe comes back unchanged, so
    that doing it twice does nothing more.
    """
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


_MAX_SHOWN = 10_000
"""Characters of a part of a message; a row may have a million columns."""


class UserError(Exception):
    """A three-part message: what is wrong, what was found, what to do instead.

    The command line prints it without a traceback and exits with status 2; Python users catch it. What was found may be
    foreign text of any length: the message holds the beginning of each part, as ``escape_control`` writes
    it.
    """

    def __init__(self, problem: str, *, found: str, remedy: str) -> None:
        self.problem = problem
        self.found = found
        self.remedy = remedy
        super().__init__(f"{_shown(problem)}\n  found: {_shown(found)}\n  do: {_shown(remedy)}")

    def __reduce__(self) -> Any:
        # By default pickle would call __init__ with the message.
        return Exception.__new__, (type(self), *self.args), vars(self)


def _shown(text: str) -> str:
    if len(text) > _MAX_SHOWN:
        text = f"{text[:_MAX_SHOWN]}… ({len(text):,} characters)"
    return escape_control(text)


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
_LARGEST = 3.4028234663852886e38
"""Of float32, in which scores are kept; what lies beyond would become an infinity there."""


def parse_score(value: Any) -> float | str:
    """Reads ``value`` as a float: a number of Python, or a scalar of numpy or torch. Where it is no number that float32
    holds, returns a description of what it is.
    """
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if not isinstance(value, int | float):
        return f"{excerpt(value)} ({type(value).__name__})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}"
    return float(value) if abs(value) <= _LARGEST else "a number beyond what float32 holds"


def excerpt(value: Any) -> str:
    """Returns ``repr(value)``, its middle left out where it is long."""
    text = repr(value)
    return text if len(text) <= 160 else text[:110] + " … " + text[-40:]


def describe_error(error: BaseException) -> str:
    """Returns ``Type: message``, the message cut where it is long."""
    return f"{type(error).__name__}: {error}"[:2000]


def error_location(error: BaseException) -> str | None:
    """Says where it was raised, ``file, line n, in function``, in code that is not the package's own; None where that
    cannot be told.
    """
    for raised in (error, error.__cause__):
        for frame in reversed(traceback.extract_tb(raised.__traceback__ if raised else None)):
            if not frame.filename.startswith(_PACKAGE):
                return f"{frame.filename}, line {frame.lineno}, in {frame.name}"
    return None


def write_error(path: Path, error: BaseException, *, what: str = "") -> UserError:
    """Makes the error for ``path``, which could not be written.

    Args:
        what: before the path in the message (``"checkpoint "``).
    """
    remedy = "free some space or get the permission to write there, then go on with --resume; or choose another place"
    return UserError(f"{what}{path} could not be written", found=str(error), remedy=remedy)


def read_error(path: Path, error: OSError) -> UserError:
    """Makes the error for ``path``, which could not be read."""
    remedy = "make it readable for you (chmod or chown), or restore it from a copy"
    return UserError(f"{path} could not be read", found=error.strerror or str(error), remedy=remedy)


def read_file(path: Path) -> bytes:
    """Returns the content of a file; UserError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise read_error(path, error) from error
