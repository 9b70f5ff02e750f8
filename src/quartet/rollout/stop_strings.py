"""Finds stop strings in text that grows token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_INCOMPLETE = "\ufffd"


class StopStringMatcher:
    """Decodes only the newest tokens of one response and looks for stop strings where they can newly stand.

    A token may decode differently on its own than after others (leading spaces, split UTF-8 characters), so
    the newest tokens are decoded together with the few before them, and text that ends in half a character
    waits for the rest.
    """

    def __init__(self, stop_strings: Sequence[str], decode: Decode) -> None:
        self._stop_strings = tuple(stop_strings)
        self._decode = decode
        self._overlap = max(len(s) for s in stop_strings) - 1
        self._context = 0
        self._read = 0
        self._tail = ""

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Call with all generated tokens after each new one.

        Returns:
            Characters of the decoded text before the earliest stop string, or None where there is none yet.
        """
        known = self._decode(token_ids[self._context : self._read])
        text = self._decode(token_ids[self._context :])
        if len(text) <= len(known) or text.endswith(_INCOMPLETE):
            # Still visible to a stop string made of what is complete.
            return self._locate(token_ids) if self._hits(self._tail + text[len(known) :]) else None
        self._context, self._read = self._read, len(token_ids)
        grown = self._tail + text[len(known) :]
        if self._hits(grown):
            return self._locate(token_ids)
        self._tail = grown[-self._overlap :] if self._overlap else ""
        return None

    def _hits(self, text: str) -> bool:
        return any(s in text for s in self._stop_strings)

    def _locate(self, token_ids: Sequence[int]) -> int | None:
        """Settled on the whole text, which is what a reader of the completion decodes."""
        text = self._decode(token_ids)
        places = [place for s in self._stop_strings if (place := text.find(s)) >= 0]
        return min(places) if places else None
