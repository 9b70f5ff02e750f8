"""Numbers that user code or a server gives as a score."""

from __future__ import annotations

import math
from typing import Any

_LARGEST = 3.4028234663852886e38
"""Of float32, in which scores are kept; what lies beyond would become an infinity there."""


def as_score(value: Any) -> float | str:
    """``value`` as a float: a number of Python, or a scalar of numpy or torch. Where it is no number that float32 holds
    a description of what it is.
    """
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if not isinstance(value, (int, float)):
        return f"{_excerpt(value)} ({type(value).__name__})"
    if abs(value) <= _LARGEST:
        return float(value)
    # An integer may be too large for math.isfinite, and too long to be shown.
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}"
    return "a number beyond what float32 holds"


def _excerpt(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else text[:110] + " … " + text[-40:]
