"""YAML with a comment behind every key, from what the recipe's classes say about it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quartet.config.describe import inline
from quartet.config.reference import meaning_at

_WIDTH, _COLUMN = 100, 40
"""Longest line, and where comments begin."""


@dataclass(frozen=True)
class Line:
    """One key: its address as in an override, and what it is set to.

    Args:
        is_example: commented out.
        note: follows the key's own description.
    """

    address: str
    value: Any
    is_example: bool = False
    note: str = ""


def commented(job: str, lines: Sequence[Line], head: Sequence[str]) -> str:
    """The recipe that ``lines`` make, section by section in their order, under comments with the text of ``head``.

    Raises:
        UserError: a key that the recipe of ``job`` does not have.
    """
    written = [f"# {text}" for text in head]
    chosen: dict[str, str] = {}
    before: list[str] = []
    for line in lines:
        *above, name = line.address.split(".")
        if name in ("name", "type"):
            chosen[".".join(above)] = str(line.value)
        opened = above[_shared(above, before) :]
        depth = len(above) - len(opened)
        written += [f"{'  ' * (depth + more)}{part}:" for more, part in enumerate(opened) if not part.isdecimal()]
        is_item = bool(opened) and opened[-1].isdecimal()
        indent = "  " * (len(above) - is_item) + "- " * is_item
        text = f"{'# ' * line.is_example}{name}: {inline(line.value)}"
        words = meaning_at(job, _resolved(line.address, chosen))
        written += _with_comment(indent + text, " ".join(filter(None, (words, line.note))))
        before = above
    return "\n".join(written) + "\n"


def _shared(above: Sequence[str], before: Sequence[str]) -> int:
    """How many sections two keys have in common."""
    pairs = list(zip(above, before, strict=False))
    return next((depth for depth, (mine, other) in enumerate(pairs) if mine != other), len(pairs))


def _resolved(address: str, chosen: Mapping[str, str]) -> str:
    """The address at which a key is described: ``algorithm.grpo.kl.coef``, and ``algorithm.grpo`` for its name."""
    *above, name = address.split(".")
    parts: list[str] = []
    for depth, part in enumerate(above, start=1):
        tag = chosen.get(".".join(above[:depth]))
        parts += [part, *([tag] if tag is not None else [])]
    return ".".join(parts if ".".join(above) in chosen and name in ("name", "type") else [*parts, name])


def _with_comment(text: str, comment: str) -> list[str]:
    """The line with its comment beside it; what does not fit goes on below."""
    if not comment:
        return [text]
    column = max(_COLUMN, len(text) + 2)
    first, *others = textwrap.wrap(comment, max(_WIDTH - column - 2, 24))
    return [f"{text:<{column}}# {first}", *(f"{'':<{column}}# {other}" for other in others)]
