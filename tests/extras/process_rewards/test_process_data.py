"""Step-labelled rows: what is understood, what is reported with its row, and where the labels land."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quartet.config.errors import UserError
from quartet.data.datasets import TokenLimit
from quartet.data.readers import DataRow
from quartet.extras.process_rewards.data import ProcessData, StepLabelled, step_labelled
from quartet.extras.quickstart.tokenizer import build_tokenizer
from quartet.text.tokenizer import TextCodec


def rows(*values: dict[str, Any]) -> list[DataRow]:
    return [DataRow({"prompt": "1+1=", **value}, "f.jsonl", line) for line, value in enumerate(values, start=1)]


def parsed(*values: dict[str, Any], separator: str = ";") -> list[StepLabelled]:
    return list(step_labelled(rows(*values), separator).items)


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    """One token per character of ``0123456789+=;``."""
    return TextCodec(build_tokenizer())


def build(codec: TextCodec, *values: dict[str, Any], limit: int = 100, overlong: Any = "error") -> ProcessData:
    return ProcessData.build(step_labelled(rows(*values), ";"), codec, ";", TokenLimit(limit, overlong))


# Rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"steps": ["1", "2", "3"], "labels": [1, 0, -1]},
        {"steps": ["1;", "2;", "3"], "labels": [True, False, False]},
        {"steps": '["1", "2", "3"]', "labels": '["+", "-", "-"]'},
        {"completion": "1;2;3", "labels": [1.0, 0.0, 0]},
    ],
)
def test_the_ways_to_write_steps_and_hard_labels(row: dict[str, Any]) -> None:
    assert parsed(row) == [StepLabelled("1+1=", "1;2;3", (1.0, 0.0, 0.0), "f.jsonl:1")]


def test_soft_labels_and_steps_without_a_label() -> None:
    found = parsed({"completion": "1;2;3;", "labels": [0.25, None, 1]})
    assert found == [StepLabelled("1+1=", "1;2;3;", (0.25, None, 1.0), "f.jsonl:1")]


def test_a_last_step_may_end_with_the_separator_too() -> None:
    assert parsed({"steps": ["1", "2;"], "labels": [1, 1]})[0].completion == "1;2;"
    assert parsed({"steps": ["a", "b"], "labels": [1, 1]}, separator="\n\n")[0].completion == "a\n\nb"


def test_rows_without_any_label_are_left_out_and_counted() -> None:
    found = step_labelled(rows({"steps": ["1"], "labels": [1]}, {"steps": ["1"], "labels": [None]}), ";")
    assert len(found.items) == 1
    assert found.report() == ["1 rows left out: no step has a label (f.jsonl:2)"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"steps": ["1", "2"], "labels": [1]}, "1 labels for 2 steps that end with ';'"),
        ({"completion": "1;2;3", "labels": [1, 0]}, "2 labels for 3 steps that end with ';'"),
        ({"steps": ["1", "2"], "labels": [1, 1.5]}, "label 1.5 is not"),
        ({"steps": ["1"], "labels": [float("nan")]}, "label nan is not"),
        ({"steps": ["1"], "labels": ["good"]}, "label 'good' is not"),
        ({"steps": ["1"], "labels": "+-"}, "`labels` is '+-', not a list"),
        ({"steps": ["1", ""], "labels": [1, 1]}, "step '' is no text"),
        ({"steps": ["1;2", "3"], "labels": [1, 1]}, "step '1;2' is no text, or holds the separator ';'"),
        ({"steps": [], "labels": []}, "`labels` is [], not a list with entries"),
    ],
)
def test_labels_that_do_not_fit_are_reported_with_their_row(row: dict[str, Any], reason: str) -> None:
    fine = {"steps": ["1"], "labels": [1]}
    with pytest.raises(UserError, match="step labels do not fit") as caught:
        step_labelled(rows(fine, row, fine), ";")
    assert caught.value.found.startswith(f"f.jsonl:2: {reason}")


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"labels": [1]}, "lacks `prompt`, `steps` "),
        ({"steps": ["1"]}, "lacks `prompt`, `steps` "),
        ({"prompt": " ", "steps": ["1"], "labels": [1]}, "`prompt` is empty"),
        ({"completion": " ", "labels": [1]}, "`completion` is empty"),
    ],
)
def test_missing_and_empty_values(row: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match) as caught:
        step_labelled(rows(row), ";")
    assert "f.jsonl:1" in caught.value.found


# Tokens --------------------------------------------------------------------------------------------------


def test_labels_stand_on_the_last_tokens_of_their_steps(codec: TextCodec) -> None:
    data = build(
        codec,
        {"completion": "12;3;4", "labels": [1, None, 0.25]},
        {"prompt": "2+2=", "completion": "4;", "labels": [1]},
        {"completion": "5", "labels": [0]},
    )
    batch = data.select([0, 1, 2], ["a", "b", "c"])
    assert batch.ids == ("a", "c", "b"), "answers to one prompt stand together"
    assert batch.num_tokens == 4 + 7 + 2 + 4 + 3, "and share its tokens"
    texts = [codec.decode(batch.input_ids[: t + 1].tolist(), skip_special=False)
             for t in batch.token["step_mask"].nonzero().squeeze(1)]  # fmt: skip
    assert texts[0] == "1+1=12;" and texts[1] == "1+1=12;3;4<eos>" and texts[2].endswith("<eos>5<eos>")
    assert texts[3].endswith("2+2=4;")
    assert batch.token["step_labels"][batch.token["step_mask"]].tolist() == [1.0, 0.25, 0.0, 1.0]
    assert not bool(batch.token["step_labels"][~batch.token["step_mask"]].any())
    assert batch.token["step_labels"].dtype == torch.float32


def test_a_tokenizer_that_loses_the_separator_is_refused_with_the_rows(codec: TextCodec) -> None:
    data = step_labelled(rows({"completion": "1\n2", "labels": [1, 1]}), "\n")
    with pytest.raises(UserError, match="step labels do not fit") as caught:
        ProcessData.build(data, codec, "\n", TokenLimit(100))
    assert "f.jsonl:1: 2 steps, of which the tokenizer keeps 1" in caught.value.found


def test_two_steps_in_one_token_are_refused() -> None:
    vocabulary = {"<e>": 0, "1;2;": 1, "p": 2, "3": 3}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<e>"))
    backend.pre_tokenizer = pre_tokenizers.Split("#", behavior="removed")
    backend.decoder = decoders.Fuse()
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>"))
    data = step_labelled([DataRow({"prompt": "p", "completion": "#1;2;#3", "labels": [1, 0, 1]}, "f", 4)], ";")
    with pytest.raises(UserError) as caught:
        ProcessData.build(data, codec, ";", TokenLimit(100))
    assert caught.value.found == "f:4: two steps end in the same token"
