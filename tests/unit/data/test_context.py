"""System prompts and tools of conversations, and files that change while they are read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quartet.config.errors import UserError
from quartet.data.fields import ReadOptions
from quartet.data.formats import demonstrations, judgements, preferences, prompts
from quartet.data.readers import DataRow
from quartet.extras.process_rewards.data import step_labelled

USER, YES, NO = ({"role": r, "content": c} for r, c in (("user", "u"), ("assistant", "yes"), ("assistant", "no")))
KIND, OWN = {"role": "system", "content": "kind"}, {"role": "system", "content": "own"}
TOOL = {"type": "function", "function": {"name": "look"}}
READING = ReadOptions(system_prompt="kind")


def rows(value: dict[str, Any]) -> list[DataRow]:
    return [DataRow(value, "f.jsonl", 1)]


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sft": (demonstrations, {"prompt": [USER], "completion": "yes"}),
    "conversation": (demonstrations, {"messages": [USER, YES]}),
    "pairs": (preferences, {"prompt": [USER], "chosen": "yes", "rejected": "no"}),
    "whole conversations": (preferences, {"chosen": [USER, YES], "rejected": [USER, NO]}),
    "judgements": (judgements, {"prompt": [USER], "completion": "yes", "label": True}),
    "prompts": (prompts, {"messages": [USER, YES]}),
    "steps": (lambda r, reading: step_labelled(r, ";", reading), {"prompt": [USER], "steps": ["a"], "labels": [1]}),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_system_prompt_and_tools_in_every_kind_of_row(kind: str) -> None:
    parse, row = KINDS[kind]
    parsed = parse(rows({**row, "tools": json.dumps([TOOL])}), READING)
    found = getattr(parsed.items[0], "messages", None) or parsed.items[0].prompt
    assert found[:2] == [{**KIND, "tools": [TOOL]}, USER]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": [USER]}, [KIND, USER]),
        ({"prompt": [USER], "system": None}, [KIND, USER]),
        ({"prompt": [USER], "system": "own"}, [OWN, USER]),
        ({"prompt": [USER], "system": ""}, [USER]),
        ({"prompt": [OWN, USER], "system": "other"}, [OWN, USER]),
        ({"prompt": [{**OWN, "role": "developer"}, USER]}, [{**OWN, "role": "developer"}, USER]),
    ],
)
def test_whose_system_prompt_comes_first(row: dict[str, Any], expected: Any) -> None:
    assert prompts(rows(row), READING).items[0].prompt == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([TOOL], [TOOL]),
        (TOOL, [TOOL]),
        (json.dumps([TOOL, TOOL]), [TOOL, TOOL]),
        ([{**TOOL, "strict": None, "function": {"name": "look", "parameters": None}}], [TOOL]),
        ([], None),
        ("", None),
        ("[]", None),
        (None, None),
        (float("nan"), None),
    ],
)
def test_tools_as_people_have_them(given: Any, expected: Any) -> None:
    parsed = prompts(rows({"prompt": [USER], "tools": given}))
    (message,) = parsed.items[0].prompt
    assert isinstance(message, dict) and message.get("tools") == expected
    assert parsed.items[0].columns["tools"] is given, "rewards receive the column as it is"


@pytest.mark.parametrize(
    ("given", "expected"),
    [("[{", "not valid JSON"), ([3], "JSON schemas"), (3, "JSON sch")],
)
def test_tools_that_are_none(given: Any, expected: str) -> None:
    with pytest.raises(UserError, match=expected) as refused:
        prompts(rows({"prompt": [USER], "tools": given}))
    assert "f.jsonl:1" in refused.value.found


def test_plain_text_has_neither() -> None:
    assert prompts(rows({"prompt": "u", "tools": ["calculator"], "system": "own"}), READING).items[0].prompt == "u"
