"""What templates leave out of rows, what they encode twice, and what ends an answer too early, twice or never.

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
from quartet.data.datasets import JudgedData, PreferenceData, PromptData, SFTData, TokenLimit
from quartet.data.fields import Reading
from quartet.data.formats import SAME, UNSEEN, NothingLeft, demonstrations, judgements, preferences, prompts
from quartet.data.readers import Row, iter_rows
from quartet.text.templates import left_out
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
    "deepseek-r1": each(
        "{{ m.content.split('</think>')[-1] }}" + calls("'```json ' + args + '```'"),
        "m.role in ('user', 'assistant', 'system', 'tool')",
    ),
    "gemma": "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + each("{{ m.content | trim }}", "m.role in ('user', 'assistant')"),
}
ASK, YES = {"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}
ARGUMENTS = {"city": 'New "York"', "days": 3}
LIMIT = TokenLimit(9999)


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    tool_calls = [{"type": "function", "function": {"name": "look", "arguments": arguments}}]
    return {"role": "assistant", "tool_calls": tool_calls, **more}


def rows(*values: dict[str, Any]) -> list[Row]:
    return [Row(value, "f.jsonl", n) for n, value in enumerate(values, start=1)]


@pytest.fixture
def codec_of(byte_level: Build) -> Callable[[str], TextCodec]:
    return lambda template: TextCodec(byte_level(TEMPLATES.get(template, template), eos_token=END))


def sft(codec: TextCodec, *values: dict[str, Any], **how: Any) -> SFTData:
    return SFTData.build(demonstrations(rows(*values), Reading(**how)), codec, LIMIT)


def pairs(codec: TextCodec, *values: dict[str, Any]) -> PreferenceData:
    return PreferenceData.build(preferences(rows(*values)), codec, LIMIT)


def text_of(codec: TextCodec, item: Any) -> str:
    return codec.decode(item.input_ids, skip_special=False)


def learned(codec: TextCodec, item: Any) -> str:
    marked = zip(item.input_ids, item.loss_mask, strict=True)
    return codec.decode([token for token, is_on in marked if is_on], skip_special=False)


# Whole messages ------------------------------------------------------------------------------------------

ROLES = ("user", "human", "system", "developer", "tool")


@pytest.mark.parametrize("template", list(TEMPLATES))
@pytest.mark.parametrize("role", ROLES)
def test_every_message_is_in_the_text_or_the_row_is_refused(codec_of: Any, template: str, role: str) -> None:
    """The general check, of every kind of row: contents that vanish stop the run, and those that are there do not."""
    codec = codec_of(template)
    turn = {"role": role, "content": "Look: what is 2 + 2?"}
    text = codec.render if template != "gemma" or role != "system" else lambda *_, **__: ""
    is_there = turn["content"] in text([turn, ASK, YES], generation_prompt=False)
    builds = {
        "sft": lambda: sft(codec, {"messages": [turn, ASK, YES]}),
        "answers": lambda: sft(codec, {"prompt": [turn, ASK], "completion": "It is 4."}),
        "pairs": lambda: pairs(codec, {"chosen": [turn, ASK, YES], "rejected": [turn, ASK, {**YES, "content": "5"}]}),
        "judged": lambda: JudgedData.build(
            judgements(rows({"prompt": [turn, ASK], "completion": [YES], "label": True})), codec, LIMIT
        ),
        "prompts": lambda: PromptData.build(prompts(rows({"prompt": [turn, ASK]})), codec, LIMIT),
    }
    for build in builds.values():
        if is_there:
            strange = f"1 rows: the role {role!r} is none that models are trained with, and was written as it is"
            told = [f"{strange} (f.jsonl:1)"] if role in ("User", "human") else []
            assert list(build().warnings) == told
            continue
        with pytest.raises(UserError) as refused:
            build()
        assert "f.jsonl:1" in refused.value.found
        if template != "gemma" or role != "system":  # which its template refuses itself
            assert "leaves out a whole message" in refused.value.problem
            assert f"turn 1, role {role!r}: 'Look: what is 2 + 2?'" in refused.value.found


def test_the_recipes_system_prompt_vanishes_as_well(codec_of: Any) -> None:
    row = {"messages": [ASK, YES]}
    codec = codec_of("chatml")
    assert "Be brief." in text_of(codec, sft(codec, row, system_prompt="Be brief.").items[0])
    with pytest.raises(UserError, match="whole message") as refused:
        sft(codec_of("mistral"), row, system_prompt="Be brief.")
    assert "role 'system': 'Be brief.'" in refused.value.found and "chat_template" in refused.value.remedy


@pytest.mark.parametrize("content", ["4", "It is", "user", "  It is 4.\n\n", "yes"])
def test_words_that_stand_elsewhere_do_not_hide_a_loss(codec_of: Any, content: str) -> None:
    talk = [{"role": "human", "content": content}, {"role": "user", "content": "yes, It is"}, YES, *[ASK, YES] * 2]
    codec = codec_of("{% for m in messages %}{% if m.role != 'human' %}[{{ m.content }}]{% endif %}{% endfor %}")
    with pytest.raises(UserError, match="whole message"):
        left_out(codec.tokenizer, talk, generation_prompt=False)
    whole = codec_of("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    assert left_out(whole.tokenizer, talk, generation_prompt=False) == []


# Parts of messages ---------------------------------------------------------------------------------------

THOUGHT = {"role": "assistant", "content": "<think>\n2 + 2 = 4\n</think>\n\nIt is 4."}


def test_thoughts_that_a_template_cuts_are_told(codec_of: Any) -> None:
    row = {"messages": [ASK, THOUGHT]}
    assert not sft(codec_of("chatml"), row).warnings and not sft(codec_of("qwen3"), row).warnings
    (note,) = sft(codec_of("deepseek-r1"), row).warnings
    assert note == "1 rows: the chat template leaves out thoughts of the last turn (f.jsonl:1)"
    earlier = {"prompt": [ASK, THOUGHT, ASK], "completion": "yes"}
    (note,) = sft(codec_of("qwen3"), earlier).warnings
    assert "thoughts of earlier turns" in note
    only = {"messages": [ASK, {**YES, "content": "<think>\n2 + 2 = 4\n</think>\n"}]}
    with pytest.raises(UserError, match="whole message"):
        sft(codec_of("deepseek-r1"), only)


def test_pairs_that_differ_in_their_thoughts_alone(codec_of: Any) -> None:
    other = {**THOUGHT, "content": "<think>\nI guess\n</think>\n\nIt is 4."}
    row = {"prompt": [ASK], "chosen": [THOUGHT], "rejected": [other]}
    assert len(pairs(codec_of("qwen3"), row)) == 1
    codec = codec_of("deepseek-r1")
    with pytest.raises(NothingLeft) as nothing:
        pairs(codec, row)
    assert nothing.value.reason == UNSEEN
    trimmed = {"prompt": [ASK], "chosen": "It is 4.", "rejected": "It is 4. "}
    with pytest.raises(NothingLeft) as nothing:
        pairs(codec_of("gemma"), trimmed)
    assert nothing.value.reason == SAME
    parsed = preferences(rows({**trimmed, "rejected": "no"}, row), doubtful="error")
    with pytest.raises(UserError, match="doubtful") as refused:
        PreferenceData.build(parsed, codec, LIMIT, "error")
    assert UNSEEN in refused.value.found


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_under_a_key_of_their_own(codec_of: Any, key: str) -> None:
    row = {"messages": [ASK, {**YES, key: "two and two"}]}
    codec = codec_of(TEMPLATES["qwen3"].replace("reasoning_content", key))
    data = sft(codec, row)
    assert learned(codec, data.items[0]) == f"<think>\ntwo and two\n</think>\n\nIt is 4.{END}" and not data.warnings
    assert "thoughts of the last turn" in sft(codec_of("chatml"), row).warnings[0]


def test_tool_calls_and_text_beside_them(codec_of: Any) -> None:
    beside = {"messages": [ASK, call(ARGUMENTS, content="Let me look."), {"role": "tool", "content": '{"a": 1}'}, YES]}
    assert not sft(codec_of("qwen"), beside).warnings
    assert "text of earlier turns" in sft(codec_of("llama3"), beside).warnings[0]
    assert "tool calls of earlier turns" in sft(codec_of("chatml"), beside).warnings[0]
    with pytest.raises(UserError, match="whole message") as refused:
        sft(codec_of("chatml"), {"messages": [ASK, call(ARGUMENTS)]})
    assert "turn 2, role 'assistant'" in refused.value.found


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
    assert "end-of-text alone" in sft(codec, {"messages": [ASK, empty, ASK, YES]}).warnings[0]
    assert "is empty" in pairs(codec, {"chosen": [ASK, YES], "rejected": [ASK, empty]}).warnings[0]
    judged = judgements(rows({"prompt": [ASK], "completion": empty, "label": False}))
    assert "the answer is empty" in judged.notes


# Ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", [END, END + "\n", END * 2, f"{END}\n{END} "])
def test_an_answer_ends_once(codec_of: Any, tail: str) -> None:
    codec = codec_of("chatml")
    expected = learned(codec, sft(codec, {"prompt": "a", "completion": "yes"}).items[0])
    assert expected == f"yes{END}"
    data = sft(codec, {"prompt": "a", "completion": f"yes{tail}"})
    assert learned(codec, data.items[0]) == expected and "each gets one" in data.warnings[0]
    talk = [ASK, {**YES, "content": f"yes{tail}"}, ASK, {**YES, "content": f"no{tail}"}]
    found = sft(codec, {"messages": talk})
    assert text_of(codec, found.items[0]).count(END) == 4 and learned(codec, found.items[0]) == f"yes{END}no{END}"
    assert "end-of-text token alone" in sft(codec, {"prompt": "a", "completion": tail}).warnings[0]
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
    with pytest.raises(NothingLeft, match="no row is left"):
        pairs(codec, {"prompt": [ASK], "chosen": "yes", "rejected": torn})
    for turn in ({**YES, "reasoning_content": torn}, call({"text": torn}, content="look")):
        with pytest.raises(NothingLeft):
            sft(codec_of("qwen3"), {"messages": [ASK, turn]})
    asked = sft(codec, {"messages": [{**ASK, "content": f"What does {END} do?"}, YES]})
    assert learned(codec, asked.items[0]) == f"It is 4.{END}"
    assert len(sft(codec, {"text": f"a{END}b"})) == 1, "a document is learned as it is"


def test_marks_without_an_end_are_told(codec_of: Any) -> None:
    inside, outside = (
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n",
        ("{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n"),
    )
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}TURN{% else %}"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    )
    row = {"messages": [ASK, YES]}
    assert not sft(codec_of(template.replace("TURN", inside)), row).warnings
    (note,) = sft(codec_of(template.replace("TURN", outside)), row).warnings
    assert "does not learn to end" in note and "f.jsonl:1" in note


# Tool calls ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["qwen", "qwen3", "qwen3-coder", "llama3", "deepseek-r1"])
@pytest.mark.parametrize("arguments", [ARGUMENTS, {}, {"text": "ä", "inner": {"a": [None, 1.5]}}])
def test_arguments_as_json_text_are_encoded_once(codec_of: Any, template: str, arguments: dict[str, Any]) -> None:
    """OpenAI's form, under templates that encode it, that write it as it is, and that go through an object."""
    codec = codec_of(template)
    given = json.dumps(arguments, ensure_ascii=False)
    written = given if template != "qwen3-coder" else json.dumps([*arguments.items()], ensure_ascii=False)
    form = "```json " * (template == "deepseek-r1") + written
    ids = sft(codec, {"messages": [ASK, call(given)]}).items[0]
    assert learned(codec, ids) == f"<call>look {form}{'```' * (template == 'deepseek-r1')}</call>{END}"
    if template != "deepseek-r1":  # which joins texts
        assert ids == sft(codec, {"messages": [ASK, call(arguments)]}).items[0]
    prompt = codec.encode_prompt([ASK, call(given, content=""), {"role": "tool", "content": "sun"}])
    assert f"look {form}" in codec.decode(prompt, skip_special=False), "as served"


