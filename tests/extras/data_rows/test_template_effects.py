"""What is said of the effects of chat templates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from quartet.extras.data_rows.rows import template_effects
from quartet.text.templates import with_template
from quartet.text.tokenizer import TextCodec

THINKING = """{% if tools %}T{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if thinking is defined and not thinking %}<think></think>{% endif %}{% endif %}"""


@pytest.fixture
def plain(byte_level: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    return byte_level(None, eos_token="<|im_end|>")


def test_effects(chat: TextCodec, marked: TextCodec, plain: Any) -> None:
    plain.chat_template = THINKING
    effects = {
        name: "\n".join(template_effects(tokenizer))
        for name, tokenizer in {
            "chat": chat.tokenizer,
            "marked": marked.tokenizer,
            "thinking": plain,
            "quiet": with_template(plain, None, {"thinking": False}),
        }.items()
    }
    assert "loss: on every assistant turn" in effects["chat"] and "kept in every turn" in effects["chat"]
    assert "before an answer: '<|im_start|>assistant\\n'" in effects["chat"]
    assert "tokens inside {% generation %}" in effects["marked"]
    assert "left out of earlier turns, kept in the last" in effects["thinking"]
    assert "rendered differently from what a prompt ends with" in effects["quiet"]


def test_effects_of_a_template_that_rewrites_turns(plain: Any) -> None:
    plain.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert "rendered differently from what a prompt ends with" in "\n".join(template_effects(plain))
    plain.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}<{{ m.content }}>{% endif %}{% endfor %}"
    )
    assert "conversations with several assistant turns are refused" in "\n".join(template_effects(plain))
    plain.chat_template = "{{ raise_exception('only one turn') }}"
    assert "only one turn" in "\n".join(template_effects(plain))
