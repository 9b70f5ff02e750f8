"""Numbers that user code or a server gives as a score."""

from __future__ import annotations

import math
from typing import Any

from quartet.config.foreign import described, excerpt, type_name

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
