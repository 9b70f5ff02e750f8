"""Stop strings are found where a full decode finds them, whatever the tokens look like."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.rollout.stop_strings import StopStringMatcher

PIECES = ["a", "b", "ab", "ba", "END", "E", "N", "D", " ", "aab"]


def pieces(ids: Sequence[int]) -> str:
    return "".join(PIECES[i] for i in ids)


def utf8(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def first_hit(matcher: StopStringMatcher, ids: Sequence[int]) -> tuple[int, int] | None:
    """(tokens when found, characters before the stop string)."""
    for n in range(1, len(ids) + 1):
        place = matcher.find(ids[:n])
        if place is not None:
            return n, place
    return None


def test_a_stop_string_across_tokens() -> None:
    ids = [PIECES.index(p) for p in ("a", "E", "N", "ab", "E", "N", "D", "a")]
    assert first_hit(StopStringMatcher(["END"], pieces), ids) == (7, len("aENab"))


def test_a_stop_string_inside_a_token_and_the_earliest_of_several() -> None:
    ids = [PIECES.index(p) for p in ("a", "aab", "b")]
    assert first_hit(StopStringMatcher(["b", "aa"], pieces), ids) == (2, 0)


@settings(deadline=None, max_examples=150)
@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=25),
    stops=st.lists(st.sampled_from(["ab", "END", "aba", "D a", "bb", "E"]), min_size=1, max_size=3),
)
def test_equals_decoding_everything_each_time(ids: list[int], stops: list[str]) -> None:
    expected = None
    for n in range(1, len(ids) + 1):
        places = [place for s in stops if (place := pieces(ids[:n]).find(s)) >= 0]
        if places:
            expected = (n, min(places))
            break
    assert first_hit(StopStringMatcher(stops, pieces), ids) == expected


@pytest.mark.parametrize("stop", ["é!", "€", "ä€"])
def test_characters_split_over_tokens(stop: str) -> None:
    text = "xä€é!z"
    data = text.encode()
    end = len(text[: text.index(stop) + len(stop)].encode())
    assert first_hit(StopStringMatcher([stop], utf8), list(data)) == (end, text.index(stop))


def test_only_the_newest_tokens_are_decoded() -> None:
    longest = 0

    def counting(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return pieces(ids)

    assert first_hit(StopStringMatcher(["END"], counting), [0] * 200) is None
    assert longest <= 2
