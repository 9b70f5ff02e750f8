"""How many bytes an argument has, roughly: enough to know whether to store it once for several readers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from quartet.batch.columns import ColumnSet
from quartet.batch.ragged import RaggedBatch

LARGE = 64 * 2**10
"""Bytes from which one stored copy is cheaper than several sent ones."""
_DEPTH = 3
_LOOKED_AT = 1000


def is_large(value: Any) -> bool:
    return num_bytes(value) >= LARGE


def num_bytes(value: Any, depth: int = _DEPTH) -> int:
    """Bytes of the tensors, arrays and strings in a value; what lies deeper than a few containers is not looked at."""
    if isinstance(value, (Tensor, np.ndarray)):
        return int(value.nbytes)
    if isinstance(value, (bytes, bytearray, str)):
        return len(value)
    if isinstance(value, RaggedBatch):
        # Ids that are elsewhere are a view of one element.
        fields = [value.input_ids if value.has_ids else value.input_ids[:1]]
        fields += [*value.token.values(), *value.sequence.values()]
        return sum(f.nbytes for f in fields)
    if isinstance(value, ColumnSet):
        return sum(f.nbytes for f in (*value.token.values(), *value.sequence.values()))
    if depth and isinstance(value, Mapping):
        value = list(value.values())
    if depth and isinstance(value, (list, tuple)):
        looked = value[:_LOOKED_AT]
        return sum(num_bytes(item, depth - 1) for item in looked) * len(value) // max(len(looked), 1)
    return 8
