"""Foreign text made safe to print: nothing in it moves the cursor, colours, hides or reorders what stands beside it."""

from __future__ import annotations

import re

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
