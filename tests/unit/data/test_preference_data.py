"""Preference rows: equal pairs with their places, judged answers, batches, answers to other prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quartet.config.common import DataConfig
from quartet.config.errors import UserError
from quartet.data.datasets import JudgedData, PreferenceData, TokenLimit
from quartet.data.fields import ReadOptions
from quartet.data.formats import ParsedRows, has_judgements, judgements, preferences
from quartet.data.readers import DataRow, iter_rows
from quartet.text.examples import Judgement, Preference
from quartet.text.tokenizer import TextCodec

USER = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    """One token per word, in lower case: ``<e>`` 0, then a to f."""
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["<e>", *"abcdef"])}, unk_token="<e>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", unk_token="<e>"))


def rows(*values: dict[str, Any]) -> list[DataRow]:
    return [DataRow(value, "f.jsonl", line) for line, value in enumerate(values, start=1)]


def pair(chosen: str, rejected: str, **more: Any) -> dict[str, Any]:
    return {"prompt": "a", "chosen": chosen, "rejected": rejected, **more}


MIXED = rows(
    pair("b", "c"),
    pair("b", "b"),
    pair("", "c"),
    pair("b", "B"),
    pair("b c", "b c d"),
    pair("b c d", "b c"),
    pair("d", "e"),
    pair("e", "e"),
    pair("d e", "d e f"),
)
"""Lines 2 and 8 have equal texts, line 4 equal tokens, line 3 an empty answer. On lines 5 and 9 the chosen answer is
the beginning of the rejected one; on line 6 it is the other way round, which is no matter."""


# Equal pairs ---------------------------------------------------------------------------------------------


def test_equal_pairs_are_left_out_and_counted(codec: TextCodec) -> None:
    data = PreferenceData.build(preferences(MIXED), codec, TokenLimit(99))
    assert [item.place for item in data.items] == [f"f.jsonl:{n}" for n in (1, 3, 5, 6, 7, 9)]
    assert data.warnings == ("3 rows left out: chosen and rejected are the same (f.jsonl:2, 8, 4)",)


@pytest.mark.parametrize("margin", ["wide", float("inf"), [1], "nan"])
def test_a_margin_that_is_no_number_names_its_row(margin: Any) -> None:
    with pytest.raises(UserError, match="`margin` is not a finite number") as caught:
        preferences(rows(pair("b", "c", margin=1), pair("b", "c", margin=margin)))
    assert "f.jsonl:2" in caught.value.found


def test_margins_from_a_csv_file(codec: TextCodec, tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("prompt,better,worse,margin\na,b,c,0.5\na,c,b,\na,d,b,-2e-1\n", encoding="utf-8")
    columns = {"chosen": "better", "rejected": "worse"}
    parsed = preferences(list(iter_rows(DataConfig(path=str(path)))), ReadOptions(columns))
    data = PreferenceData.build(parsed, codec, TokenLimit(99))
    margins = data.select([0, 1, 2]).sequence["margin"].tolist()
    assert margins == pytest.approx([0.5, 0.5, 0.0, 0.0, -0.2, -0.2])


# Judged answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "expected"), [(True, True), (False, False), (1, True), (0, False), ("True", True), ("false", False)]
)
def test_judged_answers(label: Any, expected: bool) -> None:
    found = judgements(rows({"prompt": "a", "completion": "b", "label": label}))
    assert found.items == (Judgement("a", "b", expected, "f.jsonl:1"),)


def test_judged_answers_in_chat_and_empty_ones() -> None:
    chat = {"messages": [USER], "completion": {"role": "assistant", "content": "b"}, "label": True}
    found = judgements(rows(chat, {"prompt": "a", "completion": " ", "label": False}))
    assert found.items[0] == Judgement([USER], "b", True, "f.jsonl:1")


@pytest.mark.parametrize(
    ("row", "problem", "found"),
    [
        ({"prompt": "a", "completion": "b", "label": "good"}, "neither true nor false", "f.jsonl:1: 'good'"),
        ({"prompt": "a", "completion": "b", "label": 2}, "neither true nor false", "2"),
        ({"prompt": "a", "completion": "b"}, "lacks `prompt`, `completion` and `label`", "'prompt', 'completion'"),
        ({"completion": "b", "label": True}, "lacks `prompt` or `messages`", "f.jsonl:1"),
    ],
)
def test_judged_answers_that_stop_the_run(row: dict[str, Any], problem: str, found: str) -> None:
    with pytest.raises(UserError) as caught:
        judgements(rows(row))
    assert problem in caught.value.problem and found in caught.value.found


def test_which_kind_of_rows_there_are() -> None:
    judged = rows({"prompt": "a", "completion": "b", "label": True})
    assert has_judgements(judged) and not has_judgements(MIXED)
    assert has_judgements(
        rows({"prompt": "a", "answer": "b", "good": 1}), ReadOptions({"completion": "answer", "label": "good"})
    )
    assert not has_judgements(rows(pair("b", "c", completion="b", label=True)))


# Batches -------------------------------------------------------------------------------------------------


def test_a_batch_of_judged_answers(codec: TextCodec) -> None:
    data = JudgedData.build(
        ParsedRows((Judgement("a b", "c", True), Judgement("d", "e f", False))), codec, TokenLimit(8)
    )
    batch = data.select([1, 0])
    assert batch.token_ids(0) == [4, 5, 6, 0] and batch.token_ids(1) == [1, 2, 3, 0]
    assert batch.sequence["chosen"].tolist() == [False, True] and batch.sequence["pair"].tolist() == [0, 1]
    assert batch.sequence["row"].tolist() == [1, 0]
    assert batch.token["loss_mask"].tolist() == [False, True, True, True, False, False, True, True]
    assert len(set(data.batch(0, 5, seed=0).ids)) == 5
    with pytest.raises(UserError, match="longer than allowed"):
        JudgedData.build(ParsedRows((Judgement("a b", "c", True),)), codec, TokenLimit(3))


def test_both_answers_of_a_pair_carry_loss_and_their_prompt_does_not(codec: TextCodec) -> None:
    data = PreferenceData.build(
        ParsedRows((Preference("a b", "c", "d e"), Preference("f", "a", "b"))), codec, TokenLimit(8)
    )
    batch = data.select([1, 0])
    assert batch.token["loss_mask"].tolist() == [False, *[True] * 4, False, False, *[True] * 5]
    assert batch.sequence["row"].tolist() == [1, 1, 0, 0]


def test_answers_to_other_prompts(codec: TextCodec) -> None:
    """Rows 0 and 1 have the same prompt, so both take the answers of row 2; the last row takes those of the first."""
    texts = (("a", "b", "c"), ("a", "d", "e"), ("b b b", "c d e", "f"), ("c", "f", "a"))
    data = PreferenceData.build(ParsedRows(tuple(Preference(*text) for text in texts)), codec, TokenLimit(7))
    batch = data.mismatched([0, 1, 2, 3], ["w", "x", "y", "z"])
    assert [batch.token_ids(s) for s in range(8)] == [
        [1, 3, 4, 5, 0], [1, 6, 0],
        [1, 3, 4, 5, 0], [1, 6, 0],
        [2, 2, 2, 6, 0], [2, 2, 2, 1, 0],
        [3, 2, 0], [3, 3, 0],
    ]  # fmt: skip
    assert batch.ids[0] == "w/chosen" and batch.token["loss_mask"].sum() == 20
    # A long prompt leaves room for the beginning of a long answer only.
    long = ParsedRows((Preference("a", "b c d e f", "c"), Preference("b b b b", "a", "c")))
    cut = PreferenceData.build(long, codec, TokenLimit(7)).mismatched([1])
    assert cut.token_ids(0) == [2, 2, 2, 2, 2, 3, 4]
