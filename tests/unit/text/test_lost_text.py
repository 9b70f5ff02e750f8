"""Messages under a template: what ends an answer too early, twice or never, tool calls, weights.

The templates are those of well-known models in short form.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from quartet.config.common import DataConfig
from quartet.config.errors import UserError
from quartet.data.datasets import JudgedData, PreferenceData, SFTData, TokenLimit
from quartet.data.fields import ReadOptions
from quartet.data.formats import NoRowsLeft, demonstrations, judgements, preferences
from quartet.data.readers import DataRow, iter_rows
from quartet.text.tokenizer import TextCodec

Build = Callable[..., PreTrainedTokenizerFast]
END = "<|im_end|>"
_HEAD, _ASK = "<|im_start|>", "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def calls(arguments: str) -> str:
    head = "{% for c in m.tool_calls or [] %}{% set args = c.function.arguments %}<call>{{ c.function.name }} "
    return f"{head}{{{{ {arguments} }}}}</call>{{% endfor %}}"


def each(inner: str, roles: str = "true", end: str = END) -> str:
    turn = f"{_HEAD}{{{{ m.role }}}}\n{inner}{end}\n"
    return f"{{% for m in messages %}}{{% if {roles} %}}{turn}{{% endif %}}{{% endfor %}}{_ASK}"


TO_JSON = calls("args | tojson")
TEMPLATES = {
    "chatml": each("{{ m.content }}"),
    "qwen": each("{{ m.content }}" + TO_JSON),
    "qwen3": each(
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content.strip() }}\n</think>\n\n{{ m.content }}"
        "{% elif '</think>' in m.content and not loop.last %}{{ m.content.split('</think>')[-1].lstrip() }}"
        "{% else %}{{ m.content }}{% endif %}" + calls("args if args is string else args | tojson")
    ),
    "qwen3-coder": each("{{ m.content }}" + calls("args | items | list | tojson")),
    "llama3": each(
        "{% if m.tool_calls %}" + TO_JSON + "{% elif m.role == 'tool' %}{{ m.content | tojson }}"
        "{% else %}{{ m.content | trim }}{% endif %}"
    ),
    "mistral": each("{{ m.content }}", "m.role in ('user', 'assistant')"),
    "gemma": "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + each("{{ m.content | trim }}", "m.role in ('user', 'assistant')"),
}
ASK, YES = {"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}
ARGUMENTS = {"city": 'New "York"', "days": 3}
LIMIT = TokenLimit(9999)


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    tool_calls = [{"type": "function", "function": {"name": "look", "arguments": arguments}}]
    return {"role": "assistant", "tool_calls": tool_calls, **more}


def rows(*values: dict[str, Any]) -> list[DataRow]:
    return [DataRow(value, "f.jsonl", n) for n, value in enumerate(values, start=1)]


@pytest.fixture
def codec_of(byte_level: Build) -> Callable[[str], TextCodec]:
    return lambda template: TextCodec(byte_level(TEMPLATES.get(template, template), eos_token=END))


def sft(codec: TextCodec, *values: dict[str, Any], **how: Any) -> SFTData:
    return SFTData.build(demonstrations(rows(*values), ReadOptions(**how)), codec, LIMIT)


def pairs(codec: TextCodec, *values: dict[str, Any]) -> PreferenceData:
    return PreferenceData.build(preferences(rows(*values)), codec, LIMIT)


def text_of(codec: TextCodec, item: Any) -> str:
    return codec.decode(item.input_ids, skip_special=False)


def learned(codec: TextCodec, item: Any) -> str:
    marked = zip(item.input_ids, item.loss_mask, strict=True)
    return codec.decode([token for token, is_on in marked if is_on], skip_special=False)


# Answers that are one message ----------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [call(ARGUMENTS), {**YES, "reasoning_content": "two and two"}])
def test_an_answer_that_is_a_message_is_rendered_as_in_messages(codec_of: Any, answer: dict[str, Any]) -> None:
    codec = codec_of("qwen3")
    expected = learned(codec, sft(codec, {"messages": [ASK, answer]}).items[0])
    assert ("look" in expected and "York" in expected) or "two and two" in expected
    assert learned(codec, sft(codec, {"prompt": [ASK], "completion": answer}).items[0]) == expected
    assert learned(codec, sft(codec, {"prompt": ASK["content"], "completion": [answer]}).items[0]) == expected
    no = {**answer, "content": "no"}
    sides = [
        pairs(codec, {"chosen": [ASK, answer], "rejected": [ASK, no]}).items[0].answers,
        pairs(codec, {"prompt": [ASK], "chosen": answer, "rejected": no}).items[0].answers,
    ]
    judged = {"prompt": [ASK], "completion": answer, "label": False}
    sides.append(JudgedData.build(judgements(rows(judged)), codec, LIMIT).items[0].answers)
    assert {codec.decode(side[0], skip_special=False) for side in sides} == {expected}


@pytest.mark.parametrize("empty", [{**YES, "content": ""}, {**YES, "content": " \n", "tool_calls": []}])
def test_an_empty_answer_is_not_learned_unseen(codec_of: Any, empty: dict[str, Any]) -> None:
    codec = codec_of("chatml")
    with pytest.raises(UserError, match="`completion` is empty") as refused:
        sft(codec, {"prompt": [ASK], "completion": [empty]})
    assert "f.jsonl:1" in refused.value.found


# Ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", [END, END + "\n", END * 2, f"{END}\n{END} "])
def test_an_answer_ends_once(codec_of: Any, tail: str) -> None:
    codec = codec_of("chatml")
    expected = learned(codec, sft(codec, {"prompt": "a", "completion": "yes"}).items[0])
    assert expected == f"yes{END}"
    data = sft(codec, {"prompt": "a", "completion": f"yes{tail}"})
    assert learned(codec, data.items[0]) == expected
    talk = [ASK, {**YES, "content": f"yes{tail}"}, ASK, {**YES, "content": f"no{tail}"}]
    found = sft(codec, {"messages": talk})
    assert text_of(codec, found.items[0]).count(END) == 4 and learned(codec, found.items[0]) == f"yes{END}no{END}"
    (item,) = pairs(codec, {"prompt": "a", "chosen": f"yes{tail}", "rejected": "no"}).items
    assert [codec.decode(ids, skip_special=False) for ids in item.answers] == [f"yes{END}", f"no{END}"]


def test_an_answer_with_an_end_in_its_middle_is_left_out(codec_of: Any) -> None:
    """Which cut it there before, in a chat, and was learned as an end in plain text."""
    codec = codec_of("chatml")
    torn = f"The token {END} ends a turn."
    good = {"messages": [ASK, YES]}
    data = sft(codec, good, {"messages": [ASK, {**YES, "content": torn}]}, {"prompt": "a", "completion": torn})
    assert len(data) == 1
    (note,) = data.warnings
    assert note.startswith("2 rows left out: an answer holds the end-of-text token") and "f.jsonl:2, 3" in note
    with pytest.raises(NoRowsLeft, match="no row is left"):
        pairs(codec, {"prompt": [ASK], "chosen": "yes", "rejected": torn})
    asked = sft(codec, {"messages": [{**ASK, "content": f"What does {END} do?"}, YES]})
    assert learned(codec, asked.items[0]) == f"It is 4.{END}"
    assert len(sft(codec, {"text": f"a{END}b"})) == 1, "a document is learned as it is"


# Tool calls ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["qwen", "qwen3", "qwen3-coder", "llama3"])
@pytest.mark.parametrize("arguments", [ARGUMENTS, {}, {"text": "ä", "inner": {"a": [None, 1.5]}}])
def test_arguments_as_json_text_are_encoded_once(codec_of: Any, template: str, arguments: dict[str, Any]) -> None:
    """OpenAI's form, under templates that encode it, that write it as it is, and that go through an object."""
    codec = codec_of(template)
    given = json.dumps(arguments, ensure_ascii=False)
    form = given if template != "qwen3-coder" else json.dumps([*arguments.items()], ensure_ascii=False)
    ids = sft(codec, {"messages": [ASK, call(given)]}).items[0]
    assert learned(codec, ids) == f"<call>look {form}</call>{END}"
    assert ids == sft(codec, {"messages": [ASK, call(arguments)]}).items[0]
    prompt = codec.encode_prompt([ASK, call(given, content=""), {"role": "tool", "content": "sun"}])
    assert f"look {form}" in codec.decode(prompt, skip_special=False), "as served"


