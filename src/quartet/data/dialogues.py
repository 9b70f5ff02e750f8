r"""Dialogues written as one text, as HH-RLHF has them: ``"\n\nHuman: …\n\nAssistant: …"``."""

from __future__ import annotations

import re
from bisect import bisect_left
from itertools import groupby

from quartet.text.examples import Messages

_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_dialogue(text: str) -> bool:
    """Whether a text begins with a turn."""
    return _TURN.match(text) is not None


def is_whole_dialogue(text: str) -> bool:
    """Whether a text begins with the human's turn, as no answer does."""
    first = _TURN.match(text)
    return first is not None and first[1] == "Human"


def as_dialogue(text: str) -> Messages:
    """The turns as messages, without white space around them.

    Turns of one side that follow each other become one message, text before the first turn the system's, text without
    any turn the user's. An open ``Assistant:`` at the end, where an answer belongs, becomes none.
    """
    marks = list(_TURN.finditer(text))
    if not marks:
        return [{"role": "user", "content": text.strip()}]
    before = text[: marks[0].start()].strip()
    turns = [("system", before)] if before else []
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    turns += [(_ROLES[mark[1]], text[mark.end() : end].strip()) for mark, end in zip(marks, ends, strict=True)]
    if turns[-1] == ("assistant", ""):
        turns.pop()
    return [
        {"role": role, "content": "\n\n".join(content for _, content in group)}
        for role, group in groupby(turns, key=lambda turn: turn[0])
    ]


def split_dialogues(chosen: str, rejected: str) -> int | None:
    """Where the answers of two dialogues begin: behind the last ``Assistant:`` that both share; None where more than
    the last turn differs."""
    shared = _num_shared(chosen, rejected)
    ends = [mark.end() for mark in _TURN.finditer(chosen) if mark[1] == "Assistant" and mark.end() <= shared]
    if not ends or any(_TURN.search(text, ends[-1]) for text in (chosen, rejected)):
        return None
    return ends[-1]


def split_texts(chosen: str, rejected: str) -> int | None:
    """Where the answers of two texts begin: before the word in which they first differ, so that no token is torn, and
    early enough that neither is empty; None where that leaves no prompt."""
    shared = _num_shared(chosen, rejected)
    both_end_words = all(text[shared : shared + 1].isspace() for text in (chosen, rejected))
    places = [mark.start() for mark in re.finditer(r"\s+", chosen[:shared])] + [shared] * both_end_words
    for place in reversed(places):
        if not chosen[:place].strip():
            return None
        if chosen[place:].strip() and rejected[place:].strip():
            return place
    return None


def _num_shared(one: str, other: str) -> int:
    # Comparing whole beginnings is much faster than comparing characters: texts may have millions.
    return bisect_left(range(min(len(one), len(other))), True, key=lambda n: one[: n + 1] != other[: n + 1])
