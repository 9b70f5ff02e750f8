"""Values and errors of user code and servers: read as scores, or described for messages."""

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
