"""Tokenised data sets: which rows a step gets, what a batch holds, what happens to rows that are too long."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quartet.config.errors import UserError
from quartet.data.datasets import JudgedData, PreferenceData, PromptData, SFTData, TokenLimit, draw_batch, draw_row
from quartet.data.formats import ParsedRows
from quartet.text.examples import Conversation, Demonstration, Judgement, Preference, Prompt
from quartet.text.tokenizer import TextCodec


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    """One token per word: ``<e>`` 0, then a to f."""
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["<e>", *"abcdef"])}, unk_token="<e>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", unk_token="<e>"))


# Order -------------------------------------------------------------------------------------------------


@given(st.integers(0, 99), st.integers(0, 5), st.integers(1, 30))
def test_an_epoch_is_a_permutation(seed: int, epoch: int, n: int) -> None:
    drawn = [draw_row(seed, epoch * n + place, n) for place in range(n)]
    assert sorted(drawn) == [(row, epoch) for row in range(n)]


def test_epochs_and_seeds_differ() -> None:
    assert (
        len({tuple(row for row, _ in draw_batch(seed, epoch, 50, 50)) for seed in range(3) for epoch in range(3)}) == 9
    )


# Batches -----------------------------------------------------------------------------------------------


def test_sft_batch(codec: TextCodec) -> None:
    parsed: ParsedRows[Demonstration | Conversation] = ParsedRows(
        (Demonstration("a b", "c"), Demonstration("d", "e f"))
    )
    data = SFTData.build(parsed, codec, TokenLimit(8))
    batch = data.select([1, 0])
    assert batch.token_ids(0) == [4, 5, 6, 0] and batch.token_ids(1) == [1, 2, 3, 0]
    assert batch.token["loss_mask"].tolist() == [False, True, True, True, False, False, True, True]
    assert batch.token["loss_mask"].dtype is torch.bool


def test_ids_are_unique_even_when_a_batch_spans_epochs(codec: TextCodec) -> None:
    data = SFTData.build(ParsedRows((Demonstration("a", "b"), Demonstration("c", "d"))), codec, TokenLimit(8))
    assert len(set(data.batch(0, 5, seed=0).ids)) == 5
    assert data.batch(3, 5, seed=0).ids == data.batch(3, 5, seed=0).ids


def test_preference_batch(codec: TextCodec) -> None:
    data = PreferenceData.build(
        ParsedRows((Preference("a b", "c", "d e", 0.5), Preference("f", "a", ""))), codec, TokenLimit(8)
    )
    batch = data.select([0, 1])
    assert [batch.token_ids(s) for s in range(4)] == [[1, 2, 3, 0], [1, 2, 4, 5, 0], [6, 1, 0], [6, 0]]
    assert batch.num_tokens == 2 + 2 + 3 + 1 + 2 + 1
    assert batch.sequence["pair"].tolist() == [0, 0, 1, 1]
    assert batch.sequence["chosen"].tolist() == [True, False, True, False]
    assert batch.sequence["margin"].tolist() == [0.5, 0.5, 0.0, 0.0]
    assert len(set(data.batch(0, 5, seed=0).ids)) == 10


def test_prompt_items(codec: TextCodec) -> None:
    data = PromptData.build(
        ParsedRows((Prompt("a b", {"answer": "1"}), Prompt("c", {"answer": "2"}))), codec, TokenLimit(8)
    )
    assert data.items[1].columns == {"answer": "2"} and data.seen == {1, 2, 3}
    assert [item.num_tokens for item in data] == [2, 1]
    assert [item.prompt for item in data] == ["a b", "c"]
    assert len({item.prompt_id for item in data}) == 2


# Too long ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sft", "preference", "prompt"])
def test_too_long_is_an_error_or_counted(codec: TextCodec, kind: str) -> None:
    long = "a b c d e"
    place = "f.jsonl:2"
    build = {
        "sft": lambda **k: SFTData.build(
            ParsedRows((Demonstration("a", "b"), Demonstration("a", long, place))), codec, TokenLimit(5, **k)
        ),
        "preference": lambda **k: PreferenceData.build(
            ParsedRows((Preference("a", "b", "c"), Preference("a", "b", long, place=place))), codec, TokenLimit(5, **k)
        ),
        "prompt": lambda **k: PromptData.build(
            ParsedRows((Prompt("a"), Prompt(long, place=place))), codec, TokenLimit(4, **k)
        ),
    }[kind]
    with pytest.raises(UserError, match="longer than allowed") as caught:
        build()
    assert "1 of 2, first f.jsonl:2 with" in caught.value.found and "data.overlong=skip" in caught.value.remedy
    data = build(overlong="skip")
    assert not isinstance(data, PromptData) or data.seen == {1}, "ids of rows that are left out do not occur"
    assert len(data) == 1 and "1 rows left out" in data.warnings[0] and place in data.warnings[0]


def test_exactly_the_limit_fits_and_nothing_left_is_an_error(codec: TextCodec) -> None:
    parsed: ParsedRows[Demonstration | Conversation] = ParsedRows((Demonstration("a b", "c"),))
    assert len(SFTData.build(parsed, codec, TokenLimit(4))) == 1
    with pytest.raises(UserError, match="every sequence"):
        SFTData.build(parsed, codec, TokenLimit(3, "skip"))


def test_a_message_prompt_without_template_names_its_row(codec: TextCodec) -> None:
    with pytest.raises(UserError, match="no chat template") as caught:
        PromptData.build(
            ParsedRows((Prompt([{"role": "user", "content": "a"}], place="f.jsonl:9"),)), codec, TokenLimit(8)
        )
    assert "f.jsonl:9" in caught.value.found


# Real data ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        lambda codec: SFTData.build(ParsedRows((Demonstration("a", "b \ud83d", "f:2"),)), codec, TokenLimit(99)),
        lambda codec: PromptData.build(ParsedRows((Prompt("a \ud83d", {}, "f:2"),)), codec, TokenLimit(99)),
        lambda codec: PreferenceData.build(
            ParsedRows((Preference("a", "b \ud83d", "c", None, "f:2"),)), codec, TokenLimit(99)
        ),
        lambda codec: JudgedData.build(ParsedRows((Judgement("a", "b \ud83d", True, "f:2"),)), codec, TokenLimit(99)),
    ],
    ids=["sft", "prompts", "preference", "judged"],
)
def test_what_no_tokenizer_knows_is_named_with_its_row(codec: TextCodec, build: Any) -> None:
    with pytest.raises(UserError, match="cannot read a text") as caught:
        build(codec)
    assert caught.value.found.startswith("f:2: ") and caught.value.found.count("f:2") == 1
