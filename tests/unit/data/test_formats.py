"""The formats people have, recognised row by row; what is refused, left out or noted."""

from typing import Any

import pytest

from quartet.config.errors import UserError
from quartet.data.fields import ReadOptions
from quartet.data.formats import demonstrations, preferences, prompts
from quartet.data.readers import DataRow
from quartet.text.examples import Conversation, Demonstration, Preference, Prompt

USER, YES, NO = ({"role": r, "content": c} for r, c in (("user", "u"), ("assistant", "yes"), ("assistant", "no")))


def rows(*values: dict[str, Any]) -> list[DataRow]:
    return [DataRow(value, "f.jsonl", line) for line, value in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "p", "completion": "c"}, Demonstration("p", "c", "f.jsonl:1")),
        ({"prompt": [USER], "completion": "c"}, Demonstration([USER], "c", "f.jsonl:1")),
        ({"prompt": [USER], "completion": [YES]}, Demonstration([USER], "yes", "f.jsonl:1")),
        ({"prompt": "u", "completion": [YES]}, Demonstration([USER], "yes", "f.jsonl:1")),
        ({"messages": [USER, YES]}, Conversation([USER, YES], "f.jsonl:1")),
        ({"messages": '[{"role": "user", "content": "u"}, {"role": "assistant", "content": "yes"}]'},
         Conversation([USER, YES], "f.jsonl:1")),
        ({"messages": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "yes"}]},
         Conversation([USER, YES], "f.jsonl:1")),
        ({"messages": [{**USER, "name": None}, YES], "prompt": None}, Conversation([USER, YES], "f.jsonl:1")),
    ],
)  # fmt: skip
def test_demonstrations(row: dict[str, Any], expected: Any) -> None:
    assert demonstrations(rows(row)).items == (expected,)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": "yes", "rejected": "no"},
        {"messages": [USER], "chosen": "yes", "rejected": "no"},
        {"messages": [USER], "chosen": YES, "rejected": NO},
        {"chosen": [USER, YES], "rejected": [USER, NO]},
        {"prompt": "u", "chosen": [USER, YES], "rejected": [USER, NO]},
        {"prompt": "u", "chosen": [YES], "rejected": [NO]},
        {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
    ],
)
def test_preferences_in_chat(row: dict[str, Any]) -> None:
    assert preferences(rows(row)).items == (Preference([USER], "yes", "no", None, "f.jsonl:1"),)


def test_preferences_in_text_with_margin() -> None:
    found = preferences(rows({"prompt": "p", "chosen": "a", "rejected": "b", "margin": "0.5"}))
    assert found.items == (Preference("p", "a", "b", 0.5, "f.jsonl:1"),)


def test_a_longer_shared_beginning() -> None:
    row = {"chosen": [USER, NO, USER, YES], "rejected": [USER, NO, USER, NO]}
    assert preferences(rows(row)).items[0].prompt == [USER, NO, USER]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "p", "answer": 4}, Prompt("p", {"answer": 4}, "f.jsonl:1")),
        ({"prompt": "p", "completion": "c"}, Prompt("p", {"completion": "c"}, "f.jsonl:1")),
        ({"messages": [USER, YES, USER], "answer": 4}, Prompt([USER, YES, USER], {"answer": 4}, "f.jsonl:1")),
        ({"chosen": [USER, YES], "rejected": [USER, NO], "k": 1}, Prompt([USER], {"k": 1}, "f.jsonl:1")),
    ],
)
def test_prompts(row: dict[str, Any], expected: Prompt) -> None:
    assert prompts(rows(row)).items == (expected,)


def test_a_final_answer_is_taken_off_a_prompt() -> None:
    found = prompts(rows({"messages": [USER, YES]}))
    assert found.items[0].prompt == [USER]


def test_columns_are_mapped_and_the_others_kept() -> None:
    found = prompts(
        rows({"question": "q", "answer": "4", "id": 7}), ReadOptions({"prompt": "question", "solution": "answer"})
    )
    assert found.items == (Prompt("q", {"id": 7, "solution": "4"}, "f.jsonl:1"),)
    assert (
        demonstrations(rows({"q": "a", "a": "b"}), ReadOptions({"prompt": "q", "completion": "a"})).items[0].completion
        == "b"
    )
    swapped = preferences(
        rows({"prompt": "p", "chosen": "a", "rejected": "b"}), ReadOptions({"chosen": "rejected", "rejected": "chosen"})
    )
    assert (swapped.items[0].chosen, swapped.items[0].rejected) == ("b", "a")


