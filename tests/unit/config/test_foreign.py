"""What counts as a score."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from quartet.config.errors import parse_score

LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (True, 1.0),
        (-0.5, -0.5),
        (np.float32(0.5), 0.5),
        (np.array(2), 2.0),
        (torch.tensor(3.0), 3.0),
        (np.bool_(True), 1.0),
        (LARGEST, LARGEST),
        (-LARGEST, -LARGEST),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (np.float16("inf"), "inf"),
        (LARGEST * 1.001, "a number beyond what float32 holds"),
        (-(10**4000), "a number beyond what float32 holds"),
        ("1", "'1' (str)"),
        (None, "None (NoneType)"),
        ([1.0], "[1.0] (list)"),
        (1j, "1j (complex)"),
    ],
)
def test_a_score_is_a_number_that_float32_holds(value: Any, expected: float | str) -> None:
    found = parse_score(value)
    assert found == expected and type(found) is type(expected)
    if isinstance(found, float):
        assert math.isfinite(float(torch.tensor(found)))
