"""Where the steps of an answer end, in text and in tokens."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies

from quartet.extras.process_rewards.data import Step, answer_pieces, last_tokens, split_steps
from quartet.text.tokenizer import TextCodec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a;b;c", [("a", 2), ("b", 4), ("c", None)]),
        ("a;b;", [("a", 2), ("b", 4)]),
        ("a", [("a", None)]),
        ("", [("", None)]),
        (" \n", [(" \n", None)]),
        (";;", [("", None)]),
        ("a;;b; \n", [("a", 2), ("b", 5)]),
        (";a;", [("a", 3)]),
    ],
)
def test_steps_of_a_text(text: str, expected: list[tuple[str, int | None]]) -> None:
    assert [(step.text, step.end) for step in split_steps(text, ";")] == expected


def test_a_separator_of_several_characters() -> None:
    text = "first\n\nsecond\n\n\n\nthird ки"
    assert [text[: step.end] for step in split_steps(text, "\n\n")][:2] == ["first\n\n", "first\n\nsecond\n\n"]
    assert split_steps("a ки\nb ки\n", " ки") == [Step("a", 4), Step("\nb", 9)]


@hypothesis.given(strategies.text(alphabet="ab; \n", max_size=20))
def test_steps_of_any_text(text: str) -> None:
    steps = split_steps(text, ";")
    assert steps, "there is always one"
    ends = [step.end for step in steps]
    assert all(end is not None for end in ends[:-1])
    known = [end for end in ends if end is not None]
    assert known == sorted(set(known)) and all(text[end - 1] == ";" for end in known)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["a", ";", "b", ";", "c", ""], [1, 3, 5]),
        (["a;b", ";c", ""], [0, 1, 2]),
        (["a", ";b", ";"], [1, 2]),
        # A character that two tokens spell belongs to the second.
        (["a", "", ";", "b"], [2, 3]),
        (["ab", "c"], [1]),
        (["a;", ""], [0]),
    ],
)
def test_a_step_ends_at_the_token_that_holds_the_last_character(pieces: list[str], expected: list[int]) -> None:
    assert last_tokens(pieces, split_steps("".join(pieces), ";")) == expected


def test_a_separator_spread_over_tokens_ends_with_its_last_character() -> None:
    pieces = ["x", "\n", "\ny", "\n\n", "z", ""]
    assert last_tokens(pieces, split_steps("".join(pieces), "\n\n")) == [2, 3, 5]


def test_pieces_of_an_answer_leave_end_of_text_out(byte_level) -> None:
    codec = TextCodec(byte_level(eos_token="<|im_end|>"))
    prompt, answer = codec.encode_completion("hell", "o 12;w;ок")
    pieces = answer_pieces(codec, prompt, answer)
    assert len(pieces) == len(answer) and "".join(pieces) == "o 12;w;ок" and pieces[-1] == ""
    ends = last_tokens(pieces, split_steps("".join(pieces), ";"))
    assert [codec.decode(answer[: end + 1]) for end in ends] == ["o 12;", "o 12;w;", "o 12;w;ок"]
    assert ends[-1] == len(answer) - 1, "the last step ends with end-of-text"


def test_pieces_after_a_prompt_keep_the_space_that_a_decoder_would_strip(sentence_piece) -> None:
    codec = TextCodec(sentence_piece("<s> $A"))
    prompt, answer = codec.encode_completion("th", " a. th.")
    assert "".join(answer_pieces(codec, prompt, answer)) == " a. th."
