"""Finds stop strings in text that grows token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int], Sequence[int]], str]
"""The text that the second token ids add to that of the first: ``TextCodec.decode_completion``."""

_INCOMPLETE = "\ufffd"
_CONTEXT = 8
"""Tokens before the newest ones that decide how these decode."""


class StopStringMatcher:
    """Decodes only the newest tokens of one response and looks for stop strings where they can newly stand.

    A token may decode differently on its own than after others (leading spaces, split UTF-8 characters), so
    the newest tokens are decoded after the few before them, and text that ends in half a character waits for
    the rest.

    Args:
        decode: makes the text that a reader of the completion has, which is where stop strings are looked for.
        prompt_ids: of the response's prompt.
    """

    def __init__(self, stop_strings: Sequence[str], decode: Decode, prompt_ids: Sequence[int] = ()) -> None:
        self._stop_strings = tuple(stop_strings)
        self._decode = decode
        self._prompt_ids = prompt_ids
        self._overlap = max(len(s) for s in stop_strings) - 1
        self._read = 0
        self._tail = ""

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Call with all generated tokens after each new one.

        Returns:
            Characters of the response's text before the earliest stop string, or None where there is none yet.
        """
        start = self._read - _CONTEXT
        before = token_ids[start : self._read] if start >= 0 else [*self._prompt_ids[start:], *token_ids[: self._read]]
        text = self._decode(before, token_ids[self._read :])
        grown = self._tail + text
        if any(s in grown for s in self._stop_strings):
            # Settled on the whole text, which is what a reader of the completion has.
            whole = self._decode(self._prompt_ids, token_ids)
            places = [place for s in self._stop_strings if (place := whole.find(s)) >= 0]
            return min(places) if places else None
        if text and not text.endswith(_INCOMPLETE):
            self._read = len(token_ids)
            self._tail = grown[-self._overlap :] if self._overlap else ""
        return None
