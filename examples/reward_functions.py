"""Reward functions as a recipe names them: ``target: examples/reward_functions.py:brevity``.

A function takes, by keyword, what it names of ``prompts``, ``completions`` and the data's columns, and returns one
number per completion, or None where it does not apply. It runs in a process of its own, which keeps what this module
holds from call to call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def brevity(completions: Sequence[str]) -> list[float]:
    """0 for an empty answer, -1 for one of a thousand characters."""
    return [-len(text) / 1000 for text in completions]


def final_number(completions: Sequence[str], answer: Sequence[str]) -> list[float | None]:
    """1 where the last number of the completion is the last number of the column ``answer``, else 0.

    A row whose answer has no number does not apply.
    """
    return [_same_number(text, right) for text, right in zip(completions, answer, strict=True)]


def _same_number(text: str, right: str) -> float | None:
    wanted, found = _last_number(right), _last_number(text)
    return None if wanted is None else float(found == wanted)


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
