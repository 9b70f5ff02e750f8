"""Ready reward functions: plain functions, used as ``quartet.rewards.builtin:exact_match``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1 where the completion is the column ``answer``, white space around both aside, else 0; None without
    answer.
    """
    return [
        None if expected is None else float(text_of(completion).strip() == str(expected).strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]


def length(completions: Sequence[Any], **_: Any) -> list[float | None]:
    """Characters of the completion; with a negative weight a price on length."""
    return [float(len(text_of(completion))) for completion in completions]


def text_of(completion: Any) -> str:
    """A completion's text, whether it came as text or as messages."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message["content"]) for message in completion)