def test_tool_calls_from_parquet_have_no_null_keys(codec_of: Any, tmp_path: Path) -> None:
    """Parquet has one struct for all calls, with null for keys that one lacks."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    talk = [
        ASK,
        call({"city": "Paris"}),
        {"role": "tool", "content": "sun"},
        call({"days": 3}),
        {**ASK, "weight": 1},
        YES,
    ]
    path = tmp_path / "calls.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": talk}]), path)
    codec = codec_of("qwen")
    data = SFTData.build(demonstrations(iter_rows(DataConfig(path=str(path)))), codec, LIMIT)
    assert data.items[0].input_ids == sft(codec, {"messages": talk}).items[0].input_ids
    assert 'look {"days": 3}' in learned(codec, data.items[0]) and "null" not in text_of(codec, data.items[0])


def test_tool_calls_as_json_text(codec_of: Any) -> None:
    codec, given = codec_of("qwen"), call(ARGUMENTS)
    expected = sft(codec, {"messages": [ASK, given]}).items[0]
    text = json.dumps(given["tool_calls"])
    assert sft(codec, {"messages": [ASK, {**given, "tool_calls": text}]}).items[0] == expected
    for wrong, said in (("[{", "not valid JSON"), ("look(3)", "not valid JSON"), ([3], "not a list of calls")):
        with pytest.raises(UserError, match=f"`tool_calls` is {said}") as refused:
            sft(codec, {"messages": [ASK, {**given, "tool_calls": wrong}]})
        assert "f.jsonl:1, turn 2" in refused.value.found


# Content and weights -------------------------------------------------------------------------------------


def test_content_as_a_list_of_text_parts(codec_of: Any) -> None:
    parts = [{"type": "text", "text": "What is ", "image_url": None}, {"type": "text", "text": "2 + 2?"}]
    codec = codec_of("chatml")
    expected = sft(codec, {"messages": [ASK, YES]}).items[0]
    whole = [{"type": "text", "text": YES["content"]}]
    assert sft(codec, {"messages": [{**ASK, "content": parts}, {**YES, "content": whole}]}).items[0] == expected
    prompts_alone = [{"prompt": [{**ASK, "content": given}], "completion": YES} for given in (parts, ASK["content"])]
    one, other = sft(codec, *prompts_alone).items
    assert one.input_ids == other.input_ids
    for part in ({"type": "audio", "audio": "a.wav"}, {"type": "text"}, "text"):
        with pytest.raises(UserError, match="content is neither text nor a picture") as refused:
            sft(codec, {"messages": [{**ASK, "content": [*parts, part]}, YES]})
        assert "f.jsonl:1, turn 1" in refused.value.found


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + _ASK
)


@pytest.mark.parametrize("template", ["chatml", MARKED])
@pytest.mark.parametrize(("key", "off"), [("weight", 0), ("weight", 0.0), ("train", False)])
def test_turns_that_are_not_to_be_learned(codec_of: Any, template: str, key: str, off: Any) -> None:
    codec = codec_of(template)
    turns = [{**YES, "content": text} for text in ("one", "two", "three")]

    def data(*learns: Any) -> SFTData:
        talk = [turn for one, is_on in zip(turns, learns, strict=True) for turn in (ASK, {**one, key: is_on})]
        return sft(codec, {"messages": talk})

    on = 1 if key == "weight" else True
    plain = sft(codec, {"messages": [turn for one in turns for turn in (ASK, one)]}).items[0]
    assert data(on, on, on).items[0] == plain
    assert learned(codec, data(off, on, on).items[0]) == f"two{END}three{END}"
    assert data(off, on, on).items[0].input_ids == plain.input_ids
    last = data(on, off, off).items[0]
    assert learned(codec, last) == f"one{END}" and last.input_ids == plain.input_ids[: len(last.input_ids)]
    with pytest.raises(UserError, match="nothing to learn"):
        data(off, off, off)


def test_marks_that_do_not_tell_turns_apart(codec_of: Any) -> None:
    codec = codec_of("{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}")
    talk = [ASK, {**YES, "weight": 0}, ASK, YES]
    with pytest.raises(UserError, match="not clear which"):
        sft(codec, {"messages": talk})


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_under_a_key_of_their_own(codec_of: Any, key: str) -> None:
    codec = codec_of(TEMPLATES["qwen3"].replace("reasoning_content", key))
    item = sft(codec, {"prompt": [ASK], "completion": [{**YES, "content": "", key: "two and two"}]}).items[0]
    assert "two and two" in learned(codec, item)
