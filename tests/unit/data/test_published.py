"""Formats as they are published: HH-RLHF's dialogues, TRL's forms, rows that are tokenised already."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.config.errors import UserError
from quartet.data.datasets import SFTData, TokenLimit
from quartet.data.fields import ReadOptions
from quartet.data.formats import demonstrations, judgements, preferences, prompts
from quartet.data.readers import DataRow
from quartet.extras.process_rewards.data import step_labelled
from quartet.extras.quickstart.tokenizer import build_tokenizer
from quartet.text.examples import Preference, Prompt, TextDocument, Tokenised
from quartet.text.tokenizer import TextCodec

PLACE = "f.jsonl:1"


def rows(*values: dict[str, Any]) -> list[DataRow]:
    return [DataRow(value, "f.jsonl", line) for line, value in enumerate(values, start=1)]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


# Prompts in two columns, and other names ------------------------------------------------------------------


def test_a_prompt_of_two_columns() -> None:
    reading = ReadOptions({"prompt": "instruction + input", "completion": "output"})
    given = [{"instruction": "Add.", "input": text, "output": "3"} for text in ("1 + 2", "", None)]
    assert [row.prompt for row in demonstrations(rows(*given), reading).items] == ["Add.\n\n1 + 2", "Add.", "Add."]
    assert prompts(rows(given[0]), reading).items[0].prompt == "Add.\n\n1 + 2"
    of_that_name = {"instruction + input": "One.", "instruction": "Other.", "input": "", "output": "3"}
    assert demonstrations(rows(of_that_name), reading).items[0].prompt == "One."
    with pytest.raises(UserError, match="column 'input' is joined"):
        demonstrations(rows({"instruction": "Add.", "input": [1], "output": "3"}), reading)
    with pytest.raises(UserError, match="no column 'instruction \\+ input'"):
        demonstrations(rows({"instruction": "Add.", "output": "3"}), reading)


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"conversations": [turn("user", "Hi"), turn("assistant", "Ho")]}, ["data.columns.messages=conversations"]),
        (
            {"instruction": "a", "input": "", "output": "b"},
            ["'data.columns.prompt=instruction + input'", "data.columns.completion=output"],
        ),
        ({"unheard": "of"}, ["data.columns.prompt=question"]),
    ],
)
def test_the_columns_that_are_meant_are_told(row: dict[str, Any], keys: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        demonstrations(rows(row))
    assert caught.value.remedy == "rename the columns, or map them: " + " ".join(keys)
    told = [key.strip("'").removeprefix("data.columns.").split("=") for key in keys]
    if "unheard" not in row:
        assert len(demonstrations(rows(row), ReadOptions(dict(told))).items) == 1  # type: ignore[arg-type]


# HH-RLHF -------------------------------------------------------------------------------------------------

ASKED = "\n\nHuman: Who?\n\nAssistant: Me.\n\nHuman: And\n\nyou?\n\nAssistant:"


def test_dialogues_are_cut_behind_the_last_turn_they_share() -> None:
    row = {"chosen": f"{ASKED} Yes, I", "rejected": f"{ASKED} Yes, me"}
    (found,) = preferences(rows(row)).items
    assert found == Preference(ASKED, " Yes, I", " Yes, me", None, PLACE)
    assert prompts(rows({**row, "id": 7})).items == (Prompt(ASKED, {"id": 7}, PLACE),)


def test_an_empty_answer_of_a_dialogue_is_the_data_s_own() -> None:
    found = preferences(rows({"chosen": f"{ASKED} No.", "rejected": f"{ASKED} "}))
    assert found.items[0].rejected == " "


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ("\n\nHuman: a\n\nAssistant: b", "\n\nHuman: c\n\nAssistant: b"),
        (f"{ASKED} b\n\nHuman: c\n\nAssistant: d", f"{ASKED} e\n\nHuman: c\n\nAssistant: d"),
        (f"{ASKED} b", f"{ASKED} b\n\nHuman: c\n\nAssistant: d"),
    ],
)
def test_dialogues_that_differ_earlier_are_left_out(chosen: str, rejected: str) -> None:
    fine = {"chosen": f"{ASKED} Yes", "rejected": f"{ASKED} No"}
    found = preferences(rows(fine, {"chosen": chosen, "rejected": rejected}))
    assert dict(found.skipped) == {"the conversations differ before their last turn": 1} and len(found.items) == 1


# Texts that begin alike ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue.", "The sky is green.", "The sky is"),
        ("The sky is", "The sky is blue", "The sky"),
        ("Q: a\nA: b c", "Q: a\nA: b\td", "Q: a\nA: b"),
    ],
)
def test_texts_are_cut_before_the_word_that_differs(chosen: str, rejected: str, prompt: str) -> None:
    (found,) = preferences(rows({"chosen": chosen, "rejected": rejected, "score": 1})).items
    assert found == Preference(prompt, chosen[len(prompt) :], rejected[len(prompt) :], None, PLACE)


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": "Yes", "rejected": "No"},
        {"chosen": "The one", "rejected": "The other", "question": "Which?"},
        {"chosen": "The one", "rejected": "The other", "prompt": None},
    ],
)
def test_a_prompt_is_not_made_up(row: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="lacks `prompt`"):
        preferences(rows(row))


# TRL's forms ---------------------------------------------------------------------------------------------

USER, YES, NO = turn("user", "u"), turn("assistant", "yes"), turn("assistant", "no")


def test_unpaired_stepwise_and_tools() -> None:
    assert judgements(rows({"prompt": [USER], "completion": [YES], "label": False})).items[0].label is False
    row = {"prompt": "p", "completions": ["one", "two"], "labels": [True, False]}
    (found,) = step_labelled(rows(row), "\n").items
    assert (found.completion, found.labels) == ("one\ntwo", (1.0, 0.0))
    tools = [{"type": "function"}]
    assert prompts(rows({"prompt": [USER], "tools": tools})).items[0].columns == {"tools": tools}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    messages = demonstrations(rows({"messages": [USER, call, turn("tool", "4"), YES]})).items[0].messages  # type: ignore[union-attr]
    assert messages[1] == {**call, "content": ""}


def test_null_and_nan_are_missing_and_not_text() -> None:
    for value in (None, float("nan")):
        with pytest.raises(UserError, match="null: 'prompt'"):
            prompts(rows({"prompt": value, "answer": 1}))


# Language modelling and token ids ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(build_tokenizer())


def test_every_token_of_a_text_is_learned(codec: TextCodec) -> None:
    parsed = demonstrations(rows({"text": "1+2=3"}))
    assert parsed.items == (TextDocument("1+2=3", PLACE),)
    (item,) = SFTData.build(parsed, codec, TokenLimit(99)).items
    assert list(item.input_ids) == [*codec.encode_prompt("1+2=3"), codec.eos_id]
    assert item.loss_mask == (False, *[True] * (len(item.input_ids) - 1)), "nothing predicts the first"


@pytest.mark.parametrize(
    ("row", "ids", "mask"),
    [
        ({"input_ids": [3, 4, 5]}, [3, 4, 5], [0, 1, 1]),
        ({"input_ids": [3, 4, 5], "labels": [-100, -100, 5]}, [3, 4, 5], [0, 0, 1]),
        ({"input_ids": [3, 4], "attention_mask": [1, 1]}, [3, 4], [0, 1]),
    ],
)
def test_token_ids_stay_as_they_are(row: dict[str, Any], ids: list[int], mask: list[int], codec: TextCodec) -> None:
    parsed = demonstrations(rows(row))
    assert parsed.items == (Tokenised(tuple(ids), tuple(map(bool, mask)), PLACE),)
    (item,) = SFTData.build(parsed, codec, TokenLimit(99)).items
    assert (list(item.input_ids), list(item.loss_mask)) == (ids, mask)


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"input_ids": [3, 4, 1000]}, "id 1000 at place 2"),
        ({"input_ids": [3, 4], "labels": [-100, 5]}, "label 5 at place 1 is neither -100 nor the id 4"),
        ({"input_ids": [3, 4], "labels": [4]}, "`labels` has 1 entries for 2 ids"),
        ({"input_ids": [3, 4], "labels": [-100, -100]}, "no token carries loss"),
        ({"input_ids": [3, 4, 5], "attention_mask": [1, 1, 0]}, "marks padding"),
        ({"input_ids": [3.5, 4]}, "[3.5, 4]"),
    ],
)
def test_token_ids_that_cannot_be_used_are_refused_with_their_row(
    row: dict[str, Any], found: str, codec: TextCodec
) -> None:
    fine = {"input_ids": [3, 4]}
    with pytest.raises(UserError) as caught:
        SFTData.build(demonstrations(rows(fine, row)), codec, TokenLimit(99))
    assert "f.jsonl:2: " in caught.value.found and found in caught.value.found