def test_a_value_inside_an_object_is_mapped_by_its_path() -> None:
    row = rows({"question": "q", "reward_model": {"ground_truth": "4"}})
    found = prompts(row, ReadOptions({"prompt": "question", "answer": "reward_model.ground_truth"}))
    assert found.items[0].columns["answer"] == "4"


def test_rows_left_out_are_counted_with_their_places() -> None:
    found = preferences(
        rows(
            {"prompt": "p", "chosen": "a", "rejected": "b"},
            {"prompt": "p", "chosen": "a", "rejected": "a"},
            {"chosen": [USER, YES], "rejected": [USER, YES]},
            {"chosen": [USER, YES, USER, YES], "rejected": [USER, NO, USER, NO]},
            {"prompt": "p", "chosen": "a", "rejected": ""},
            {"prompt": "p", "chosen": True, "rejected": "no"},
        )
    )
    assert [pair.chosen for pair in found.items] == ["a", "a", "True"]
    assert dict(found.skipped) == {
        "chosen and rejected are the same": 2,
        "the conversations differ before their last turn": 1,
    }
    assert found.report()[0] == "2 rows left out: chosen and rejected are the same (f.jsonl:2, 3)"


@pytest.mark.parametrize(
    ("parse", "row", "problem", "found"),
    [
        (demonstrations, {"question": "q", "x": None}, "lacks `prompt` and `completion`", "has 'question'; null: 'x'"),
        (demonstrations, {"prompt": "p", "completion": " "}, "`completion` is empty", "f.jsonl:1: ' '"),
        (demonstrations, {"prompt": "", "completion": "c"}, "`prompt` is empty", "f.jsonl:1"),
        (demonstrations, {"prompt": "p", "completion": ["c"]}, "needs `role` and `content`", "turn 1: 'c'"),
        (demonstrations, {"messages": [USER]}, "no assistant turn", "['user']"),
        (demonstrations, {"messages": [YES, USER]}, "no assistant turn", "['assistant', 'user']"),
        (demonstrations, {"messages": []}, "not a list of messages", "[]"),
        (demonstrations, {"messages": "hello"}, "not a list of messages", "'hello'"),
        (demonstrations, {"messages": [USER, {"role": "assistant"}]}, "needs `role` and `content`", "turn 2"),
        (
            demonstrations,
            {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
            "neither text nor",
            "turn 1",
        ),
        (demonstrations, {"messages": [USER, {"role": "assistant", "content": 3}]}, "both text", "turn 2"),
        (preferences, {"prompt": "p", "chosen": "c"}, "lacks `chosen` and `rejected`", "'prompt', 'chosen'"),
        (preferences, {"chosen": "c", "rejected": "r"}, "lacks `prompt` or `messages`", "'chosen', 'rejected'"),
        (preferences, {"prompt": "p", "chosen": "c", "rejected": [NO]}, "`rejected` is not text", "f.jsonl:1"),
        (preferences, {"prompt": "p", "chosen": "c", "rejected": "r", "margin": "wide"}, "`margin`", "'wide'"),
        (preferences, {"prompt": "p", "chosen": "c", "rejected": "r", "margin": float("nan")}, "`margin`", "nan"),
        (preferences, {"prompt": "p", "chosen": [USER], "rejected": [NO]}, "one assistant message", "['user']"),
        (preferences, {"prompt": "p", "chosen": "a", "rejected": "a"}, "no row is left", "the same"),
        (prompts, {"text": "p"}, "lacks `prompt`, `messages`", "'text'"),
        (prompts, {"prompt": {"a": 1}}, "needs `role`", "f.jsonl:1"),
        (prompts, {"messages": [YES]}, "only assistant turns", "f.jsonl:1"),
    ],
)
def test_rows_that_stop_the_run(parse: Any, row: dict[str, Any], problem: str, found: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(rows(row))
    assert problem in caught.value.problem and found in caught.value.found


def test_a_mapping_to_a_column_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"did you mean 'question'") as caught:
        prompts(rows({"question": "q"}), ReadOptions({"prompt": "qestion"}))
    assert "data.columns.prompt" in caught.value.problem