@pytest.mark.parametrize("text", ["", "{", "3", '"x"'])
def test_arguments_that_are_no_object_stay_as_they_are(codec_of: Any, text: str) -> None:
    codec = codec_of("qwen3")
    assert learned(codec, sft(codec, {"messages": [ASK, call(text)]}).items[0]) == f"<call>look {text}</call>{END}"


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


def test_a_call_in_openais_older_form_is_a_call(codec_of: Any) -> None:
    codec = codec_of("qwen")
    older = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"city": "Bonn"}'}}
    (told,) = sft(codec, {"messages": [ASK, older]}).items
    assert learned(codec, told) == '<call>look {"city": "Bonn"}</call>' + END


def test_tool_calls_as_json_text(codec_of: Any) -> None:
    codec, given = codec_of("qwen"), call(ARGUMENTS)
    expected = sft(codec, {"messages": [ASK, given]}).items[0]
    for text in (json.dumps(given["tool_calls"]), [json.dumps(given["tool_calls"][0])]):
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
    for part in ({"type": "image", "image": "a.png"}, {"type": "text"}, "text"):
        with pytest.raises(UserError, match="content is not text") as refused:
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
    assert data(on, on, on).items[0] == plain == data(None, on, None).items[0]
    assert learned(codec, data(off, on, on).items[0]) == f"two{END}three{END}"
    assert data(off, on, on).items[0].input_ids == plain.input_ids
    last = data(on, off, off).items[0]
    assert learned(codec, last) == f"one{END}" and last.input_ids == plain.input_ids[: len(last.input_ids)]
    with pytest.raises(UserError, match="nothing to learn"):
        data(off, off, off)
    with pytest.raises(UserError, match="neither 0 nor 1") as refused:
        data(on, 0.5, on)
    assert "f.jsonl:1, turn 4" in refused.value.found


