"""What makes a small story better, in three parts that anyone can check by eye; each lies between 0 and 1.

A story model of 260 000 parameters forgets its hero, breaks off and rambles. The parts can be hacked (name the hero in
every sentence, end after one line), which makes them a fair test: the penalty on KL has to hold the text together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_SPEECH = re.compile(r'"[^"\n]*\w[^"\n]*\s[^"\n]*[.,!?]"')
_END = re.compile(r'[.!?]"?\s*$')


def complete_ending(completions: Sequence[str]) -> list[float]:
    """1 where the text ends with a whole sentence and every quotation is closed."""
    return [float(bool(_END.search(text)) and text.count('"') % 2 == 0) for text in completions]


def hero_stays(completions: Sequence[str], hero: Sequence[str]) -> list[float]:
    """The share of the story's thirds (by characters) that name the hero of its prompt."""
    return [
        sum(bool(re.search(rf"\b{re.escape(name)}\b", part)) for part in _thirds(text)) / 3
        for text, name in zip(completions, hero, strict=True)
    ]


def somebody_speaks(completions: Sequence[str]) -> list[float]:
    """1 where somebody says at least two words, in closed quotation marks and with punctuation."""
    return [float(bool(_SPEECH.search(text))) for text in completions]


def _thirds(text: str) -> list[str]:
    size = -(-len(text) // 3) or 1
    return [text[start : start + size] for start in range(0, 3 * size, size)]
