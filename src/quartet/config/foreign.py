"""Values and errors of user code and servers: read as scores, or described for messages, whatever their methods do."""

from __future__ import annotations

import math
import traceback
from pathlib import Path
from typing import Any

_PACKAGE = str(Path(__file__).parents[1])
_LONGEST_TRACEBACK = 20_000
_LARGEST = 3.4028234663852886e38
"""Of float32, in which scores are kept; what lies beyond would become an infinity there."""


def as_score(value: Any) -> float | str:
    """``value`` as a float: a number of Python, or a scalar of numpy or torch. Where it is no number that float32 holds
    a description of what it is.
    """
    try:
        if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
            value = value.item()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # It is an object of user code, which may raise anything.
        return f"{type_name(value)} that cannot be read as a number ({described(error)})"
    # Their own types' methods: a subclass may have others.
    if isinstance(value, float):
        number = float.__float__(value)
        if math.isfinite(number) and abs(number) <= _LARGEST:
            return number
        return "a number beyond what float32 holds" if math.isfinite(number) else f"{number}"
    if isinstance(value, int):
        # It may be too large for a float, and too long to be shown.
        fits = int.__abs__(value) <= int(_LARGEST)
        return int.__float__(value) if fits else "a number beyond what float32 holds"
    return f"{excerpt(value)} ({type_name(value)})"


def excerpt(value: Any) -> str:
    """``repr(value)``, its middle left out where it is long."""
    if isinstance(value, str) and len(value) > 1000:
        value = value[:500] + value[-500:]  # its middle would not be shown
    try:
        text = repr(value)
    except BaseException as error:  # Its own code, which may raise anything.
        return f"{type_name(value)} that cannot be shown ({type_name(error)} in its repr)"
    return text if len(text) <= 160 else text[:110] + " … " + text[-40:]


def described(error: BaseException) -> str:
    """``Type: message``, the message cut where it is long."""
    try:
        text = str(error)
    except BaseException as raised:  # Its own code, which may raise anything.
        return f"{type_name(error)}, whose message cannot be shown ({type_name(raised)} in its str)"
    name = type_name(error)
    return f"{name}: {text if len(text) <= 2000 else text[:1500] + ' … ' + text[-500:]}" if text else name


def type_name(value: Any) -> str:
    # Not value.__class__ or a metaclass's own __name__, which may be code.
    name = type.__dict__["__name__"].__get__(type(value))
    return str(name)


def raised_at(error: BaseException) -> str | None:
    """``file, line n, in function``: where it was raised, in code that is not the package's own. None where that cannot
    be told.
    """
    for raised in (error, error.__cause__):
        for frame in reversed(traceback.extract_tb(raised.__traceback__ if raised else None)):
            if not frame.filename.startswith(_PACKAGE):
                return f"{frame.filename}, line {frame.lineno}, in {frame.name}"
    return None


def full_traceback(error: BaseException) -> str:
    """As Python prints it, its middle left out where it is very long."""
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException:  # Some exceptions cannot be formatted.
        text = described(error)
    half = _LONGEST_TRACEBACK // 2
    return text if len(text) <= _LONGEST_TRACEBACK else f"{text[:half]} … {text[-half:]}"