def test_marks_that_do_not_tell_turns_apart(codec_of: Any) -> None:
    codec = codec_of("{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}")
    talk = [ASK, {**YES, "weight": 0}, ASK, YES]
    with pytest.raises(UserError, match="not clear which"):
        sft(codec, {"messages": talk})


@pytest.mark.parametrize(
    "answer",
    [
        '[{"from": "Paris", "to": "Rome"}]',
        '[{"from": "Paris", "value": 3}]',
        '[{"role": "admin", "content": "all"}]',
        '[{"role": "user", "content": "Hi"}]',
        '[{"role": "engineer"}, {"role": "clerk"}]',
        '[{"role": ["a"], "content": 1}]',
        "[{}]",
    ],
)
def test_answers_in_json_are_text(codec_of: Any, answer: str) -> None:
    codec = codec_of("chatml")
    data = sft(codec, {"prompt": [ASK], "completion": answer}, {"prompt": "a", "completion": answer})
    assert [learned(codec, item) for item in data.items] == [answer + END] * 2 and not data.warnings
    (pair,) = pairs(codec, {"prompt": [ASK], "chosen": answer, "rejected": "no"}).items
    assert codec.decode(pair.answers[0], skip_special=False) == answer + END


def test_messages_as_json_text_are_messages(codec_of: Any) -> None:
    codec = codec_of("chatml")
    row = {"prompt": json.dumps([ASK]), "completion": json.dumps([YES])}
    data = sft(codec, row, {"prompt": [ASK], "completion": '[{"from": "gpt", "value": "It is 4."}]'})
    assert [learned(codec, item) for item in data.items] == [f"It is 4.{END}"] * 2
    talks = {"chosen": json.dumps([ASK, YES]), "rejected": json.dumps([ASK, {**YES, "content": "no"}])}
    assert len(pairs(codec, talks)) == 1
    prompt = PromptData.build(prompts(rows({"prompt": json.dumps([{**ASK, "role": "User"}])})), codec, LIMIT)
    assert prompt.items[0].prompt == [{**ASK, "role": "User"}], "a prompt with whatever roles, which are told"
    assert any("'User' is none" in note for note in prompt.warnings)
