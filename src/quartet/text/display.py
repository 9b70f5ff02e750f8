"""Token by token text for people: pieces that add up to the decoded text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes of a UTF-8 character, each possibly a token of its own


@lru_cache(maxsize=1 << 16)
def _decode(tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...]) -> str:
    """Windows are a token or two long and come again and again, so they are worth remembering."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text that each token adds, special tokens included.

    A character spread over several tokens belongs to the token that completes it; the tokens before it add
    ``""``. Bytes that never become a character show as U+FFFD.

    Returns:
        One piece per id; their concatenation is the decoded text wherever its bytes are valid UTF-8.
    """

    def decode(start: int, stop: int) -> str:
        return _decode(tokenizer, tuple(ids[start:stop]))

    pieces: list[str] = []
    # Decoding starts a little before the new token, because decoders treat the first token differently (they
    # strip its leading space) and join bytes: [start, done) was shown, [done, i] is new.
    start = done = 0
    for i in range(len(ids)):
        shown, text = decode(start, done), decode(start, i + 1)
        held = i + 1 - done
        incomplete = text.endswith(_REPLACEMENT) and held < _LONGEST_CHARACTER and i + 1 < len(ids)
        if incomplete or not text.startswith(shown):
            if incomplete:
                pieces.append("")
                continue
            text, shown = decode(done, i + 1), ""
        pieces.append(text[len(shown) :])
        start, done = done, i + 1
    return pieces
