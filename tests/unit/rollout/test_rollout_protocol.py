"""Requests and sampling parameters refuse what cannot be meant."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quartet.config import UserError
from quartet.rollout.protocol import Request, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e-46),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("min_p", float("nan")),
        ("max_new_tokens", 0),
        ("stop_strings", ("",)),
        ("stop_strings", "end"),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_bad_sampling_parameters_are_named(field: str, value: object) -> None:
    with pytest.raises(UserError, match=field) as error:
        SamplingParams(**{field: value})
    assert repr(value) in error.value.found


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UserError, match="needs a prompt") as error:
        Request("r7", "g", (), SamplingParams())
    assert "r7" in error.value.found


def test_the_protocol_imports_without_torch() -> None:
    code = "import sys, quartet.rollout.protocol; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
