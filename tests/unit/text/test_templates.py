"""Templates from files, their variables, the tools they are told, and what is said about them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quartet.config.common import ModelConfig
from quartet.config.errors import UserError
from quartet.text.templates import with_template
from quartet.text.tokenizer import TextCodec

Build = Callable[..., PreTrainedTokenizerFast]
ASK: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
THINKING = """{% if tools %}T{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if thinking is defined and not thinking %}<think></think>{% endif %}{% endif %}"""


@pytest.fixture
def plain(byte_level: Build) -> PreTrainedTokenizerFast:
    return byte_level(None, eos_token="<|im_end|>")


def test_a_file_takes_the_place_of_the_tokenizers_own(chat: TextCodec, tmp_path: Path) -> None:
    own = chat.tokenizer.chat_template
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}", encoding="utf-8-sig")
    codec = TextCodec(with_template(chat.tokenizer, str(file), {}))
    assert codec.render(ASK) == "[hello]" and chat.tokenizer.chat_template == own


def test_variables_are_saved_with_the_template_and_whoever_passes_one_decides(plain: Any, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(THINKING)
    quiet = with_template(plain, str(tmp_path / "t.jinja"), {"thinking": False})
    quiet.save_pretrained(tmp_path / "saved")
    for tokenizer in (quiet, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert TextCodec(tokenizer).render(ASK).endswith("assistant\n<think></think>")
        asked = tokenizer.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True, thinking=True)
        assert asked.endswith("assistant\n")
    assert TextCodec(quiet).encode_prompt(ASK) != TextCodec(
        with_template(plain, str(tmp_path / "t.jinja"), {})
    ).encode_prompt(ASK)


@pytest.mark.parametrize(
    "value", [True, None, -3, 1.5e-7, "", 'it\'s "so"\n', "%}{% endif %}{{ x }}\\%", "é🙂\\n", [1, {"a": ["b", False]}]]
)
def test_a_variable_has_the_value_it_was_given(plain: Any, value: Any) -> None:
    plain.chat_template = "{{ x | tojson }}"
    expected = plain.apply_chat_template(ASK, tokenize=False, x=value)
    once = with_template(plain, None, {"x": value})
    assert TextCodec(once).render(ASK) == expected
    again = with_template(with_template(once, None, {"x": 7, "y": value}), None, {"x": value})
    assert TextCodec(again).render(ASK) == expected and again.chat_template.count("x is not defined") == 1


@pytest.mark.parametrize(
    "template", ["{{ 'a' }}", "\n{{ 'a' }}", "  {% if x %}\n\nb{% endif %}", "{%- if x %}\nb{% endif %}"]
)
def test_the_head_changes_nothing_else(plain: Any, template: str) -> None:
    plain.chat_template = template
    assert TextCodec(with_template(plain, None, {"x": 1})).render(ASK) == plain.apply_chat_template(
        ASK, tokenize=False, x=1
    )


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "add_generation_prompt", "a-b", ""])
def test_what_a_template_is_given_is_no_variable(name: str) -> None:
    with pytest.raises(UserError, match="cannot be set"):
        ModelConfig(path="m", chat_template_kwargs={name: 1})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{{ 1 }}\n\n{% if x %}", "line 3"),
        (b"{{ a b }}", "line 1"),
        (b" \n", "empty"),
        (b"\xff\xfe", "cannot be read"),
        (None, "no such chat template"),
    ],
)
def test_files_that_are_no_template(plain: Any, tmp_path: Path, content: bytes | None, expected: str) -> None:
    path = tmp_path / "t.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=expected) as refused:
        with_template(plain, str(path), {})
    assert "t.jinja" in refused.value.found


def test_variables_without_a_template(plain: Any) -> None:
    with pytest.raises(UserError, match="no chat template"):
        with_template(plain, None, {"x": 1})


def test_tools_reach_the_template_and_stay_through_turns(plain: Any) -> None:
    plain.chat_template = THINKING
    codec = TextCodec(plain)
    told = [{**ASK[0], "tools": [TOOL]}]
    head = 'T{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}'
    assert codec.render(told) == head + codec.render(ASK)
    prompt, _ = codec.encode_completion(told, "yes")
    assert codec.decode(prompt, skip_special=False) == codec.render(told)
    ids, mask = codec.encode_conversation([*told, {"role": "assistant", "content": "yes"}])
    assert ids[: len(prompt)] == prompt and not any(mask[: len(prompt)])


def test_a_template_of_its_own_for_tools(plain: Any) -> None:
    plain.chat_template = {"default": "d", "tool_use": "{{ tools | length }}"}
    told = [{**ASK[0], "tools": [TOOL]}]
    assert [TextCodec(plain).render(prompt) for prompt in (ASK, told)] == ["d", "1"]
