"""The error for mistakes a user can make and mend, and the one that says a run was stopped."""

from __future__ import annotations

import re
import signal
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
    r"""``text`` with every control, direction and invisible character as Python writes it (``\x1b``, ``\u202e``).

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
